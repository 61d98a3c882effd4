"""What is known about operators, and what a user may request about precision.

`table.py` is the one place that names operators; `lookup.py` answers questions about them.
"""

from .lookup import (
    PACKETS,
    RNN_OPS,
    castable,
    known_ops,
    multiplies,
    places,
    register_rule,
    rule_for,
    rule_named,
    written_args,
)
from .rule import UNKNOWN, Keeps, Kind, Recurrent, Rule
