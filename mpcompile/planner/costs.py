"""What a precision costs: the objective that the planner minimises, in bytes of memory traffic.

    total = sum over values  stored(v) + time(v) + doubt(v) + weights(v)
          + sum over edges   cast(u, v)   where u and v differ

stored   A value that leaves its kernel is written once and read by each reader behind it: 4 bytes
         an element each time in FP32, 2 in the low dtype; counted is the difference. It leaves if
         a reader stands in another kernel (fusion is modelled: see `_levels`), or if the backward
         reads it. A reader that is bound to be LOW doesn't count: it gets a low copy anyway.
time     What the device profile predicts for a product in either dtype, forward and backward,
         counted in the bytes that memory moves meanwhile. Without a profile products stay LOW.
doubt    A tenth of the time in the low dtype: what is no faster for certain stays FP32.
weights  A LOW product casts its FP32 weights (6 bytes an element) and their gradients back (4);
         nothing where it reads a working copy.
cast     Where one reader's kernel can't cast, a second copy: written, in place of what the other
         readers share. What no fusion absorbs, 6 bytes an element and a launch: from an input or a
         product straight into a product. Any other cast rides in a kernel that runs anyway: up
         it is free, down it rounds, which counts a sixteenth of a byte an element: enough to break
         a tie.

Numerical risk is no number. At O1 a FOLLOW operator that does arithmetic on an FP32 value is FULL
(an accumulating path stays FP32), whatever it costs; and what the backward reads doesn't count, for
it reads what the forward stored and computes the rest again. At O2 an operator is FULL that reads
only what a guard or the user wants in FP32 (its range is unknown), or that no path of undecided
operators joins to a LOW one, or that hands a probability on to FP32 arithmetic; and no result is
stored low that such arithmetic goes on with.

All costs are whole numbers, in sixteenths of a byte.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

from .. import ir, rules
from ..ir.shapes import Product
from ..padding.products import product
from ..profile.model import Profile
from ..rules import Keeps
from ..rules.policy import Config, Level, Precision
from . import attention
from .cut import NEVER

UNIT = 16  # of a byte
DOUBT = 10  # a tenth of a predicted time: about how far predictions are off
LOW, FULL, FOLLOW, KEEP = Precision.LOW, Precision.FULL, Precision.FOLLOW, Precision.KEEP


@dataclass
class Costs:
    """The terms of one node, in units of a sixteenth byte: term -> cost.

    Attributes:
        low, full: what either precision costs.
    """

    low: dict[str, int] = field(default_factory=dict)
    full: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Stored:
    """How the result of an FP32 operator is stored at O2: an item of its own, between the two."""

    node: fx.Node


Item = fx.Node | Stored


class Objective:
    """The costs of one graph, for what is to be decided in it.

    Attributes:
        open: the nodes to decide, in program order, then how results are stored.
        terms: item -> its own costs.
        pairs: (operand, reader) -> (cost if only the operand is LOW, if only the reader is). A
            node that is decided already stands in pairs, too.
    """

    def __init__(self, graph: fx.Graph, config: Config) -> None:
        self.config = config
        self.launch = _launch(config)
        nodes = [n for n in graph.nodes if self._is_open(n)]
        self._follow = {n for n in nodes if ir.precision(n) is FOLLOW}
        self._stored = {n: Stored(n) for n in graph.nodes if self._may_be_stored_low(n)}
        self.open: list[Item] = [*nodes, *self._stored.values()]
        self._members = set(self.open)
        self._wide = self._find_wide(graph)
        self._near_low = self._find_near_low()
        self._tiny = self._find_tiny(graph)
        self._apart = {n: _is_apart(n) for n in graph.nodes}
        self._levels = self._find_levels(graph)
        self.terms = {item: self._own(item) for item in self.open}
        self.pairs = self._pairs(graph)

    # -- which nodes ------------------------------------------------------------------------------

    def _is_open(self, node: fx.Node) -> bool:
        if ir.precision(node) is FOLLOW:
            return True
        return (
            ir.precision(node) is LOW
            and ir.mark(node).rule == "table"
            and ir.mark(node).low is self.config.low
            and seconds(node, self.config) is not None
        )

    def _may_be_stored_low(self, node: fx.Node) -> bool:
        """FP32 inside, low in and out: O2's norms, softmax, and rows looked up in a parameter."""
        wide = ir.precision(node) is FULL and ir.mark(node).rule == "table"
        moves = ir.precision(node) is FOLLOW and ir.kind(node) is rules.Kind.MOVE
        looked_up = moves and all(_is_trained(_root(n)) for n in _read_by(node))
        storable = looked_up or (wide and ir.rule(node).rounds_result)
        return self.config.level is Level.O2 and storable and ir.was_f32(node)

    def _find_wide(self, graph: fx.Graph) -> set[fx.Node]:
        """What is computed from nothing but values of any magnitude: those that somebody wants in
        FP32 (a guard, the user, a `.float()`), the results of operators that grow or invert.
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
        """FOLLOW nodes that a path of FOLLOW nodes joins to a LOW one, as producer or consumer."""
        around = {n: [*n.all_input_nodes, *n.users] for n in self._follow}
        work = [n for n in self._follow if any(ir.precision(m) is LOW for m in around[n])]
        near = set(work)
        while work:
            fresh = [n for n in around[work.pop()] if n in self._follow and n not in near]
            near.update(fresh)
            work += fresh
        return near

    def _find_tiny(self, graph: fx.Graph) -> set[fx.Node]:
        """Probabilities, and FOLLOW nodes that hand them on: by a gate, as a mixture, as a view."""
        tiny: set[fx.Node] = set()
        for node in graph.nodes:
            if ir.precision(node) is FULL and ir.rule(node).tiny:
                tiny.add(node)
            elif node in self._follow and (operands := counted_operands(node)):
                enough = any if ir.rule(node).hands_on_tiny else all
                if enough(operand in tiny for operand in operands):
                    tiny.add(node)
        return tiny

    def _stays_tiny(self, node: fx.Node) -> bool:
        """Whether something in FP32 reads a probability, handed on or not: its logarithm, say."""
        return node in self._tiny and self._goes_on_in_full(node, self._tiny.__contains__)

    def _read_exactly(self, node: fx.Node) -> bool:
        """Whether something in FP32 reads the value, or what is computed from it and from nothing
        low: a logarithm behind a softmax. It must not be handed what underflowed.
        """

        def beside_nothing_low(reader: fx.Node) -> bool:
            return not any(ir.precision(n) is LOW for n in map(_root, _read_by(reader)))

        return self._goes_on_in_full(node, beside_nothing_low)

    def _goes_on_in_full(self, node: fx.Node, through: Callable[[fx.Node], bool]) -> bool:
        """Whether the value reaches an FP32 operator by way of such FOLLOW nodes alone."""
        readers = dict.fromkeys(node.users)
        for reader in (work := list(readers)):  # it grows
            if reader not in self._follow:
                if ir.precision(reader) is not LOW and not ir.rule(reader).rounds_result:
                    return True
            elif through(reader):
                work += [user for user in reader.users if user not in readers]
                readers.update(dict.fromkeys(reader.users))
        return False

    def is_low(self, item: Item) -> bool | None:
        """An item's label where it is decided, or None."""
        if item in self._members or isinstance(item, Stored):
            return None
        return ir.precision(item) is LOW

    def milliseconds(self, cost: int) -> str:
        """A cost that stands for time, as time."""
        assert self.config.profile is not None
        return f"{cost / UNIT / self.config.profile.bandwidth * 1e3:.3g}"

    # -- fusion -----------------------------------------------------------------------------------

    def _find_levels(self, graph: fx.Graph) -> dict[fx.Node, int]:
        """How many kernels must have run before a node's; equal numbers may be one kernel."""
        levels: dict[fx.Node, int] = {}
        for node in graph.nodes:
            after = [
                levels[n] + (self._apart[n] or self._apart[node])
                for n in node.all_input_nodes
                if ir.is_op(n) or ir.is_getitem(n)
            ]
            levels[node] = max(after, default=0)
        return levels

    def _leaves(self, node: fx.Node, reader: fx.Node) -> bool:
        """Whether the value must lie in memory for this reader."""
        apart = self._apart[node] or self._apart[reader]
        return apart or self._levels[node] != self._levels[reader]

    # -- costs of a node --------------------------------------------------------------------------

    def _own(self, item: Item) -> Costs:
        costs = Costs()
        node = item.node if isinstance(item, Stored) else item
        if ir.kind(node) is rules.Kind.VIEW:
            # Where a cast may stand before or behind a view, it stands before: once for all views.
            costs.full["view"] = _numel(node) // 2 if self._views_full(node) else 1
            return costs
        if (times := seconds(node, self.config)) is not None:
            costs.low["time"], costs.full["time"] = (self._as_bytes(s) for s in times)
            costs.low["doubt"] = costs.low["time"] // DOUBT
            costs.low["weights"] = sum(self._weight(n) for n in _weights(node, self.config))
        apart = node in self._stored and not isinstance(item, Stored)
        if not apart and (stored := self._times_stored(node)):
            costs.full["stored"] = 2 * UNIT * _numel(node) * stored
        costs.low.update(dict.fromkeys(self._never_low(item), NEVER))
        return costs

    def _never_low(self, item: Item) -> Iterator[str]:
        """Why the item must not be low, whatever that costs."""
        if isinstance(item, Stored):
            if self._read_exactly(item.node) or self._stays_tiny(item.node):
                yield "read exactly"
            if not any(ir.precision(n) is LOW or n in self._near_low for n in item.node.users):
                yield "nothing low near"
        elif item in self._follow:
            if self.config.level is Level.O2 and self._stays_tiny(item):
                yield "read exactly"
            if self.config.level is Level.O2 and item not in self._near_low:
                yield "nothing low near"
            if self.config.level is Level.O1 and not counted_operands(item):
                yield "no operand"
            value = ir.captured(item)
            if value is not None and value.ndim == 0:
                yield "one number"

    def _times_stored(self, node: fx.Node) -> int:
        """How often FP32 would be written or read where the low dtype could be."""
        reads = 0
        keeps = self.config.level is Level.O2  # in no_grad, too: evaluation rounds as training does
        for reader in _readers(node):
            if reader.op == "output" or self.is_low(reader):
                continue
            if self._leaves(node, reader) and not (self._apart[reader] and not self._apart[node]):
                reads += 1
            if keeps and _keeps_operand(reader):
                reads += 1
        if keeps and ir.rule(node).keeps is Keeps.RESULT:
            reads += 1
        return reads + 1 if reads else 0

    def _views_full(self, node: fx.Node) -> bool:
        """Whether it is a view of something that is FP32 in any case."""
        return _is_view(node) and self.is_low(_root(node)) is False

    # -- costs of an edge -------------------------------------------------------------------------

    def _pairs(self, graph: fx.Graph) -> dict[tuple[Item, Item], tuple[int, int]]:
        pairs: dict[tuple[Item, Item], tuple[int, int]] = {
            (node, stored): (0, _numel(node)) for node, stored in self._stored.items()
        }
        for reader in graph.nodes:
            counted = self.forced_by(reader)
            for operand in _read_by(reader):
                shown = self._stored.get(operand, operand)
                if shown in self._members or reader in self._members:
                    up, down = self._casts(operand, reader)
                    pairs[shown, reader] = up, NEVER if operand in counted else down
            for operand in map(_root, counted):  # rounding a view of it would not change that
                shown = self._stored.get(operand, operand)
                if shown in self._members or reader in self._members:
                    up, _ = pairs.get((shown, reader), (0, 0))
                    pairs[shown, reader] = up, NEVER
        return pairs

    def forced_by(self, node: fx.Node) -> list[fx.Node]:
        """The operands that force an open node to FP32 if they are FP32."""
        if node not in self._follow:
            return []
        if ir.kind(node) is rules.Kind.MOVE:  # it would cast all of a table to look up some rows
            return _read_by(node)
        if ir.kind(node) is rules.Kind.VIEW:
            return []
        if self.config.level is Level.O1:
            return counted_operands(node)
        return counted_operands(node) if node in self._wide else []

    def _casts(self, operand: fx.Node, reader: fx.Node) -> tuple[int, int]:
        """What it costs if the two differ: to cast up for the reader, and to cast down."""
        elements = _numel(operand)
        if ir.is_parameter(operand) or ir.is_constant(operand):
            return 0, 0  # counted by the product that reads it; a kernel reads a vector as it is
        if self._absorbs_below(operand) and self._apart[reader]:
            # The operand's kernel writes a copy for this reader, beside what it stores for others.
            again = 2 * UNIT * elements if self._times_stored(operand) else 0
            return 2 * again, again + elements
        if self._absorbs_below(operand) or self._absorbs_above(reader):
            # What shows FP32 memory is not rounded for the sake of one reader among others.
            return 3 * elements // 4 if self._views_full(operand) else 0, elements
        alone = 6 * UNIT * elements + self.launch
        return alone, alone

    def _absorbs_below(self, node: fx.Node) -> bool:
        """Whether a cast of the node's result can ride in the kernel that computes it."""
        if _is_view(node):
            return all(map(self._absorbs_below, _read_by(node)[:1]))
        return ir.is_op(node) and not self._apart[node]

    def _absorbs_above(self, node: fx.Node) -> bool:
        """Whether a cast of its operand can ride in the node's kernel."""
        if _is_view(node):
            return all(map(self._absorbs_above, node.users))
        return not self._apart[node]

    # -- time -------------------------------------------------------------------------------------

    def _as_bytes(self, seconds: float) -> int:
        assert self.config.profile is not None
        return round(seconds * self.config.profile.bandwidth * UNIT)

    def _weight(self, weight: fx.Node) -> int:
        """The cast of an FP32 weight, and of its gradient."""
        back = 4 if ir.requires_grad(weight) else 0
        return (6 + back) * UNIT * _numel(weight) + self.launch


def counted_operands(node: fx.Node) -> list[fx.Node]:
    """The operands whose dtype counts: castable ones, no constant, no number that would promote."""
    found = [n for i, n in ir.float_args(node) if rules.castable(node.target, i)]
    # A constant takes the dtype of its company; guard_constants has seen that it survives that.
    found = [n for n in found if not ir.is_constant(n)] or found
    if ir.rule(node).promotes:
        return [n for n in found if ir.captured(n).ndim] or found  # type: ignore[union-attr]
    return found


def _read_by(node: fx.Node) -> list[fx.Node]:
    """The FP32 values that a node reads, and may read in another dtype."""
    if node.op == "output":
        return [n for n in node.all_input_nodes if ir.was_f32(n)]
    if ir.is_getitem(node):
        return list(node.all_input_nodes) if ir.was_f32(node) else []
    found = [n for i, n in ir.float_args(node) if rules.castable(node.target, i)]
    return list(dict.fromkeys(found))


def _readers(node: fx.Node) -> list[fx.Node]:
    """Who reads the value, through views of it."""
    found: list[fx.Node] = []
    for user in node.users:
        found += _readers(user) if _is_view(user) else [user]
    return found


def _is_view(node: fx.Node) -> bool:
    return (ir.is_op(node) or ir.is_getitem(node)) and ir.kind(node) is rules.Kind.VIEW


def _is_wide(node: fx.Node) -> bool:
    """Whether an FP32 node's result may leave the low dtype's range, for all that is known."""
    if ir.mark(node).rule not in ("table", "kernel", "alias"):
        return True
    return ir.rule(node).grows or ir.rule(node).sensitive


def _is_trained(node: fx.Node) -> bool:
    """Whether it is a weight, whose magnitude is known to be moderate, and no data."""
    return node.op == "placeholder" and (ir.is_parameter(node) or ir.requires_grad(node))


def _root(node: fx.Node) -> fx.Node:
    """What a view shows."""
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _is_apart(node: fx.Node) -> bool:
    """Whether the node is a kernel of its own."""
    if node.op in ("placeholder", "get_attr", "output"):
        return True
    if ir.is_opaque(node) or not (ir.is_op(node) or ir.is_getitem(node)):
        return True
    if ir.is_getitem(node):
        return False
    return not ir.rule(node).fuses or product(node) is not None


def _keeps_operand(node: fx.Node) -> bool:
    """Whether its backward reads what the node read."""
    return ir.rule(node).keeps is Keeps.OPERANDS and product(node) is None


def _weights(node: fx.Node, config: Config) -> list[fx.Node]:
    """The FP32 parameters that a LOW node would cast."""
    inputs = node.graph.find_nodes(op="placeholder")
    found = []
    for operand in _read_by(node):
        source = _root(operand)
        if ir.is_parameter(source) and inputs.index(source) not in config.copied:
            found.append(source)
    return found


def _numel(node: fx.Node) -> int:
    """Elements of what the node gives, with symbols at the values they were traced with."""
    return sum(
        math.prod(map(ir.hint, list(t.shape)))
        for t in ir.tensors_of(node.meta.get("mp_captured"))
        if t.dtype is torch.float32
    )


# -- what the profile knows ------------------------------------------------------------------------


def seconds(node: fx.Node, config: Config) -> tuple[float, float] | None:
    """What the profile predicts for a product, low and FP32, or None: it knows nothing."""
    found = product(node) if config.profile is not None else None
    if found is None:
        return None
    backward = ir.requires_grad(node) or any(map(ir.requires_grad, node.all_input_nodes))
    low, full = (
        _predicted(config.profile, found, dtype, backward)
        for dtype in (ir.mark(node).low, torch.float32)
    )
    if attention.is_written_out(node, config):
        low = _written_out(config.profile, found, ir.mark(node).low, backward)
    return None if low is None or full is None else (low, full)


def _launch(config: Config) -> int:
    """A kernel's launch, in the bytes that memory moves meanwhile."""
    if config.profile is None:
        return 0
    return round(config.profile.launch * config.profile.bandwidth * UNIT)


def _predicted(
    profile: Profile | None, found: Product, dtype: torch.dtype, backward: bool
) -> float | None:
    assert profile is not None
    dims = {name: ir.hint(size) for name, size in found.measured().items()}
    if found.kind == "conv":
        groups = dims["groups"]
        dims |= {side: dims[side] * groups for side in ("in_channels", "out_channels")}
    elif found.kind == "attention":
        del dims["value_head"]
    elif found.kind == "rnn":
        return _layers(profile, found, dtype, backward)
    return profile.seconds(found.kind, dtype, dims, backward=backward)


def _layers(profile: Profile, found: Product, dtype: torch.dtype, backward: bool) -> float | None:
    """A recurrent operator: its layers, in both directions, one after the other."""
    sizes = {label: ir.hint(size) for label, size in found.sizes.items()}
    steps = max(1, sizes["steps"] // sizes["samples"])
    total = 0.0
    for width, count in (("input", 1), ("below", sizes["later"])):
        dims = {
            "batch": sizes["samples"], "steps": steps, "input": sizes[width],
            "hidden": sizes["hidden"], "gates": sizes["gates"],
        }  # fmt: skip
        seconds = profile.seconds("rnn", dtype, dims, backward=backward) if count else 0.0
        if seconds is None:
            return None
        total += seconds * count * sizes["both"]
    return total


def _written_out(
    profile: Profile | None, found: Product, low: torch.dtype, backward: bool
) -> float | None:
    """Attention as two batched products around a softmax."""
    assert profile is not None
    dims = {name: ir.hint(size) for name, size in found.measured().items()}
    batch, queries, keys = dims["batch"], dims["queries"], dims["keys"]
    products = [
        profile.seconds(
            "gemm", low, {"batch": batch, "m": queries, "n": n, "k": k}, backward=backward
        )
        for n, k in ((keys, dims["head"]), (dims["value_head"], keys))
    ]
    if None in products:
        return None
    # The scores are written and read twice forward, and once more with their gradients backward.
    traffic = 2 * (4 + 6 * backward) * batch * queries * keys
    kernels = 2 + 2 * backward  # the softmax, and copies of what the products read transposed
    return sum(filter(None, products)) + traffic / profile.bandwidth + kernels * profile.launch
