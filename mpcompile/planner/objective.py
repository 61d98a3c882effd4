"""The cost of a precision: the objective that the planner minimises, in bytes of memory traffic.

    total = sum over values  stored(v) + time(v) + doubt(v) + weights(v)
          + sum over edges   cast(u, v)   where u and v differ

stored   A value that leaves its kernel is written once, and read once for each reader after it: 4
         bytes an element each time in FP32, 2 in FP16 and BF16; the difference is counted. A value
         leaves if a reader is in another kernel (`Fusion`), or if the backward reads it. A
         reader that is already LOW doesn't count: it gets a low copy in any case.
time     What the device profile predicts for a product in either dtype, forward and backward,
         counted in the bytes that memory moves meanwhile. Without a profile products stay LOW.
doubt    A tenth of the time in the low dtype: a product that is not surely faster stays FP32.
weights  A LOW product casts its FP32 weights (a read and a write), and their gradients back. This
         costs nothing if the product reads a working copy.
cast     Where the reader's kernel can't cast, a second copy is written, in place of what the other
         readers share. A cast that no fusion absorbs, from an input or a product straight into a
         product, costs a read, a write and a launch. Any other cast is part of a kernel that runs
         anyway: a cast to FP32 is free; a cast to the low dtype rounds, which counts a sixteenth of
         a byte an element: enough to break a tie.

At O1 the reads of the backward don't count: it reads what the forward stored, and recomputes the
rest. `constraints.py` says what must not be low at any cost.

All costs are whole numbers, in sixteenths of a byte.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from .. import ir
from ..padding.products import product
from ..rules import Keeps, Kind
from ..rules.policy import Config, Level
from .constraints import Constraints, Item, Rounded
from .min_cut import NEVER
from .reads import Fusion, cast_weights, elements, is_view, read_by, readers, root
from .times import seconds

UNIT = 16  # of a byte
DOUBT = 10  # a tenth of a predicted time: about how far predictions are off
FULL_BYTES = torch.float32.itemsize


@dataclass
class Costs:
    """The costs of one node by term, in sixteenths of a byte.

    Attributes:
        low, full: term -> cost, if the node is LOW, and if it is FULL.
    """

    low: dict[str, int] = field(default_factory=dict)
    full: dict[str, int] = field(default_factory=dict)


class Objective:
    """The costs of one graph, for the items to be decided in it.

    Attributes:
        constraints: the items to be decided, and what must not be low.
        launch: the launch of a kernel, in sixteenths of a byte.
        terms: item -> its own costs.
        pairs: (operand, reader) -> (cost if only the operand is LOW, cost if only the reader is).
            One of the two may be a node that is already decided.
    """

    def __init__(self, graph: fx.Graph, config: Config) -> None:
        self.config = config
        self.constraints = Constraints(graph, config)
        self._fusion = Fusion(graph)
        self.launch = 0 if config.profile is None else self.as_bytes(config.profile.launch)
        low = config.low.itemsize
        self._difference = (FULL_BYTES - low) * UNIT  # an element stored: FP32 minus low
        self._cast = (FULL_BYTES + low) * UNIT  # an element: read in one, written in the other
        self.terms = {item: self._own(item) for item in self.constraints.open}
        self.pairs = self._pairs(graph)

    # -- costs of a node --------------------------------------------------------------------------

    def _own(self, item: Item) -> Costs:
        costs = Costs()
        node = item.node if isinstance(item, Rounded) else item
        if ir.kind(node) is Kind.VIEW:
            # If a cast may come before or after a view, put it before: once for all views.
            costs.full["view"] = elements(node) // 2 if self._shows_full(node) else 1
            costs.low |= {"residual stream": NEVER} if node in self.constraints.streams else {}
            return costs
        if (times := seconds(node, self.config)) is not None:
            costs.low["time"], costs.full["time"] = (self.as_bytes(s) for s in times)
            costs.low["doubt"] = costs.low["time"] // DOUBT
            costs.low["weights"] = sum(self._weight(n) for n in cast_weights(node, self.config))
        of_its_result = node in self.constraints.rounded and not isinstance(item, Rounded)
        if not of_its_result and (stored := self._times_stored(node)):
            costs.full["stored"] = self._difference * elements(node) * stored
        costs.low.update(dict.fromkeys(self.constraints.against_low(item), NEVER))
        return costs

    def _times_stored(self, node: fx.Node) -> int:
        """How many writes and reads would be FP32 that could be in the low dtype."""
        reads = 0
        keeps = self.config.level is Level.O2  # also in no_grad: evaluation rounds like training
        for reader in readers(node):
            if reader.op == "output" or self.constraints.is_low(reader):
                continue
            casts = self._fusion.is_apart(reader) and not self._fusion.is_apart(node)
            if self._fusion.leaves(node, reader) and not casts:
                reads += 1
            # a product stores a copy of its own
            if keeps and ir.rule(reader).keeps is Keeps.OPERANDS and product(reader) is None:
                reads += 1
        if keeps and ir.rule(node).keeps is Keeps.RESULT:
            reads += 1
        return reads + 1 if reads else 0

    def _shows_full(self, node: fx.Node) -> bool:
        """Whether the node is a view of a value that is FP32 in any case."""
        return is_view(node) and self.constraints.is_low(root(node)) is False

    # -- costs of an edge -------------------------------------------------------------------------

    def _pairs(self, graph: fx.Graph) -> dict[tuple[Item, Item], tuple[int, int]]:
        rounded = self.constraints.rounded
        pairs: dict[tuple[Item, Item], tuple[int, int]] = {
            (node, item): (0, elements(node)) for node, item in rounded.items()
        }
        for reader in graph.nodes:
            forced = self.constraints.forced_by(reader)
            for operand in read_by(reader):
                if self._either_is_open(shown := rounded.get(operand, operand), reader):
                    up, down = self._casts(operand, reader)
                    pairs[shown, reader] = up, NEVER if operand in forced else down
            for operand in map(root, forced):  # rounding a view of it doesn't help
                if self._either_is_open(shown := rounded.get(operand, operand), reader):
                    up, _ = pairs.get((shown, reader), (0, 0))
                    pairs[shown, reader] = up, NEVER
        return pairs

    def _either_is_open(self, operand: Item, reader: fx.Node) -> bool:
        return self.constraints.is_open(operand) or self.constraints.is_open(reader)

    def _casts(self, operand: fx.Node, reader: fx.Node) -> tuple[int, int]:
        """The costs if the two differ: of a cast to FP32 for the reader, and of one to `low`."""
        count = elements(operand)
        if ir.is_low_input(operand):
            return self._cast * count, 0  # an FP32 copy of it
        if ir.is_parameter(operand) or ir.is_constant(operand):
            return 0, 0  # weights: see `_weight`; vectors: any kernel can cast
        if self._fusion.absorbs_below(operand) and self._fusion.is_apart(reader):
            # The operand's kernel writes a copy for this reader, besides the one for others.
            again = self._difference * count if self._times_stored(operand) else 0
            return 2 * again, again + count
        if self._fusion.absorbs_below(operand) or self._fusion.absorbs_above(reader):
            # Views of FP32 memory should not be rounded for one reader among others.
            return 3 * count // 4 if self._shows_full(operand) else 0, count
        alone = self._cast * count + self.launch
        return alone, alone

    # -- time -------------------------------------------------------------------------------------

    def as_bytes(self, seconds: float) -> int:
        """A time as the cost of the bytes that memory moves meanwhile."""
        assert self.config.profile is not None
        return round(seconds * self.config.profile.bandwidth * UNIT)

    def _weight(self, weight: fx.Node) -> int:
        """The cost of casting an FP32 weight, and its gradient back."""
        forward = FULL_BYTES + self.config.low.itemsize
        backward = FULL_BYTES if ir.requires_grad(weight) else 0
        return (forward + backward) * UNIT * elements(weight) + self.launch
