"""The graph that Dynamo traced of a training step, cut into its parts.

    forward     what a loss is computed from: rewritten by the passes, as a graph of its own
    backward    `torch.autograd.grad`, which is what Dynamo makes of `loss.backward()`; a gradient
                that a loss is computed from is a part of the forward, as any other value
    step        `mpcompile::take_step`
    plain       all else: what is done with gradients, metrics, an average of the weights

The parts keep the order of the program. A forward is a run of adjacent nodes none of which depends
on a gradient, if a later loss depends on one of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import fx

from .. import ir
from ..errors import CannotRewrite
from ..ir.targets import ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD_ENABLED, nesting

Kind = Literal["forward", "backward", "step", "plain"]
BACKWARD = torch.autograd.grad
STEP = torch.ops.mpcompile.take_step.default


@dataclass(frozen=True, eq=False)
class StepPart(ir.Section):
    """Nodes that are handled together.

    Attributes:
        kind: see above; a backward and a step are one node.
        grad: the grad mode that the part begins in.
    """

    kind: Kind
    grad: bool


def backwards_of(graph: fx.Graph) -> list[fx.Node]:
    """The backwards of a graph, in order: not the gradients that a later one's losses depend on."""
    calls = graph.find_nodes(op="call_function", target=BACKWARD)
    inner = ir.all_before({n for node in calls for n in ir.listed(node.args[0])})
    return [node for node in calls if node not in inner]


def cut(graph: fx.Graph) -> list[StepPart]:
    """The parts of a training step, in order.

    Raises:
        CannotRewrite: a loss depends on a parameter that was written in place from gradients, or a
            grad mode reaches across a backward.
    """
    backwards = backwards_of(graph)
    inner = [n for n in graph.nodes if n.target is BACKWARD and n not in backwards]
    if any(n.op == "placeholder" for n in _all_after(graph, inner)):
        raise CannotRewrite("a loss is computed from gradients")
    later = _all_after(graph, backwards)
    losses = {n for node in backwards for n in ir.listed(node.args[0])}
    if not losses.isdisjoint(later) or any(n.kwargs.get("create_graph") for n in backwards):
        raise CannotRewrite("a loss is computed from gradients")
    before = ir.all_before(losses)
    found: list[StepPart] = []
    grad, run = True, list[fx.Node]()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            continue
        apart = node.op == "output" or node.target is STEP or node in backwards
        if not apart and node not in later:
            run.append(node)
            continue
        found += _parts_of_run(run, before, grad)
        grad, run = _modes(run, grad)[-1], []
        if node.op != "output":
            kinds: dict[object, Kind] = {BACKWARD: "backward", STEP: "step"}
            found.append(StepPart.of([node], kind=kinds.get(node.target, "plain"), grad=grad))
    return found


def last_steps(parts: Sequence[StepPart], written: Collection[fx.Node]) -> set[StepPart]:
    """The steps after which nothing happens that depends on them: no forward, no backward, no
    operator that reads or writes one of the inputs `written`.
    """
    found: set[StepPart] = set()
    for part in reversed(parts):
        if part.kind == "step":
            found.add(part)
        elif part.kind != "plain" or any(n in written for n in part.inputs):
            break
    return found


def _parts_of_run(run: list[fx.Node], before: set[fx.Node], grad: bool) -> list[StepPart]:
    """A run of nodes that depend on no gradient: a forward, and plain nodes around it.

    The forward begins and ends in the same grad mode, in the same autocast region, and outside of
    any functorch transform.
    """
    modes = _modes(run, grad)
    plain = [StepPart.of([n], kind="plain", grad=m) for n, m in zip(run, modes, strict=False)]
    needed = [i for i, node in enumerate(run) if node in before]
    if not needed:
        return plain
    levels = [0, *accumulate(map(nesting, run))]
    entered = ((n.target is ENTER_AUTOCAST) - (n.target is EXIT_AUTOCAST) for n in run)
    regions = [0, *accumulate(entered)]
    windows = (
        (start, end)
        for start in range(needed[0], -1, -1)
        for end in range(needed[-1] + 1, len(run) + 1)
        if modes[start] is modes[end]
        and levels[start] == levels[end] == 0
        and regions[start] == regions[end] == min(regions[start : end + 1])
    )
    window = next(windows, None)
    if window is None:
        raise CannotRewrite(
            "no_grad, autocast or a transform begins amid a forward and ends after its backward"
        )
    start, end = window
    forward = StepPart.of(run[start:end], kind="forward", grad=modes[start])
    return [*plain[:start], forward, *plain[end:]]


def _modes(nodes: Iterable[fx.Node], grad: bool) -> list[bool]:
    """The grad mode before each of these nodes, which begin in the mode `grad`, and after them."""
    found = [grad]
    for node in nodes:
        found.append(bool(node.args[0]) if node.target is SET_GRAD_ENABLED else found[-1])
    return found


def _all_after(graph: fx.Graph, nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """All nodes that depend on these, or are written by one that does: `grad.add_(more)`."""
    sources = set(nodes)
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if any(n in sources or n in found for n in node.all_input_nodes):
            found.add(node)
            found.update(ir.written_by_name(node))
    return found
