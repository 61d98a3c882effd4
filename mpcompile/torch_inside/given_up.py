"""What Dynamo gives up at its limit of compiles is said: from then on, whatever is new to it runs
as torch runs it, in FP32.

Nothing of ours is called at that moment: Dynamo notes it, and runs the frame in Python. So its
notes are looked at after each call of what `mpcompile()` returned, and before the steps of
optimizers, where `torch.compile(backend="mpcompile")` trains.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import CodeType
from typing import Any

from torch.optim import Optimizer

from ..errors import MPCompileError, shortened, warn
from .dynamo import whole_of
from .names import get_compilation_metrics
from .private_names import MissingInTorch

_Code = tuple[str, str, int]  # a function's name, its file and first line

_LIMIT = "recompile limit"


class _Compiled:
    """What is known of this process.

    Attributes:
        strict: for the code that we compiled, whether it is an error if Dynamo gives it up.
        until: when the last compile began that was looked at, in microseconds.
    """

    def __init__(self) -> None:
        self.strict: dict[_Code, bool] = {}
        self.until = 0


_state = _Compiled()


def compiled(code: CodeType | None, *, strict: bool) -> None:
    """Note that a graph of this code was compiled by us. After a graph break, the function's own
    code counts as well: it may have no graph before, and without it the break isn't reached.
    """
    for one in () if code is None else (code, whole_of(code)):
        _state.strict[one.co_name, one.co_filename, one.co_firstlineno] = strict


def look(_: Optimizer | None = None) -> None:
    """Warn of what Dynamo has given up since the last look. Also asked before optimizers' steps.

    Raises:
        MPCompileError: it was compiled with strict=True.
    """
    try:
        known = get_compilation_metrics()
    except MissingInTorch:  # then torch's own line in the log is all that is said
        return
    if not known or _began(known[-1]) <= _state.until:
        return
    new = [metrics for metrics in known if _began(metrics) > _state.until]
    _state.until = max(map(_began, known))
    for metrics in new:
        if _LIMIT in (metrics.fail_reason or ""):
            _say(metrics, known)


def _say(given_up: Any, known: Sequence[Any]) -> None:
    frame, _, count = given_up.compile_id.rpartition("/")  # of frame 3 after 8 compiles: "3/8"
    code = ("", "", 0)
    reasons: dict[str, None] = {}
    for one in known:
        number, _, compiles = (one.compile_id or "").rpartition("/")
        if number != frame:
            continue
        if one.co_name:
            code = (one.co_name, one.co_filename, one.co_firstlineno)
        if compiles == "0":  # after a reset Dynamo begins with 0 again
            reasons = {}
        elif one.recompile_reason:
            reasons[_plain(one.recompile_reason)] = None
    if code not in _state.strict:
        return
    text = (
        f"mpcompile: {re.sub(r'_[0-9]+$', '', code[0])} was compiled {count} times, torch's "
        "limit. Whatever is new to it from now on runs as torch runs it, in FP32. What changed: "
        f"{shortened([*reversed(reasons)], most=3)}. Keep that the same, or raise "
        "torch._dynamo.config.recompile_limit before you compile the model"
    )
    if _state.strict[code]:
        raise MPCompileError(text)
    warn(text)


def _began(metrics: Any) -> int:
    return metrics.start_time_us or 0


def _plain(reason: str) -> str:
    """A guard that failed, in one line: the compile that it is compared with and advice are left
    out, and a parameter has its path in the module.
    """
    said = re.sub(r"^\d+/\d+: ", "", reason.partition("\n")[0])
    said = re.split(r"\. Guard failed| \(HINT", said)[0]
    said = re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", said)
    return re.sub(r"\s+", " ", said).strip().rstrip(".")
