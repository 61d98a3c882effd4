"""A traced step, cut where the memory of one forward and backward is free for the next.

Inductor may run in any order what does not depend on each other, and fuses loops of one length. So
in one graph the forwards of a GAN's two losses, or of micro-batches, run side by side on a CPU, and
all that their backwards need lies there at once. A graph for each keeps them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from ..lower.inference import Function


def by_phase(
    gm: fx.GraphModule,
    phases: Mapping[fx.Node, int],
    compiled: Callable[[fx.GraphModule], Function],
) -> Function:
    """Compile each phase of a graph by itself.

    Args:
        gm: all of it; it has no symbolic sizes.
        phases: that of each node.
        compiled: a phase, which returns a tuple of tensors -> its function.

    Returns:
        A function of a list of all inputs; it may empty the list.
    """
    # In the order of `gm`: phases write in place what later ones read.
    whole = split_module(gm, gm, phases.__getitem__, keep_original_order=True)
    calls = whole.graph.find_nodes(op="call_module")
    order = [int(call.target.removeprefix("submod_")) for call in calls]
    assert order == sorted(order), order
    for call in calls:
        phase: Any = getattr(whole, call.target)
        output = phase.graph.output_node()
        alone = isinstance(output.args[0], fx.Node)
        if alone:
            output.args = ((output.args[0],),)
            phase.recompile()
        setattr(whole, call.target, _Phase(compiled(phase), alone=alone))
    forward = whole.forward  # it forgets each value after its last use

    def run(values: list[Any]) -> Sequence[Any]:
        given = tuple(values)
        values.clear()
        returned: Sequence[Any] = forward(*given)
        return returned

    return run


class _Phase(torch.nn.Module):
    """A compiled phase, called as a module. `alone`: it has one result, not a tuple of them."""

    def __init__(self, run: Function, *, alone: bool) -> None:
        super().__init__()
        self._run, self._alone = run, alone

    def forward(self, *values: Any) -> Any:
        returned = self._run(list(values))
        return returned[0] if self._alone else returned
