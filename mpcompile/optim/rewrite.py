"""What stands around the optimizer's own arithmetic in the graph of an update.

    update(param0, grad0, lr)        as traced, with a number read from `lr`
    copy_(param0, new)

    grad = grad0.to(f32) * factor                  as it is rewritten
    update(param0, grad, lr)                       no number is read
    kept = where(skipped, param0, new)
    copy_(param0, kept); copy_(copy0, kept.to(f16))

**Numbers stay on the device.** torch.optim writes `p.add_(g, alpha=-lr)`; if the learning rate is a
tensor, that reads a number from the device, which would make the host wait in every step. A setting
that is an input of the graph (a momentum that a scheduler changes) arrives as a symbolic number. It
becomes a 0-d tensor too, and arithmetic on it (`1 - beta`) becomes arithmetic on tensors.

**Gradients** are handed to the optimizer in its parameters' dtype, and clipped. They arrive
unscaled: what makes them divides the loss scale out (NVIDIA's guide to mixed precision: clip after
unscaling). Most are FP32; without a scale, a gradient that only the optimizer reads is stored in
its working copy's dtype. A step that clips multiplies each by the factor that it has decided on:
`decide.py` computes it from the norm of all gradients, as `torch.nn.utils.clip_grad_norm_` does.

**A step that must be skipped changes nothing.** All that it writes, parameters and the optimizer's
state (moments and step counters), is selected by a value on the device, so the host doesn't wait
for it. In the fused update this costs no memory traffic: the old value is read in any case.

**The low-precision working copy**, which models read, is written next to its FP32 master ("FP32
master weights", Micikevicius et al., ICLR 2018, section 3.1). The new weight is in registers here,
so a write of two bytes saves the next forward a cast of four. A skipped step rewrites the copy's
values. If a copy is stored padded, the graph gets only the part without padding: zeros stay zeros.

Where the copy is the parameter itself (`CopyLayout.leads`), it may hold what someone has written
to it since the last step. Its master then follows, element by element, before all else reads it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .. import ir
from ..errors import CannotRewrite
from ..ir import aten
from ..ir.fakes import like
from ..ir.step_config import FACTOR, SKIPPED, Slot
from ..lower.sections import bind
from ..torch_inside.graphs import schema
from ..torch_inside.names import OpOverload
from .masters import followed
from .members import StepConfig

_ARITHMETIC = (
    operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.neg,
)  # fmt: skip
# They have an overload that takes tensors alone.
_OF_NUMBERS = (
    aten.add.Scalar, aten.sub.Scalar, aten.mul.Scalar, aten.div.Scalar, aten.rsub.Scalar,
    aten.pow.Scalar, aten.pow.Tensor_Scalar,
)  # fmt: skip


def rewritten(gm: fx.GraphModule, config: StepConfig, members: Sequence[int]) -> fx.GraphModule:
    """A traced step, or the part of it that updates some parameters, as it is run.

    Args:
        config: that of the whole step.
        members: which of its parameters the graph updates.

    Raises:
        CannotRewrite: it does with a number of a tensor what no tensor can stand for.
    """
    traced = {slot: node.meta["val"] for slot, node in ir.slots(gm.graph).items()}

    def step(values: Mapping[Slot, torch.Tensor]) -> None:
        known = {slot: values[slot] for slot in traced}
        for slot in (s for s in traced if s.kind == "grad"):
            with ir.because("it is stored in low precision"):
                known[slot] = values[slot].to(traced[slot].dtype)
            if config.clipped:
                with ir.because(f"the global norm is clipped to {config.max_grad_norm:g}"):
                    clipped = known[slot] * values[FACTOR]
                    known[slot] = clipped.to(traced[slot].dtype)  # that of a number was wider
        copies = {Slot("param", s.index): copy for s, copy in values.items() if s.kind == "copy"}
        for slot, copy in copies.items():
            layout = config.copies[members[slot.index]]
            if layout is not None and layout.leads:
                with ir.because("what others wrote to the parameter holds"):
                    known[slot] = followed(copy, values[slot])
        for slot, new in _OnTensors(gm).written(known).items():
            with ir.because("as it is stored"):
                kept = new.to(values[slot].dtype)
            if config.checked:
                with ir.because("unchanged where the step is skipped"):
                    kept = torch.where(values[SKIPPED], known[slot], kept)
            values[slot].copy_(kept)
            if slot in copies:
                with ir.because("the working copy, which O2 reads"):
                    copies[slot].copy_(kept.to(copies[slot].dtype))

    return ir.traced(step, _inputs(gm.graph, traced, config, members))


def _inputs(
    graph: fx.Graph, traced: Mapping[Slot, Any], config: StepConfig, members: Sequence[int]
) -> dict[Slot, torch.Tensor]:
    """A FakeTensor like each input of the graph that a traced step becomes."""
    device = next(value.device for value in traced.values() if isinstance(value, torch.Tensor))
    found = dict(traced)
    with ir.fake_mode(graph):
        if config.checked:
            found[SKIPPED] = torch.empty((), dtype=torch.bool, device=device)
        if config.clipped:
            found[FACTOR] = torch.empty((), dtype=config.norm_dtype, device=device)
        for slot, value in traced.items():
            if not isinstance(value, torch.Tensor):  # a number of a setting
                found[slot] = torch.empty((), dtype=torch.float64, device=device)
            elif slot.kind == "grad":
                found[slot] = like(value, dtype=config.gradients[members[slot.index]].dtype)
            elif slot.kind == "param" and (copy := config.copies[members[slot.index]]) is not None:
                place = Slot("copy", slot.index)
                found[place] = like(value, dtype=copy.dtype, strides=copy.strides)
    return found


class _OnTensors(fx.Interpreter):
    """Runs the graph of a traced step with a 0-d tensor for each number that it would read."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.extra_traceback = False  # it would become a part of the reason
        self._written: dict[Slot, torch.Tensor] = {}

    def written(self, values: Mapping[Slot, torch.Tensor]) -> dict[Slot, torch.Tensor]:
        """What the step writes to its inputs, of which these are the values; nothing is written."""
        self.run(*values.values())
        return self._written

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "placeholder":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        target: Any = n.target
        if target is aten.copy_.default:  # it is functional: these are its writes
            self._written[ir.slot_of(n.all_input_nodes[0])] = args[1]
        elif target is aten._local_scalar_dense.default:
            return args[0].double()
        elif n.op == "call_function" and _has_tensors_for_numbers(target, args, kwargs):
            with ir.because("the number stays on the device"):
                return _computed(n, args, kwargs)
        elif n.op == "call_function":
            return target(*args, **kwargs)
        return None  # of a write, and of the graph


def _has_tensors_for_numbers(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if not isinstance(target, OpOverload):
        return target is not operator.getitem and any(True for _ in ir.tensors_of(args))
    given = bind(target, args, kwargs)
    numbers = [a.name for a in schema(target).arguments if "Tensor" not in str(a.type)]
    return any(True for name in numbers for _ in ir.tensors_of(given.get(name)))


def _computed(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a node computes where 0-d tensors stand for numbers."""
    target: Any = node.target
    if target in _ARITHMETIC:
        return target(*args)
    if target in _OF_NUMBERS and len(args) == 2 and not kwargs:
        return target.overloadpacket(*args)

    def wide(b: torch.Tensor) -> torch.Tensor:  # the operator rounds once, in the wider dtype
        return b.to(ir.dtype(node))

    match target, args, kwargs:
        case ((aten.add.Tensor | aten.sub.Tensor), (a, torch.Tensor() as b), {"alpha": s}):
            return target(a, wide(b) * s)
        case aten.addcdiv.default, (a, b, c), {"value": s}:
            return a + wide(b) / c * s
        case aten.addcmul.default, (a, b, c), {"value": s}:
            return a + wide(b) * c * s
        case aten.lerp.Scalar, (a, b, s), _:
            return a + (b - a) * s
    if isinstance(target, OpOverload):
        raise CannotRewrite(f"it needs a number read from a tensor in {target.name()}")
    raise CannotRewrite(f"it computes {target} of a setting that changes")
