"""What the planner decides, and what it must not decide: numerical risk is not a cost in bytes.

At O1 a FOLLOW operator that computes with an FP32 value is FULL, whatever that costs: a path that
accumulates stays FP32. At O2 an operator is FULL if it reads only values that a guard or the user
wants in FP32 (their range is unknown), if no path of undecided operators joins it to a LOW one, or
if it passes a probability on to FP32 arithmetic; and a result that such arithmetic reads is not
rounded. Residual streams, and what is read digit by digit (a place in a table, an angle), are
decided as at O1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import fx

from .. import ir
from ..rules import Kind
from ..rules.policy import Config, Level, Precision
from .min_cut import OF_RESULT
from .reads import counted_operands, is_trained, read_by, root
from .residuals import residual_streams
from .times import seconds

LOW, FULL, FOLLOW, KEEP = Precision.LOW, Precision.FULL, Precision.FOLLOW, Precision.KEEP


@dataclass(frozen=True)
class Rounded:
    """A choice at O2: whether the result of an FP32 operator is rounded to the low dtype for all
    its readers. It is an item of its own, between the operator and its readers.
    """

    node: fx.Node

    @property
    def name(self) -> str:
        return self.node.name + OF_RESULT


Item = fx.Node | Rounded


class Constraints:
    """What must be decided in one graph, and which of that is settled beforehand.

    Attributes:
        streams: what must not be rounded at O2, not even in a view of it.
        open: the items to decide: nodes in program order, then which results are rounded.
        rounded: node -> the item that says whether its result is rounded.
    """

    def __init__(self, graph: fx.Graph, config: Config) -> None:
        self.config = config
        nodes = [n for n in graph.nodes if self._is_open(n)]
        self.rounded = {n: Rounded(n) for n in graph.nodes if self._may_be_rounded(n)}
        self.open: list[Item] = [*nodes, *self.rounded.values()]
        self._members = set(self.open)
        self._follow = {n for n in nodes if ir.precision(n) is FOLLOW}
        self._digits = ir.read_by_digit(graph) if config.level is Level.O2 else set()
        self.streams = residual_streams(graph) if config.level is Level.O2 else set()
        self._wide = self._find_wide(graph)
        self._near_low = self._find_near_low()
        self._tiny = self._find_tiny(graph)

    def is_open(self, item: Item) -> bool:
        """Whether the planner decides this item."""
        return item in self._members

    def is_low(self, item: Item) -> bool | None:
        """Whether an item is LOW; None if that is still to be decided."""
        if item in self._members or isinstance(item, Rounded):
            return None
        return ir.precision(item) is LOW

    def against_low(self, item: Item) -> Iterator[str]:
        """The reasons why the item must not be low at any cost."""
        if isinstance(item, Rounded):
            by_digit = item.node in self._digits
            if by_digit or self._read_exactly(item.node) or self._stays_tiny(item.node):
                yield "read exactly"
            if item.node in self.streams:
                yield "residual stream"
            if not any(ir.precision(n) is LOW or n in self._near_low for n in item.node.users):
                yield "nothing low near"
        elif item in self._follow:
            if self.config.level is Level.O2 and self._stays_tiny(item):
                yield "read exactly"
            if self.config.level is Level.O2 and item not in self._near_low:
                yield "nothing low near"
            if self.config.level is Level.O1 and not counted_operands(item):
                yield "no operand"
            if item in self.streams:
                yield "residual stream"
            value = ir.captured(item)
            if value is not None and value.ndim == 0:
                yield "one number"

    def forced_by(self, node: fx.Node) -> list[fx.Node]:
        """The operands that force an open node to FP32 if they are FP32."""
        if node not in self._follow:
            return []
        if ir.kind(node) is Kind.MOVE:  # else a whole table is cast to look up some rows
            return read_by(node)
        if ir.kind(node) is Kind.VIEW:
            return read_by(node) if node in self._digits else []
        forced = self.config.level is Level.O1 or node in self._digits or node in self._wide
        return counted_operands(node) if forced else []

    # -- which nodes ------------------------------------------------------------------------------

    def _is_open(self, node: fx.Node) -> bool:
        if ir.precision(node) is FOLLOW:
            return True
        profile = self.config.profile
        return (
            ir.precision(node) is LOW
            and profile is not None
            and profile.is_measured  # no estimate takes a product out of the low dtype
            and ir.mark(node).by is ir.By.TABLE
            and ir.mark(node).low is self.config.low
            and not any(ir.is_low_input(root(n)) for n in read_by(node))  # no FP32 copy of it
            and seconds(node, self.config) is not None
        )

    def _may_be_rounded(self, node: fx.Node) -> bool:
        """Whether it computes in FP32 with low input and result: O2's norms, softmax, and rows
        looked up in a parameter.
        """
        wide = ir.precision(node) is FULL and ir.mark(node).by is ir.By.TABLE
        moves = ir.precision(node) is FOLLOW and ir.kind(node) is Kind.MOVE
        looked_up = moves and all(is_trained(root(n)) for n in read_by(node))
        may = looked_up or (wide and ir.rule(node).rounds_result)
        return self.config.level is Level.O2 and may and ir.was_f32(node)

    def _find_wide(self, graph: fx.Graph) -> set[fx.Node]:
        """The nodes computed only from values of any magnitude: values that must be FP32 (because
        of a guard, the user, a `.float()`), and results of operators that grow or invert.
        """
        wide: set[fx.Node] = set()
        for node in graph.nodes:
            if ir.precision(node) is KEEP or (ir.precision(node) is FULL and _is_wide(node)):
                wide.add(node)
            elif node in self._follow:
                operands = counted_operands(node)
                if operands and all(operand in wide for operand in operands):
                    wide.add(node)
        return wide

    def _find_near_low(self) -> set[fx.Node]:
        """The FOLLOW nodes that a path of FOLLOW nodes joins to a LOW node, in either direction."""
        around = {n: [*n.all_input_nodes, *n.users] for n in self._follow}
        beside = [n for n in self._follow if any(ir.precision(m) is LOW for m in around[n])]
        return set(ir.reached(beside, lambda n: self._follow.intersection(around[n])))

    def _find_tiny(self, graph: fx.Graph) -> set[fx.Node]:
        """Probabilities, and FOLLOW nodes that pass them on: by a gate, a mixture or a view."""
        tiny: set[fx.Node] = set()
        for node in graph.nodes:
            if ir.precision(node) is FULL and ir.rule(node).tiny:
                tiny.add(node)
            elif node in self._follow and (operands := counted_operands(node)):
                enough = any if ir.rule(node).hands_on_tiny else all
                if enough(operand in tiny for operand in operands):
                    tiny.add(node)
        return tiny

    # -- values that FP32 arithmetic reads --------------------------------------------------------

    def _stays_tiny(self, node: fx.Node) -> bool:
        """Whether an FP32 operator reads a probability, directly or passed on: its log, say."""
        return node in self._tiny and self._goes_on_in_full(node, self._tiny.__contains__)

    def _read_exactly(self, node: fx.Node) -> bool:
        """Whether an FP32 operator reads the value, or something computed from it without a LOW
        operand: a logarithm after a softmax. It must not read values that underflowed.
        """

        def beside_nothing_low(reader: fx.Node) -> bool:
            return not any(ir.precision(n) is LOW for n in map(root, read_by(reader)))

        return self._goes_on_in_full(node, beside_nothing_low)

    def _goes_on_in_full(self, node: fx.Node, through: Callable[[fx.Node], bool]) -> bool:
        """Whether the value reaches an FP32 operator through such FOLLOW nodes alone."""
        follow = self._follow
        readers = ir.reached(node.users, lambda n: n.users if n in follow and through(n) else ())
        others = (n for n in readers if n not in follow and ir.precision(n) is not LOW)
        return not all(ir.rule(reader).rounds_result for reader in others)


def _is_wide(node: fx.Node) -> bool:
    """Whether an FP32 node's result is not known to stay within the low dtype's range."""
    if ir.mark(node).by not in (ir.By.TABLE, ir.By.KERNEL, ir.By.ALIAS):
        return True
    return ir.rule(node).grows or ir.rule(node).sensitive
