"""Runs one training step of a model three times: exact (FP64), in FP32, and as rewritten.

Dynamo traces a copy of the model once. Each of its graphs is then run node by node, on the side
that is asked for; the program between graphs, and the loss, run as they are, in FP32. The rewritten
graphs run at the loss scale that a training would have there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx, nn

from .. import ir
from ..capture.pipeline import Planned
from ..capture.surroundings import around_now
from ..compiler.backend import planned_or_why
from ..compiler.plan_graph import Facts
from ..compiler.training import fp32_parameters, reads_copies, scale_for
from ..errors import MPCompileError
from ..ir.scale import INIT_SCALE, ScaleRule
from ..observe.record import Numbers, Record, moved
from ..observe.watch import Exact, Keeping, Observer, gradient_units
from ..planner.graph_plan import GraphPlan, plan_of_left
from ..planner.target import Repairs, device_of, target_of
from ..runtime.half_inputs import widened
from ..runtime.module_call import running
from ..settings import Settings
from ..torch_inside.modules import buffers_of, names_in
from ..torch_inside.names import pytree
from ..torch_inside.owned_backend import compiled_apart, nothing_happened, weakly
from ..torch_inside.tracing_settings import settings_for

Loss = Callable[[Any], torch.Tensor]
Step = Callable[[Callable[..., Any]], torch.Tensor]
Side = Literal["fp64", "fp32", "low"]


@dataclass
class Run:
    """One training step on one side.

    Attributes:
        loss: the loss.
        calls: the graphs that ran, in their order, with what was recorded.
        gradients: of the parameters, by name, FP32 and unscaled.
        state: what the step left in the model; None before it has ended.
    """

    loss: float = 0.0
    calls: list[tuple[Planned, Record]] = field(default_factory=list)
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    state: _State | None = None

    def record_of(self, number: int, graph: Planned) -> Record | None:
        """What was recorded in the call of this number, if it was one of this graph."""
        same = number < len(self.calls) and self.calls[number][0] is graph
        return self.calls[number][1] if same else None


class _State:
    """The buffers and other attributes of a model and its submodules, but for the parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.own = [(m, dict(vars(m)), dict(buffers_of(m))) for m in model.modules()]
        self.tensors = [(b, b.clone()) for b in model.buffers()]

    def restore(self) -> None:
        for module, attributes, buffers in self.own:
            for now, before in ((vars(module), attributes), (buffers_of(module), buffers)):
                for name in [name for name in now if name not in before]:
                    del now[name]
                changed = [name for name in before if now.get(name, self) is not before[name]]
                now.update({name: before[name] for name in changed})
        with torch.no_grad():
            for buffer, value in self.tensors:
                buffer.copy_(value)


class Sides:
    """One model and one call of it, to be run on any side.

    Args:
        twin: a copy of the model, which may be changed.
        args, kwargs: the arguments of the call.
        loss: of the model's result.
        settings: how the model is rewritten.
        mp_optimizer: whether an `MPOptimizer` holds the parameters: see `reads_copies`.
        repairs: what `repair=True` has pinned while the model trained.

    Attributes:
        plans: of the graphs traced so far; one that was left in FP32 says why.
        scale: the loss scale of the next run on the low side.
        seed: of the random numbers; one for each training step.
        keep: whether the next run in FP32 keeps its values, for others to be compared with.
    """

    def __init__(
        self,
        twin: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        loss: Loss,
        settings: Settings,
        mp_optimizer: bool,
        repairs: Repairs,
    ) -> None:
        self.twin, self.call, self.loss = twin, (tuple(args), dict(kwargs)), loss
        self.settings = replace(settings, names=names_in(twin))
        self.mp_optimizer = mp_optimizer
        self.repairs = repairs
        self.plans: list[GraphPlan] = []
        self.scale, self.seed, self.keep = 1.0, 0, False
        # Dynamo keeps each backend for as long as the process runs.
        compiled = compiled_apart(twin, weakly(self._backend), "diagnose")
        self.forward = running(compiled, twin, looking=None, **settings_for(twin))
        self._side: Side = "fp64"
        self._run, self._exact = Run(), Run()

    def advance(self, run: Run) -> None:
        """Go on from the buffers that a run left, with other random numbers."""
        assert run.state is not None
        run.state.restore()
        self.seed += 1

    def run(self, side: Side, exact: Run | None = None, step: Step | None = None) -> Run:
        """One forward and backward, from the same random numbers and buffers on every side.

        Args:
            side: which program.
            exact: the run to compare with: in FP64, or in FP32 if that failed; None for itself.
            step: calls the function that it is given, the model, and returns the loss; default: the
                call of the constructor.
        """
        self._side, self._run, self._exact = side, Run(), exact or Run()
        args, kwargs = pytree.tree_map_only(torch.Tensor, _fresh, widened(*self.call))
        self.twin.zero_grad()
        state = _State(self.twin)
        try:
            with nothing_happened(), torch.random.fork_rng(), torch.enable_grad():
                torch.manual_seed(self.seed)
                loss = step(self.forward) if step else self.loss(self.forward(*args, **kwargs))
                _check_loss(loss)
                loss.backward()
            self._run.state = _State(self.twin)
        finally:
            state.restore()
        self._run.loss = float(loss.detach())
        self._run.gradients = {name: p.grad for name, p in self.twin.named_parameters()}
        self.twin.zero_grad()
        return self._run

    # -- as a torch.compile backend ---------------------------------------------------------------

    def _backend(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        device, compiled = device_of(example_inputs), self._names(example_inputs)

        def facts() -> Facts:
            copied = self.mp_optimizer and reads_copies(self.settings.level, device)
            masters = fp32_parameters(example_inputs) if copied else ()
            target = target_of(device, self.settings.dtype)
            return Facts(
                target, around_now(gm, example_inputs, device.type, self.settings.names()),
                scaled=scale_for(example_inputs, target.low, self.settings) is not None,
                copied=dict.fromkeys(masters), pinned=self.repairs.pins,
            )  # fmt: skip

        graph = planned_or_why(gm, example_inputs, self.settings, facts)
        if isinstance(graph, str):
            self.plans.append(plan_of_left(graph, device))
            return gm.forward
        self.plans.append(graph.plan)

        def call(*args: Any) -> Any:
            record = Record(path_of=moved(compiled, self._names(args)))
            self._run.calls.append((graph, record))
            return self._watched(graph, record, len(self._run.calls) - 1, args)

        return call

    def _names(self, inputs: Sequence[Any]) -> list[str | None]:
        names = self.settings.names()
        return [names.get(id(x)) for x in inputs]

    def _watched(self, graph: Planned, record: Record, number: int, args: Sequence[Any]) -> Any:
        if self._side == "fp64":
            return Exact(graph.captured, record).run(*args)
        exact = self._exact.record_of(number, graph)
        if self._side == "fp32":
            kind = Keeping if self.keep else Observer
            return kind(graph.captured, record, exact).run(*args)
        inputs = self._assembled(graph, args)
        return Observer(graph.rewritten, record, exact, self.scale).run(*inputs)

    def _assembled(self, graph: Planned, args: Sequence[Any]) -> list[Any]:
        inputs, device = graph.inputs, device_of(args)
        scale = torch.tensor(self.scale, device=device)
        found = torch.zeros((), device=device, requires_grad=True)
        scaling = (scale, found) if inputs.scaled else ()
        working = []
        placeholders = graph.rewritten.graph.find_nodes(op="placeholder")
        for k, of in inputs.copies.items():
            # Gradients of copies leave the graph scaled: this divides them, on their way to p.grad.
            master = args[of]
            if inputs.scaled:
                master = torch.ops.mpcompile.unscale_grad(master, scale, found)
            working.append(master.to(ir.dtype(placeholders[k])))
        return inputs.assembled(args, working, scaling)


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        what = repr(loss)
        if isinstance(loss, torch.Tensor):
            lacks = "" if loss.requires_grad else " without a gradient"
            what = f"a tensor of shape {tuple(loss.shape)}{lacks}"
        raise MPCompileError(
            f"loss_fn returned {what}: it must make one number with a gradient of the model's "
            "result, as `lambda out: F.cross_entropy(out, y)` does"
        )


# By how much the scale is lowered until no gradient overflows. A training halves it.
BACKOFF = 16


def low_dtype_of(sides: Sides) -> torch.dtype:
    """The low dtype of the graphs; FP32 if all were left."""
    names = [plan.dtype for plan in sides.plans if plan.left is None]
    low: torch.dtype = getattr(torch, names[0]) if names else torch.float32
    return low


def run_low(
    sides: Sides, full: Run, exact: Run | None, live: float | None
) -> tuple[Run, float | None]:
    """Run the low side, and find the largest power of two by which its gradients can be multiplied.

    Args:
        sides: their `scale` is set to that of the run.
        full, exact: the runs in FP32 and FP64; None if there is none in FP64.
        live: the loss scale at which the model trains, or None: it hasn't begun.

    Returns:
        The run, and that power of two; None for BF16, and where there are no gradients.
    """
    reference = exact or full
    if low_dtype_of(sides) is not torch.float16:
        sides.scale = _scale(sides.settings, live, None)
        return sides.run("low", reference), None
    fits = _fitting(_largest(reference, low=False))
    sides.scale = _scale(sides.settings, live, fits)
    low = sides.run("low", reference)
    # Terms of a gradient may be larger than their sum: go down as a training does.
    rule = _rule(sides.settings)
    curable = rule.dynamic and math.isfinite(low.loss) and not _overflowed(full)
    while curable and _overflowed(low) and sides.scale > rule.min_scale:
        sides.scale = max(rule.min_scale, sides.scale / BACKOFF)
        low = sides.run("low", reference)
    if _overflowed(low):
        return low, fits
    # The exact gradient of a value counts its readers in FP32, too: the scale may be too low.
    fits = _fitting(_largest(low, low=True) / sides.scale)
    before, sides.scale = sides.scale, _scale(sides.settings, live, fits)
    if sides.scale == before:
        return low, fits
    better = sides.run("low", reference)
    if _overflowed(better):  # what was too small to be seen before
        sides.scale = before
        return low, before
    return better, fits


def _largest(run: Run, *, low: bool) -> float:
    """The largest gradient of a value that the rewritten graph stores in FP16 and scales: as the
    low side has it, or as another side has that of the program's value.
    """
    sizes = [0.0]
    for graph, record in run.calls:
        for n, scaled in gradient_units(graph.rewritten.graph).items():
            value = ir.tensor(n)
            if (scaled or not low) and value is not None and value.dtype is torch.float16:
                name = n.name if low else ir.unadded(n).name
                sizes.append(record.gradients.get(name, Numbers()).amax)
    return max(sizes)


def _overflowed(run: Run) -> bool:
    return any(n.bad for _, record in run.calls for n in record.gradients.values())


def _fitting(largest: float) -> float | None:
    """The largest power of two that keeps a gradient below the end of FP16."""
    if not largest:
        return None
    return float(2.0 ** (math.ceil(math.log2(torch.finfo(torch.float16).max / largest)) - 1))


def _rule(settings: Settings) -> ScaleRule:
    return settings.loss_scale.rule if settings.loss_scale is not None else ScaleRule()


def _scale(settings: Settings, live: float | None, fits: float | None) -> float:
    """What a training at this point would scale by."""
    given, rule = settings.loss_scale, _rule(settings)
    if given is not None and not rule.dynamic:
        return given.value if given.active else 1.0
    start = live or (INIT_SCALE if given is None or given.fitting else given.value)
    return max(rule.min_scale, min(start, start if fits is None else fits))
