"""Runs one training step of a model three times: exact (FP64), in FP32, and as rewritten.

Dynamo traces a copy of the model once. Each of its graphs is then run node by node, on the side
that is asked for; the program between graphs, and the loss, run as they are, in FP32.
"""

from __future__ import annotations

import copy
import enum
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from .. import ir
from ..backend import config_for, device_of, reason_of, rewrite
from ..calls.module_call import running
from ..capture.provenance import names_in
from ..errors import MPCompileError
from ..inspect.graph_plan import GraphPlan, plan_of_left
from ..ir.inputs import GraphInputs
from ..observe.record import Record
from ..observe.watch import Comparing, Keeping, Watch
from ..pipeline import Kept
from ..planner.target import target_of
from ..rules.policy import Config, Level
from ..settings import Settings

Loss = Callable[[Any], torch.Tensor]
Step = Callable[[Callable[..., Any]], torch.Tensor]


class Side(enum.Enum):
    """Which program runs."""

    EXACT = "fp64"
    FULL = "fp32"
    LOW = "low"


@dataclass
class Graph:
    """One graph of the model.

    Attributes:
        plan: its plan; one that says why, for a graph that was left in FP32.
        captured, rewritten: what runs; None for a graph that was left.
        inputs: which input of the rewritten graph is what.
    """

    plan: GraphPlan
    captured: fx.GraphModule | None = None
    rewritten: fx.GraphModule | None = None
    inputs: GraphInputs | None = None


@dataclass
class Run:
    """One training step on one side.

    Attributes:
        loss: the loss.
        calls: the graphs that ran, in their order, with what was recorded.
        gradients: of the parameters, by name, FP32 and unscaled.
    """

    loss: float = 0.0
    calls: list[tuple[Graph, Record]] = field(default_factory=list)
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)


class Sides:
    """One model and one call of it, to be run on any side.

    Args:
        twin: a copy of the model, which may be changed.
        args, kwargs: the arguments of the call.
        loss: of the model's result.
        settings: how the model is rewritten.
        mp_optimizer: whether an `MPOptimizer` holds the parameters; matters at O2.

    Attributes:
        graphs: those traced so far.
        scale: the loss scale of the next run on the low side.
    """

    def __init__(
        self,
        twin: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        loss: Loss,
        settings: Settings,
        mp_optimizer: bool,
    ) -> None:
        self.twin, self.call, self.loss = twin, (tuple(args), dict(kwargs)), loss
        self.settings = replace(settings, names=names_in(twin))
        self.copied = mp_optimizer and settings.level is Level.O2
        self.graphs: list[Graph] = []
        self.scale = 1.0
        self.forward = _apart(twin, self._backend)
        self._side, self._run, self._exact = Side.EXACT, Run(), Run()

    def run(self, side: Side, exact: Run | None = None, step: Step | None = None) -> Run:
        """One forward and backward, from the same random numbers and buffers on every side.

        Args:
            side: which program.
            exact: the run in FP64 to compare with; None on its own side, or if it failed.
            step: calls the function that it is given, the model, and returns the loss; default: the
                call of the constructor.
        """
        self._side, self._run, self._exact = side, Run(), exact or Run()
        buffers = {name: b.clone() for name, b in self.twin.named_buffers()}
        args, kwargs = pytree.tree_map_only(torch.Tensor, _fresh, self.call)
        self.twin.zero_grad()
        try:
            with torch.random.fork_rng(), torch.enable_grad():
                torch.manual_seed(0)
                loss = step(self.forward) if step else self.loss(self.forward(*args, **kwargs))
                _check_loss(loss)
                loss.backward()
        finally:
            with torch.no_grad():
                for name, b in self.twin.named_buffers():
                    if name in buffers:
                        b.copy_(buffers[name])
        self._run.loss = float(loss.detach())
        self._run.gradients = {name: p.grad for name, p in self.twin.named_parameters()}
        self.twin.zero_grad()
        return self._run

    # -- as a torch.compile backend ---------------------------------------------------------------

    def _backend(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        graph = self._graph(gm, example_inputs)
        self.graphs.append(graph)
        if graph.rewritten is None:
            return gm.forward

        def call(*args: Any) -> Any:
            record = Record()
            self._run.calls.append((graph, record))
            return self._watched(graph, record, len(self._run.calls) - 1, args)

        return call

    def _graph(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Graph:
        device, kept = device_of(example_inputs), Kept()
        try:
            rewritten, plan = rewrite(
                gm, example_inputs, self._config(device, example_inputs), self.settings, kept
            )
        except MPCompileError:
            raise
        except Exception as error:
            return Graph(plan_of_left(reason_of(error), device))
        return Graph(plan, kept.captured, kept.rewritten, GraphInputs.of(rewritten.graph))

    def _config(self, device: torch.device, example_inputs: Sequence[Any]) -> Config:
        tensors = [(i, x) for i, x in enumerate(example_inputs) if isinstance(x, torch.Tensor)]
        masters = [
            i for i, x in tensors
            if self.copied and isinstance(x, nn.Parameter) and x.dtype is torch.float32
        ]  # fmt: skip
        target = target_of(device, self.settings.dtype)
        given = self.settings.loss_scale
        active = target.low is torch.float16 or self.settings.scale_any_dtype
        trained = torch.is_grad_enabled() and any(x.requires_grad for _, x in tensors)
        return config_for(
            target, self.settings, copied=dict.fromkeys(masters),
            scaled=trained and active and (given is None or given.active),
        )  # fmt: skip

    def _watched(self, graph: Graph, record: Record, number: int, args: Sequence[Any]) -> Any:
        assert graph.captured is not None
        assert graph.rewritten is not None
        assert graph.inputs is not None
        if self._side is Side.EXACT:
            return Keeping(graph.captured, record).run(*args)
        exact = self._exact_record(graph, number)
        if self._side is Side.FULL:
            return _watch(graph.captured, record, exact, None).run(*args)
        inputs = self._assembled(graph, graph.inputs, args)
        return _watch(graph.rewritten, record, exact, self.scale).run(*inputs)

    def _exact_record(self, graph: Graph, number: int) -> Record | None:
        """What the exact side recorded in this call, if it made the same one."""
        calls = self._exact.calls
        same = number < len(calls) and calls[number][0] is graph
        return calls[number][1] if same else None

    def _assembled(self, graph: Graph, inputs: GraphInputs, args: Sequence[Any]) -> list[Any]:
        """The inputs of the rewritten graph: working copies, and the loss scale."""
        assert graph.rewritten is not None
        device = device_of(args)
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


def _watch(gm: fx.GraphModule, record: Record, exact: Record | None, scale: float | None) -> Watch:
    return Watch(gm, record) if exact is None else Comparing(gm, record, exact, scale)


_numbers = itertools.count()


def _apart(module: nn.Module, backend: Callable[..., Any]) -> Callable[..., Any]:
    """The module's forward, compiled under a name of its own, so that Dynamo keeps it apart."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    name = f"diagnose_{next(_numbers)}_of_{type(module).__name__}"
    forward.__code__ = forward.__code__.replace(co_name=name)
    compiled = torch.compile(forward, backend=backend, dynamic=False)
    return running(compiled, has_rnns=any(isinstance(m, nn.RNNBase) for m in module.modules()))


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else loss
        raise MPCompileError(
            f"loss_fn returned {what!r}: it must make one number with a gradient of the model's "
            "result, as `lambda out: F.cross_entropy(out, y)` does"
        )


def copied(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    """A copy of a model, and one of an optimizer that holds the copy's parameters.

    Raises:
        MPCompileError: something in them can't be copied.
    """
    try:
        return copy.deepcopy((model, optimizer))
    except Exception as error:
        raise MPCompileError(
            f"{type(model).__name__} can't be copied ({type(error).__name__}: {error}); only a "
            "copy is diagnosed, so that nothing happens to the model"
        ) from error
