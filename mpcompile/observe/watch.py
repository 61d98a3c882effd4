"""Runs a graph node by node, under autograd, and records its values and gradients.

    record = Record()
    results = Observer(gm, record).run(*inputs)  # as gm(*inputs), at the speed of eager torch
    loss_of(results).backward()                  # the rest of the record is filled here

The graph is one that passes rewrite, before checkpoints are folded back: captured (the FP32
program) or rewritten. Autocast must be off, as the graph states every dtype itself. `Keeping` and
`Exact` keep what they compute; an `Observer` may compare with that.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .. import ir
from ..ir.dtypes import HALF
from ..ir.units import GradFn, between, grad_fns
from ..torch_inside.graphs import schema
from ..torch_inside.names import OpOverload, autocast_off, pytree
from ..torch_inside.tensors import is_float, version
from .record import BackwardStep, Numbers, Record, Shares, floats_of, histogram


class Observer(fx.Interpreter):
    """Records magnitudes and what is not finite; beside an exact run, also how far off it all is.

    Args:
        gm: the captured graph, or the rewritten one.
        record: filled by the run.
        exact: the record of the exact run, with its backward done; None: compare with nothing.
        scale: the loss scale of the rewritten graph; None for the captured one.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        record: Record,
        exact: Record | None = None,
        scale: float | None = None,
    ) -> None:
        super().__init__(gm)
        self.record, self.exact, self.scale = record, exact, scale
        self.units = gradient_units(gm.graph) if scale is not None else {}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The results of the graph on these inputs; the caller's grad mode is as before."""
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled()), autocast_off():
                return super().run(*map(_passed, args), **kwargs)
        finally:
            # Autograd's nodes hold this object, by its hooks: what it holds of them is never freed.
            self.env.clear()
            self.args_iter = iter(())

    def run_node(self, n: fx.Node) -> Any:
        operands = [self.env[operand] for operand in n.all_input_nodes]
        known = grad_fns(operands)
        result = self.computed(n)
        if n.op == "output" or ir.is_getitem(n):
            return result
        with torch.no_grad():
            self.saw(n, result)
        self._hook(n, result, known)
        return result

    def computed(self, n: fx.Node) -> Any:
        """The result of a node. Random numbers are drawn in FP32 whatever the dtype of the graph,
        so that all runs from one seed draw the same.
        """
        if ir.is_op(n) and ir.rule(n).random and ir.rule(n).product is None and not ir.written(n):
            args, kwargs = pytree.tree_map(_in_fp32, self.fetch_args_kwargs_from_env(n))
            result = n.target(*args, **kwargs)  # type: ignore[operator]
            return result.to(self.dtype_of(n)) if is_float(result) else result
        result = super().run_node(n)
        if n.op == "placeholder" and isinstance(result, torch.Tensor) and result.dtype in HALF:
            return result.to(self.dtype_of(n))  # a weight that is stored low, of an FP32 program
        return result

    def dtype_of(self, n: fx.Node) -> torch.dtype:
        """The dtype in which this run stores the result of a node of one result."""
        return ir.dtype(n)

    # -- what is recorded -------------------------------------------------------------------------

    def saw(self, n: fx.Node, result: Any) -> None:
        if found := floats_of(result):
            self.record.values[n.name] = Numbers.of(result)
            if self.exact is not None:
                self._compare(n, found, self.exact)

    def saw_gradient(self, n: fx.Node, number: int, gradient: torch.Tensor) -> None:
        self.record.gradients[n.name] += Numbers.of(gradient)
        if self.exact is not None:
            self._compare_gradient(n, number, gradient, self.exact)

    def _compare(self, n: fx.Node, found: list[torch.Tensor], exact: Record) -> None:
        wanted = exact.exact.get(ir.unadded(n).name)
        if not wanted or [x.shape for x in found] != [x.shape for x in wanted]:
            return
        self.record.errors[n.name] = relative_error(found, wanted)
        if found[0].dtype in HALF:
            self.record.shares[n.name] = Shares.of(wanted, found[0].dtype)

    def _compare_gradient(
        self, n: fx.Node, number: int, gradient: torch.Tensor, exact: Record
    ) -> None:
        wanted = exact.exact_gradients.get((ir.unadded(n).name, number))
        if wanted is None or wanted.shape != gradient.shape or gradient.is_sparse:
            return
        if not _is_whole(n):
            return
        scale = self.scale if self.scale is not None and self.units.get(n) else 1.0
        error = relative_error([gradient.double() / scale], [wanted])
        errors, name = self.record.gradient_errors, n.name
        errors[name] = max(errors.get(name, 0.0), error)
        if gradient.dtype in HALF:
            self.record.gradient_shares[name] = Shares.of([wanted], gradient.dtype, scale)
            nonzero = wanted != 0
            if total := int(nonzero.sum()):
                self.record.lost[name] = int(((gradient == 0) & nonzero).sum()) / total

    def _hook(self, n: fx.Node, result: Any, known: set[GradFn]) -> None:
        if not torch.is_grad_enabled():
            return
        for number, tensor in enumerate(ir.tensors_of(result)):
            if tensor.requires_grad and tensor.is_floating_point():
                tensor.register_hook(functools.partial(self._gradient, n, number))
        if n.op == "placeholder":
            return  # what made it is not of this graph
        for step in between(grad_fns(result), known):
            if step.name() != "torch::autograd::AccumulateGrad":  # a leaf
                step.register_hook(functools.partial(self._stepped, n.name, step.name()))

    # Where a whole training step is compiled, Dynamo would trace what runs in its backward.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def _gradient(self, n: fx.Node, number: int, gradient: torch.Tensor | None) -> None:
        if gradient is not None:  # else it is autograd's zero
            self.saw_gradient(n, number, gradient.detach())

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def _stepped(self, node: str, name: str, passed_on: Any, received: Any) -> None:
        step = BackwardStep(node, name, Numbers.of(received), Numbers.of(passed_on))
        self.record.steps.append(step)


class Keeping(Observer):
    """A run whose values and gradients are kept, for others to be compared with."""

    def __init__(self, gm: fx.GraphModule, record: Record, exact: Record | None = None) -> None:
        super().__init__(gm, record, exact)
        self._written = {ir.storage(to) for n in gm.graph.nodes for to in ir.written(n)}

    def saw(self, n: fx.Node, result: Any) -> None:
        super().saw(n, result)
        kept = floats_of(result)
        if ir.storage(n) in self._written:  # through this name or another
            kept = [x.clone() for x in kept]
        self.record.exact[n.name] = kept

    def saw_gradient(self, n: fx.Node, number: int, gradient: torch.Tensor) -> None:
        super().saw_gradient(n, number, gradient)
        kept, key = self.record.exact_gradients, (n.name, number)
        kept[key] = kept[key] + gradient if key in kept else gradient
        if n.op != "placeholder":  # activations alone, as in the ICLR 2018 paper
            self.record.histogram += histogram(gradient)
            self.record.zeros += int((gradient == 0).sum())


class Exact(Keeping):
    """The exact program: the captured graph in FP64.

    What torch can't compute in FP64 is computed in FP32.
    """

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The results, in the dtypes of the FP32 program. Writes reach the inputs."""
        wide = [_in_fp64(x) for x in args]
        before = [version(x) if isinstance(x, torch.Tensor) else 0 for x in wide]
        results = super().run(*wide, **kwargs)
        with torch.no_grad():
            for x, y, written in zip(args, wide, before, strict=True):
                if y is not x and version(y) != written:
                    x.copy_(y)
        captured: Any = self.graph.output_node().args[0]
        return [_narrowed(x, of) for x, of in zip(results, captured, strict=True)]

    def dtype_of(self, n: fx.Node) -> torch.dtype:
        return torch.float64

    def computed(self, n: fx.Node) -> Any:
        result = super().computed(n)
        return _in_fp64(result) if n.op == "get_attr" else result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the operator with every floating-point dtype replaced by FP64."""
        wide_args, wide_kwargs = pytree.tree_map_only(
            torch.dtype, lambda x: torch.float64 if x.is_floating_point else x, (args, kwargs)
        )
        mutable = isinstance(target, OpOverload) and schema(target).is_mutable
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return super().call_function(target, wide_args, wide_kwargs)
        except (RuntimeError, NotImplementedError):
            if mutable:
                raise
            torch.set_default_dtype(torch.float32)
            narrow_args, narrow_kwargs = pytree.tree_map(_in_fp32, (args, kwargs))
            result = super().call_function(target, narrow_args, narrow_kwargs)
            return pytree.tree_map(_in_fp64, result)
        finally:
            torch.set_default_dtype(default)


def _narrowed(result: Any, of: object) -> Any:
    """A result in the dtype that its node has in the FP32 program."""
    value = ir.tensor(of) if isinstance(of, fx.Node) else None
    return result if value is None else result.to(value.dtype)


def _in_fp32(value: Any) -> Any:
    return value.float() if is_float(value) else value


class _Pass(torch.autograd.Function):
    """Identity, sharing memory (with `detach`, as autograd forbids writes to a view that a Function
    returns). A hook on its result sees the gradient of a leaf, and doesn't stay on it.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


def _passed(value: Any) -> Any:
    """What a run gets for an input, so that the gradient of a leaf is recorded, too, and no hook
    stays behind on a parameter. Writes to it reach the input.
    """
    if not is_float(value) or not value.requires_grad or not value.is_leaf:
        return value
    return _Pass.apply(value)  # type: ignore[no-untyped-call]


class _Widen(torch.autograd.Function):
    """To FP64, also for a value whose gradient is sparse, which torch doesn't cast back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.dtype = x.dtype
        return x.double()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0].to_dense().to(ctx.dtype)


def _in_fp64(value: Any) -> Any:
    if not is_float(value) or value.dtype is torch.float64:
        return value
    return _Widen.apply(value)  # type: ignore[no-untyped-call]


def _is_whole(n: fx.Node) -> bool:
    """Whether the gradient of this node is that of the program's value: no other cast of the value,
    and no reader of the value itself, gets a part of it.
    """
    while ir.role(n) in ir.ADDED and n.all_input_nodes:
        n = n.all_input_nodes[0]
        if len(n.users) > 1:
            return False
    return True


def gradient_units(graph: fx.Graph) -> dict[fx.Node, bool]:
    """Whether the gradient of each value is multiplied by the loss scale (see ir/units.py)."""
    units: dict[fx.Node, bool] = {}
    for n in graph.nodes:
        if n.target is torch.ops.mpcompile.unscale_grad.default:
            units[n] = True
        elif n.target is torch.ops.mpcompile.scale_grad.default:
            units[n] = False
        elif n.op == "placeholder":
            units[n] = ir.copy_of(n) is not None
        else:
            units[n] = any(units[operand] for operand in n.all_input_nodes)
    return units


def relative_error(found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """The norm of the difference over the norm of the exact values, over what is finite in both."""
    off = norm = 0.0
    for x, y in zip(found, exact, strict=True):
        x, y = x.double(), y.double()
        both = x.isfinite() & y.isfinite()
        off += float(torch.where(both, x - y, 0).square().sum())
        norm += float(torch.where(both, y, 0).square().sum())
    return (off / norm) ** 0.5 if norm else float(off > 0)
