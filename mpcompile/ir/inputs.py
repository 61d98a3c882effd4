"""The inputs of a rewritten graph, by number: the caller's, working copies, the loss scale's.

    0 ... given-1          the inputs that the caller of Dynamo's graph passes; where the graph
                           reads a parameter only in the low dtype, its working copy replaces it
    given ...              working copies of parameters that the graph reads in FP32 as well
    the last two           the loss scale, and the leaf whose "gradient" counts the overflows; only
                           in a graph that is scaled

`passes/graph/read_copies.py` adds the copies, `passes/graph/scale_gradients.py` the last two. The
code that calls the graph learns the positions from `GraphInputs` alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .marks import copy_of, is_mutable

# The names of the two inputs that scaling adds.
SCALE, FOUND = "mp_scale", "mp_found"


@dataclass(frozen=True)
class GraphInputs:
    """Which input of a graph is what.

    Attributes:
        given: how many inputs the caller passes; they come first.
        copies: number of an input that reads a working copy -> number of the caller's input (the
            parameter) that it is a copy of.
        scaled: whether the last two inputs are the loss scale and the overflow leaf.
        names: of the caller's inputs, as plans have them: `"x"`, `"fc_weight"`.
        written: numbers of the caller's inputs that the graph may write to, known after classify.
    """

    given: int
    copies: Mapping[int, int] = field(default_factory=dict)
    scaled: bool = False
    names: tuple[str, ...] = field(default=(), compare=False)
    written: frozenset[int] = field(default=frozenset(), compare=False)

    @classmethod
    def of(cls, graph: fx.Graph) -> GraphInputs:
        """Read the layout from a graph, at any point of the pipeline."""
        inputs = graph.find_nodes(op="placeholder")
        scaled = any(node.target == SCALE for node in inputs)
        copies = {k: of for k, node in enumerate(inputs) if (of := copy_of(node)) is not None}
        appended = sum(k != of for k, of in copies.items())
        given = len(inputs) - appended - 2 * scaled
        names = tuple(node.name for node in inputs[:given])
        written = frozenset(i for i, node in enumerate(inputs[:given]) if is_mutable(node))
        return cls(given, copies, scaled, names, written)

    def assembled(
        self, given: Sequence[Any], copies: Sequence[Any] = (), scaling: Sequence[Any] = ()
    ) -> list[Any]:
        """Assemble all inputs of a call.

        Args:
            given: the caller's inputs.
            copies: working copies, in the order of `self.copies`.
            scaling: the loss scale and the overflow leaf, if the graph is scaled.
        """
        appended = [copy for k, copy in zip(self.copies, copies, strict=True) if k >= self.given]
        inputs = [*given, *appended, *scaling]
        for k, copy in zip(self.copies, copies, strict=True):
            inputs[k] = copy
        return inputs

    def scaling_apart(
        self, inputs: Sequence[Any]
    ) -> tuple[Sequence[Any], torch.Tensor, torch.Tensor]:
        """Split the inputs of a scaled graph: (all others, the loss scale, the overflow leaf)."""
        assert self.scaled
        return inputs[:-2], inputs[-2], inputs[-1]
