"""What mpcompile logs, through Python's `logging`.

Each record has a text for people, and the same facts as plain data in its attribute `mpcompile`:

    record.getMessage()    "mpcompile: the loss scale moves from 65536 to 32768"
    record.mpcompile       {"event": "moved", "before": 65536.0, "after": 32768.0}

No handler and no level is set here: these belong to the application.
"""

from __future__ import annotations

import logging
from typing import Any

TOPICS = ("compile", "fallback", "optim", "passes", "profile", "repair", "scale", "verify")
"""The loggers, each `mpcompile.<topic>`."""

_loggers = {topic: logging.getLogger(f"mpcompile.{topic}") for topic in TOPICS}


def event(topic: str, level: int, name: str, text: str, /, **data: Any) -> None:
    """Log one event.

    Args:
        topic: one of `TOPICS`.
        level: of the record, such as `logging.INFO`.
        name: what happened, for a program that reads the records.
        text: what happened, for people; `%(key)s` stands for an entry of `data`.
        **data: plain values, such as JSON can hold.
    """
    facts = {"event": name, **data}
    _loggers[topic].log(
        level, f"mpcompile: {text}", facts, extra={"mpcompile": facts}, stacklevel=2
    )


def is_heard(topic: str, level: int) -> bool:
    """Whether anybody listens, for what takes work to find out."""
    return _loggers[topic].isEnabledFor(level)
