"""What a step reads: its numbers and its gradients. Rewriting passes.

**`lift_numbers`** keeps numbers on the device: no graph of a step reads a tensor's value.

    item = _local_scalar_dense(lr)                      mul = mul(g, lr)
    add(p, g, alpha=item)                        ->     add(p, mul)

torch.optim writes `p.add_(g, alpha=-lr)`; if the learning rate is a tensor, that reads a number
from the device, which would make the host wait in every step. A setting that is an input of the
graph (a momentum that a scheduler changes) arrives as a symbolic number. It becomes a 0-d tensor
too, and arithmetic on it (`1 - beta`) becomes arithmetic on tensors.

**`take_gradients`** hands gradients to the optimizer: in its parameters' dtype, and clipped.

    grad0: bf16                  ->      to = to(grad0, f32)
    update(param0, grad0)                update(param0, mul(to, factor))

Gradients arrive unscaled: what makes them divides the loss scale out (NVIDIA's guide to mixed
precision: clip after unscaling). Most are FP32; without a scale, a gradient that only the optimizer
reads is stored in its working copy's dtype.

A step that clips multiplies each by the factor that it has decided on: `mpcompile/optim/decide.py`
computes it from the norm of all gradients, as `torch.nn.utils.clip_grad_norm_` does.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from mpcompile import ir
from mpcompile.errors import CannotRewrite
from mpcompile.ir import aten
from mpcompile.ir.step_config import FACTOR, Slot, StepConfig
from mpcompile.torch_inside.names import OpOverload

_TO = aten._to_copy.default
_WHY = "the number stays on the device"
_ARITHMETIC = {
    operator.add: aten.add.Tensor, operator.sub: aten.sub.Tensor, operator.mul: aten.mul.Tensor,
    operator.truediv: aten.div.Tensor, operator.pow: aten.pow.Tensor_Tensor,
}  # fmt: skip


def lift_numbers(gm: fx.GraphModule, config: StepConfig) -> bool:
    return _Lifter(gm.graph).run()


class _Lifter:
    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.tensors: dict[fx.Node, fx.Node] = {}  # a number -> the 0-d tensor that replaces it

    def run(self) -> bool:
        for node in list(self.graph.nodes):
            if node.target is aten._local_scalar_dense.default:
                self.tensors[node] = node.args[0]
            elif isinstance(node.meta.get("val"), torch.SymFloat):
                with self.graph.inserting_before(ir.after(node)):
                    self.tensors[node] = self._tensor_for(node)
            elif any(n in self.tensors for n in node.all_input_nodes):
                with self.graph.inserting_before(node):
                    node.replace_all_uses_with(self._lifted(node))
                self.graph.erase_node(node)
        for number, tensor in reversed(self.tensors.items()):
            if number is not tensor:
                self.graph.erase_node(number)
        return bool(self.tensors)

    def _call(self, target: OpOverload, *args: object) -> fx.Node:
        return ir.call(self.graph, target, *args, why=_WHY)

    def _tensor_for(self, node: fx.Node) -> fx.Node:
        if node.op == "placeholder":
            ir.become_tensor(node)
            return node
        if node.target is operator.neg:
            return self._call(aten.neg.default, self._of(node.args[0]))
        if node.target not in _ARITHMETIC:
            raise CannotRewrite(f"it computes {node.target} of a setting that changes")
        return self._call(_ARITHMETIC[node.target], *map(self._of, node.args))

    def _of(self, number: Any) -> fx.Node:
        """A 0-d FP64 tensor for a number, symbolic or plain."""
        if number in self.tensors:
            return self.tensors[number]
        if isinstance(number, fx.Node):
            return number
        like = next(iter(self.tensors.values()))
        with ir.fake_mode(self.graph):
            device = ir.value(like).device
        return ir.call(
            self.graph, aten.full.default, [], float(number),
            why=_WHY, dtype=torch.float64, device=device,
        )  # fmt: skip

    def _lifted(self, node: fx.Node) -> fx.Node:
        """The value of `node`, computed from 0-d tensors, not from numbers read from these."""
        call = self._call

        def wide(b: fx.Node) -> fx.Node:  # the operator rounds once, in the wider dtype
            dtype = ir.dtype(node)
            return b if ir.dtype(b) is dtype else ir.call(self.graph, _TO, b, why=_WHY, dtype=dtype)

        match node.target, node.args, dict(node.kwargs):
            case ((aten.add.Tensor | aten.sub.Tensor), (a, fx.Node() as b), {"alpha": s}):
                return call(node.target, a, call(aten.mul.Tensor, wide(b), self._of(s)))
            case aten.addcdiv.default, (a, fx.Node() as b, c), {"value": s}:
                quotient = call(aten.div.Tensor, wide(b), c)
                return call(aten.add.Tensor, a, call(aten.mul.Tensor, quotient, self._of(s)))
            case aten.addcmul.default, (a, fx.Node() as b, c), {"value": s}:
                product = call(aten.mul.Tensor, wide(b), c)
                return call(aten.add.Tensor, a, call(aten.mul.Tensor, product, self._of(s)))
            case aten.lerp.Scalar, (a, b, s), {}:
                part = call(aten.mul.Tensor, call(aten.sub.Tensor, b, a), self._of(s))
                return call(aten.add.Tensor, a, part)
            case ((aten.pow.Scalar | aten.pow.Tensor_Scalar), (a, b), {}):
                return call(aten.pow.Tensor_Tensor, self._of(a), self._of(b))
            case ((aten.rsub.Scalar | aten.rsub.Tensor), (a, b), {}):
                return call(aten.sub.Tensor, self._of(b), self._of(a))
            case (
                (
                    aten.add.Tensor | aten.sub.Tensor | aten.mul.Tensor | aten.div.Tensor
                    | aten.add.Scalar | aten.sub.Scalar | aten.mul.Scalar | aten.div.Scalar
                ),
                (a, b),
                {},
            ):  # fmt: skip
                packet = node.target.overloadpacket
                return call(packet.Tensor, self._of(a), self._of(b) if b in self.tensors else b)
        raise CannotRewrite(f"it needs a number read from a tensor in {ir.op_name(node)}")


def take_gradients(gm: fx.GraphModule, config: StepConfig) -> bool:
    graph, to = gm.graph, aten._to_copy.default
    changed, start, slots = False, ir.first_call(graph), ir.slots(graph)
    factor = ir.scalar_slot(graph, FACTOR, torch.float32) if config.clipped else None
    for i, gradient in enumerate(config.gradients):
        stored = taken = slots[Slot("grad", i)]
        readers, wanted = list(stored.users), ir.dtype(stored)
        with graph.inserting_before(start):
            if gradient.dtype is not wanted:
                ir.set_dtype(stored, gradient.dtype)
                taken = ir.call(graph, to, taken, why="it is stored in low precision", dtype=wanted)
            if factor is not None:
                why = f"the global norm is clipped to {config.max_grad_norm:g}"
                taken = ir.call(graph, aten.mul.Tensor, taken, factor, why=why)
                if ir.dtype(taken) is not wanted:  # true of a 0-d gradient
                    taken = ir.call(graph, to, taken, why=why, dtype=wanted)
        stored.replace_all_uses_with(taken, readers.__contains__)
        changed |= taken is not stored
    return changed
