"""A training step's program -> one graph of ATen operators -> one function.

make_fx runs the program on FakeTensors: autograd derives the backward there, from the rewritten
forwards, and what remains is a plain sequence of operators, with writes to the parameters and to
what is held between steps. Inductor compiles it like the graph of an inference: every gradient dies
where it is used, and all of it is fused as one program. What the backward reads is kept, or made
again, as in pieces (`lower/part_step.py`).

On a CPU it is cut where the memory of one forward and backward is free for the next. Inductor may
run in any order what does not depend on each other, and fuses loops of one length. So in one graph
the forwards of a GAN's two losses, or of micro-batches, run side by side, and all that their
backwards need lies there at once. A graph for each keeps them apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from .. import ir
from ..devices.registry import capabilities
from ..errors import CannotRewrite
from ..lower.inference import Function, compile_inference, options_for_joins, outliving, replays
from ..lower.joint import JointPasses, joint_passes, with_joint_passes
from ..lower.sections import chained
from ..lower.write_order import inductor_for
from ..operators.rnn_layer import IN_A_GRAPH
from ..planner.target import place_of
from ..rules.policy import Level
from ..scaling.loss_scale import LossScale
from ..settings import Settings
from ..torch_inside.names import TracingContext, autocast_off
from ..verify.verdicts import Verify
from .program import StepProgram


@dataclass(frozen=True)
class Traced:
    """A training step as one graph.

    Attributes:
        graph: takes Dynamo's inputs and the held tensors; returns a tuple of tensors.
        results: for each of Dynamo's results, its number among what the graph returns, or, in a
            1-tuple, the constant that it is.
        late: the number of the first result for the steps after the graph.
        unseen: the loss scales of the last results: counts of overflows that no step has seen.
        phases: for each node, in which forward and backward it is, counted from 0.
    """

    graph: fx.GraphModule
    results: tuple[int | tuple[Any], ...]
    late: int
    unseen: tuple[LossScale, ...]
    phases: Mapping[fx.Node, int]


def trace(program: StepProgram) -> Traced:
    """Trace a program to one graph."""
    given = len(program.given)
    results: list[int | tuple[Any]] = []
    unseen: list[LossScale] = []
    begins: list[int] = []  # how many nodes had been traced when each phase but the first began

    def phase() -> None:
        mode = get_proxy_mode()
        assert mode is not None
        begins.append(len(mode.tracer.graph.nodes))

    def step(*values: Any) -> tuple[Any, ...]:
        returned, late, open_ = program.run(values[:given], values[given:], phase)
        tensors: list[Any] = []
        for value in returned:
            if isinstance(value, (torch.Tensor, torch.SymInt)):
                results.append(len(tensors))
                tensors.append(value)
            else:
                results.append((value,))
        unseen.extend(open_)
        return (*tensors, *late, *open_.values())

    context = TracingContext.get()
    assert context.fake_mode is not None
    # With the lines of the program that its nodes come from, for a report of what is wrong.
    lines = fx.traceback.preserve_node_meta()
    with autocast_off(), context.fake_mode, torch.enable_grad(), lines:
        graph = make_fx(step, tracing_mode="real", _allow_non_fake_inputs=True)(
            *program.given, *program.fakes()
        )
    for node in graph.graph.nodes:
        node.target = IN_A_GRAPH.get(node.target, node.target)
    _check(program, graph.graph)
    # As it was traced, without a node removed.
    phases = {n: sum(i >= begin for begin in begins) for i, n in enumerate(graph.graph.nodes)}
    graph.graph.eliminate_dead_code()
    graph.recompile()
    count = sum(isinstance(r, int) for r in results)
    return Traced(graph, tuple(results), count, tuple(unseen), phases)


def _check(program: StepProgram, graph: fx.Graph) -> None:
    """Refuse recurrent layers that oneDNN has no kernel for: there is a node for each time step.

    Refuse writes to memory that two inputs share as well. AOTAutograd compiles for one input that
    both are views of, as it finds it in FakeTensors; in a call it looks for that of the caller's
    tensors, which may be another.
    """
    layers = sum(n.target in IN_A_GRAPH.values() for n in graph.nodes)
    if layers < 2 * sum(forward.recurrent for forward in program.forwards):
        raise CannotRewrite("a recurrent layer that would be unrolled over time")
    shared = _in_several(graph.find_nodes(op="placeholder"))
    written = {m for n in graph.nodes for w in ir.written(n) for m in ir.memory(w.meta["val"])}
    if not shared.isdisjoint(written):
        raise CannotRewrite("it writes to memory that two of its inputs share")


def _in_several(nodes: Sequence[fx.Node]) -> set[int]:
    """The memory that more than one of these values lies in."""
    lying = Counter(m for n in nodes for m in ir.memory(n.meta["val"]))
    return {m for m, count in lying.items() if count > 1}


def compiled(
    program: StepProgram, traced: Traced, stays: Sequence[bool], settings: Settings, verify: Verify
) -> Function:
    """Compile the graph of a program.

    Args:
        stays: for each input, whether it is the same memory in every step.
        verify: how what is compiled is verified.

    Returns:
        A function of a list of all inputs; it may empty the list. Run it without grad mode.
    """
    graph = traced.graph
    if settings.emit != "inductor":
        return lambda values: graph(*values)
    options = dict(settings.options or {})
    if any(update.rounds for update in program.updates):  # Muon: a fused kernel would keep FP32
        options.setdefault("emulate_precision_casts", True)
    inputs = graph.graph.find_nodes(op="placeholder")
    device = place_of([n.meta["val"] for n in inputs])
    options = {**options_for_joins(graph.graph, device), **options}
    passes = JointPasses(whole=True, recomputes=settings.recompute)
    if (level := settings.level) is not Level.O0:
        passes = joint_passes(level, program.device, whole=True, recompute=settings.recompute)
    patches = inductor_for(settings.mode, with_joint_passes(options, passes)).config
    if max(traced.phases.values()) and _is_cut(inputs, device):
        return _by_phase(graph, traced.phases, lambda part: _by_inductor(part, (), patches, verify))
    still = [n for n, stay in zip(inputs, stays, strict=True) if stay]
    made = _made(graph)  # before Inductor changes the graph
    run = _by_inductor(graph, still, patches, verify)
    return outliving(run, made) if replays(settings.mode, settings.options, device) else run


def _is_cut(inputs: Sequence[fx.Node], device: torch.device) -> bool:
    """Whether each phase gets a graph of its own. On CUDA the whole is one, to be recorded as one;
    and with symbolic sizes, a phase would have to take those that no tensor of its own tells.
    """
    tensors = [n.meta["val"] for n in inputs if isinstance(n.meta["val"], torch.Tensor)]
    fixed = all(isinstance(size, int) for x in tensors for size in x.shape)
    return fixed and not capabilities(device).multi_tensor


def _made(graph: fx.GraphModule) -> list[bool]:
    """For each result, whether it shares no memory with an input."""
    given = {m for n in graph.graph.find_nodes(op="placeholder") for m in ir.memory(n.meta["val"])}
    results: Any = graph.graph.output_node().args[0]
    return [given.isdisjoint(ir.memory(result.meta["val"])) for result in results]


def _by_inductor(
    graph: fx.GraphModule, static: Sequence[fx.Node], patches: Any, verify: Verify
) -> Function:
    inputs, mode = graph.graph.find_nodes(op="placeholder"), TracingContext.get().fake_mode
    results: Any = graph.graph.output_node().args[0]
    return compile_inference(
        graph, [n.meta["val"] for n in inputs], mode,
        static=static, shares_memory=bool(_in_several([*inputs, *results])), patches=patches,
        verify=verify,
    )  # fmt: skip


def _by_phase(
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
    calls = (n for n in gm.graph.nodes if n.op not in ("placeholder", "get_attr", "output"))
    sections = [ir.Section.of(nodes) for _, nodes in groupby(calls, phases.__getitem__)]
    functions = [compiled(section.alone(gm)) for section in sections]
    forward = chained(gm.graph, sections, [_of_values(function) for function in functions])

    def run(values: list[Any]) -> Sequence[Any]:
        given = tuple(values)
        values.clear()
        return forward(*given)

    return run


def _of_values(function: Function) -> Callable[..., Sequence[Any]]:
    return lambda *values: function(list(values))
