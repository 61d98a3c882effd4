"""A training step as a program of parts: forwards rewritten, backwards, steps, and plain nodes.

A `StepProgram` runs twice. Once on FakeTensors while it is made, because each part must know what
it gets from those before it: sizes, strides, which gradients there are. And once under a tracer,
which derives the backward from the rewritten forwards and gives one graph of ATen operators.

    loss = forward(x, params)                 the rewritten graph, with working copies and the scale
    grad(loss, [p])                           grad(loss, [p, copy of p, overflow leaf])
    take_step(0, [p], [grad])                 check, clip, update, write copies, move scale
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .. import ir
from ..errors import CannotRewrite
from ..ir.fakes import fake_twin
from ..lower.sections import bind
from ..optim.members import Setting
from ..planner.target import place_of
from ..rules.policy import Level
from ..scaling.loss_scale import LossScale
from ..settings import Settings
from ..torch_inside.graphs import schema
from ..torch_inside.names import TorchDispatchMode, TracingContext, autocast_off
from ..torch_inside.tensors import storage_of
from .forward import ExtraInputs, Forward, TracedForward, rewritten
from .gradients import go_backward, read_at_all, read_by_steps_alone, straighten
from .parts import StepPart, cut, last_steps
from .tracing import optimizer_of
from .update import Update, emit_late

Varying = Mapping[Any, frozenset[Setting]]  # by optimizer


@dataclass
class _Running:
    """One run of the program: the values of Dynamo's nodes, the held tensors, and what has run."""

    env: dict[fx.Node, Any]
    held: Sequence[torch.Tensor]
    forwards: list[TracedForward] = field(default_factory=list)
    # For each backward, how many gradients overflowed, by loss scale.
    backwards: dict[fx.Node, dict[LossScale, torch.Tensor]] = field(default_factory=dict)
    late: list[torch.Tensor] = field(default_factory=list)  # what steps after the graph take
    looked_at: set[fx.Node] = field(default_factory=set)  # the backwards that a step has checked


class StepProgram:
    """The parts of a training step, ready to be traced.

    Args:
        gm: Dynamo's graph; it is changed.
        examples: its inputs: the caller's own tensors, or SymInts.
        settings: how forwards are rewritten.
        varying: for an optimizer, its settings that were seen to change.

    Attributes:
        given: FakeTensors of Dynamo's inputs, or SymInts.
        held: the tensors that it takes besides.
        device: that of its parameters.
        written: Dynamo's inputs (by number) that something else than a step writes in place.
        made: its forwards and steps, in order.

    Raises:
        StateAppeared: a first step makes state; it can't be traced before.
        CannotRewrite: it can't be one graph; the message says why.
    """

    def __init__(
        self, gm: fx.GraphModule, examples: Sequence[Any], settings: Settings, varying: Varying
    ) -> None:
        context = TracingContext.get()
        assert context.fake_mode is not None
        straighten(gm.graph)
        self._gm, self._mode = gm, context.fake_mode
        self._settings, self._varying = settings, varying
        self._placeholders = gm.graph.find_nodes(op="placeholder")
        self._real = dict(zip(self._placeholders, examples, strict=True))
        self._plain = fx.Interpreter(gm)
        self.given = [fake_twin(value, context) for value in examples]
        self.device, self.held = place_of(examples), ExtraInputs()
        self.made: list[Forward | Update] = []
        self._parts: list[tuple[StepPart, Forward | Update | None]] = []
        self.written: set[int] = set()
        running = self._start(self.given, ())
        all_parts = cut(gm.graph)
        self._last = last_steps(all_parts, self._written(all_parts))
        for part in all_parts:
            made = self._make(part, running)
            self._parts.append((part, made))
            running.held = self.fakes()
            writes = Writes()
            with self._mode, writes, torch.enable_grad() if part.grad else torch.no_grad():
                self._run_part(part, made, running)
            if part.kind != "step":
                tensors = enumerate(self.given)
                self.written |= {i for i, x in tensors if torch.is_tensor(x) and x in writes}
        self._check_results(running)

    @property
    def forwards(self) -> list[Forward]:
        return [made for made in self.made if isinstance(made, Forward)]

    @property
    def updates(self) -> list[Update]:
        return [made for made in self.made if isinstance(made, Update)]

    @property
    def can_be_noted(self) -> bool:
        """Whether a step may run in pieces instead: with several backwards, one piece may hold what
        two of them need, and torch frees it after the first.
        """
        return sum(part.kind == "backward" for part, _ in self._parts) == 1

    def _make(self, part: StepPart, running: _Running) -> Forward | Update | None:
        """What a part runs, where that is not Dynamo's own nodes."""
        if part.kind == "forward":
            examples = [self._real.get(n, running.env[n]) for n in part.inputs]
            forward = rewritten(part, self._gm, examples, self._settings, self.held)
            self._check_copies(forward)
            self.made.append(forward)
            return forward
        if part.kind == "step":
            number, params, grads = _step_of(part.nodes[0])
            optimizer = optimizer_of(number)
            real = [self._real[p] for p in params]
            arrived = [running.env[grad] for grad in grads]
            late = emit_late(self.device, len(real), self._settings) if part in self._last else None
            varying = self._varying.get(optimizer, frozenset())
            update = Update(optimizer, real, arrived, varying, self.held, late)
            self.made.append(update)
            return update
        return None

    def _check_copies(self, forward: Forward) -> None:
        """Refuse to read a working copy whose parameter the program has written by itself."""
        written = [self._real[self._placeholders[i]] for i in self.written]
        if any(read.master is x for read in forward.reads for x in written):
            raise CannotRewrite("a parameter is written between a step and a forward")

    def _written(self, all_parts: Sequence[StepPart]) -> set[fx.Node]:
        """Dynamo's inputs that share memory with what some step writes."""
        memory: set[int] = set()
        for part in all_parts:
            if part.kind == "step":
                number, params, _ = _step_of(part.nodes[0])
                state = optimizer_of(number).state
                written = [self._real[p] for p in params]
                written += [v for p in written for v in state.get(p, {}).values()]
                memory.update(map(storage_of, filter(torch.is_tensor, written)))
        return {n for n, x in self._real.items() if torch.is_tensor(x) and storage_of(x) in memory}

    def fakes(self) -> list[torch.Tensor]:
        """FakeTensors of the held tensors."""
        return [self._mode.from_tensor(t, static_shapes=True) for t in self.held.tensors]

    def _results(self) -> Sequence[Any]:
        results: Sequence[Any] = self._gm.graph.output_node().args[0]  # type: ignore[assignment]
        return results

    def _check_results(self, running: _Running) -> None:
        """Refuse a result that the caller could still go backward from."""
        gone = [b for b in running.backwards if not b.kwargs.get("retain_graph")]
        used_up = {n for b in gone for n in ir.all_before(ir.listed(b.args[0])) if _is_computed(n)}
        for result in self._results():
            value = running.env.get(result)
            needs = isinstance(value, torch.Tensor) and value.requires_grad
            if needs and used_up.isdisjoint(ir.all_before([result])):
                raise CannotRewrite("it returns a value that still needs a gradient")

    # -- run ---------------------------------------------------------------------------------------

    def run(
        self, given: Sequence[Any], held: Sequence[torch.Tensor], phase: Callable[[], None]
    ) -> tuple[list[Any], list[torch.Tensor], dict[LossScale, torch.Tensor]]:
        """Run it under a tracer.

        Args:
            given: values of Dynamo's inputs.
            held: values of the held tensors.
            phase: called before each forward after a backward: what was saved is free by then.

        Returns:
            Dynamo's results, what the steps after the graph take, one after the other, and for
            each loss scale the count of overflows that no step has looked at: 0-d FP32.
        """
        running = self._start(given, held)
        backwards = 0
        for part, made in self._parts:
            if part.kind == "forward" and len(running.backwards) > backwards:
                backwards = len(running.backwards)
                phase()
            with torch.enable_grad() if part.grad else torch.no_grad():
                self._run_part(part, made, running)
        results = [running.env.get(r, r) for r in self._results()]
        results = [r.detach() if isinstance(r, torch.Tensor) else r for r in results]
        unseen = [b for node, b in running.backwards.items() if node not in running.looked_at]
        return results, running.late, _sum(unseen)

    def _start(self, given: Sequence[Any], held: Sequence[torch.Tensor]) -> _Running:
        running = _Running(dict(zip(self._placeholders, given, strict=True)), held)
        for node in self._gm.graph.find_nodes(op="get_attr"):
            running.env[node] = self._plain.get_attr(node.target, (), {})
        return running

    def _run_part(self, part: StepPart, made: Forward | Update | None, running: _Running) -> None:
        node, env = part.nodes[0], running.env
        if part.kind == "plain":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = getattr(self._plain, node.op)(node.target, args, kwargs)
            return
        # A plain node may have entered autocast, which would change the dtypes that were planned.
        planned = self._settings.level is not Level.O0
        with autocast_off() if planned else contextlib.nullcontext():
            if isinstance(made, Forward):
                ran = made.run([env[n] for n in part.inputs], running.held)
                running.forwards.append(ran)
                env.update(zip(part.outputs, ran.results, strict=True))
            elif isinstance(made, Update):
                self._take_step(node, made, running)
            else:
                self._go_backward(node, running)

    def _go_backward(self, node: fx.Node, running: _Running) -> None:
        def value(argument: Any) -> Any:
            return fx.node.map_arg(argument, running.env.__getitem__)

        losses, inputs, *outer = node.args
        inputs = list(inputs)  # type: ignore[arg-type]
        options = {k: value(v) for k, v in node.kwargs.items() if k != "allow_unused"}
        if outer:
            options["grad_outputs"] = value(outer[0])
        arrived, found = go_backward(
            value(losses),
            value(inputs),
            masters=[self._real.get(n) for n in inputs],
            read=read_at_all(node),
            direct=read_by_steps_alone(node),
            ran=running.forwards,
            **options,
        )
        running.backwards[node] = found
        running.env[node] = tuple(arrived)

    def _take_step(self, node: fx.Node, update: Update, running: _Running) -> None:
        _, params, grads = _step_of(node)
        before = [b for b in running.backwards if _trained(b, running.env[b]) & set(params)]
        running.looked_at.update(before)
        arrived = [running.env[grad] for grad in grads]
        found = _sum([running.backwards[b] for b in before])
        if update.is_late:
            running.late += update.inputs(arrived, found, running.held)
        else:
            update.run([running.env[p] for p in params], arrived, found, running.held)


def _step_of(node: fx.Node) -> tuple[int, list[fx.Node], list[fx.Node]]:
    number, params, grads = node.args
    return number, list(params), list(grads)  # type: ignore[return-value, arg-type]


def _trained(node: fx.Node, arrived: Sequence[torch.Tensor | None]) -> set[fx.Node]:
    """The inputs of a backward that got a gradient."""
    inputs: Any = node.args[1]
    return {n for n, a in zip(inputs, arrived, strict=True) if a is not None}


def _sum(backwards: Sequence[Mapping[LossScale, torch.Tensor]]) -> dict[LossScale, torch.Tensor]:
    """How many gradients overflowed in all of these, by loss scale."""
    total: dict[LossScale, torch.Tensor] = {}
    for backward in backwards:
        for scale, found in backward.items():
            total[scale] = total[scale] + found if scale in total else found
    return total


def _is_computed(node: fx.Node) -> bool:
    """Whether the value of a node of Dynamo's graph has a history that a backward goes through."""
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.requires_grad and node.op != "placeholder"


class Writes(TorchDispatchMode):
    """Notes the memory that is written within this context, through views and `.data` as well.

    `tensor in writes`: whether the memory of a tensor was written. Read from the operators'
    schemas: batch norm says nothing there of its running statistics.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = bind(func, args, kwargs)
        for argument in schema(func).arguments:
            if argument.is_write:
                self._memory.update(map(storage_of, ir.tensors_of(given.get(argument.name))))
        return func(*args, **kwargs)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return storage_of(tensor) in self._memory
