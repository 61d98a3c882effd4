"""What is known about operators, and what a user may request about precision.

`table.py` is the one place that names operators; `lookup.py` answers questions about them.
"""

from .lookup import (
    PACKETS,
    RNN_OPS,
    castable,
    compared_args,
    digit_args,
    found_args,
    known_ops,
    masked_args,
    multiplies,
    register_rule,
    rule_for,
    rule_named,
    written_args,
)
from .rule import UNKNOWN, Keeps, Kind, Recurrent, Rule

__all__ = [
    "PACKETS",
    "RNN_OPS",
    "UNKNOWN",
    "Keeps",
    "Kind",
    "Recurrent",
    "Rule",
    "castable",
    "compared_args",
    "digit_args",
    "found_args",
    "known_ops",
    "masked_args",
    "multiplies",
    "register_rule",
    "rule_for",
    "rule_named",
    "written_args",
]
