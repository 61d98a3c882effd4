"""Insert the casts that the plan requires. A rewriting pass.

    linear: f32 = linear(x, w)                to: f16 = to(x, f16)
    softmax: f32 = softmax(linear)     ->     to_1: f16 = to(w, f16)
                                              linear: f16 = linear(to, to_1)
                                              to_2: f32 = to(linear, f32)
                                              softmax: f32 = softmax(to_2)

A LOW node reads low operands; every other node, and the graph's output, reads the captured dtypes.
Inputs that are stored low have their own dtype from here on. There is one cast for each value and
dtype, right after the value's producer: there it runs under the grad mode in which the value was
made (a cast inside a later no_grad region would cut the gradient), and Inductor can fuse it
anywhere. That of a parameter stands before its first reader where it may: autograd goes backward in
reverse order, and so widens each gradient right after the product that makes it. (After the
inputs it would be the last thing that a backward does, and all low gradients alive till then.)
A value that is written in place is cast at each use.

A result that the plan rounds to the low dtype is cast down once, and up again for each reader in
FP32: these readers, and the backward, then read two bytes an element.

The pass decides one thing itself, because only a trial shows it: a node whose operator refuses low
operands becomes FULL. The nodes that read it keep their planned precision.

A kernel may lay its result out in another way for other dtypes (attention does). The program was
captured with the layout in FP32: `contiguous()` left the graph where it had nothing to do, and a
view, a kernel of the user's or the caller may rely on it. So such a result is copied back, and all
its readers get the copy.

The cast of an additive attention mask clamps it into the low range (`-3.4e38` would become `-inf`,
and a fully masked row NaN); a true `-inf` stays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import fx
from torch.fx.node import map_aggregate

from mpcompile import ir, rules
from mpcompile.ir import aten
from mpcompile.rules.policy import Config, Precision


def place_casts(gm: fx.GraphModule, config: Config) -> bool:
    return _CastPlacer(gm, config).run()


class _CastPlacer:
    def __init__(self, gm: fx.GraphModule, config: Config) -> None:
        self.gm = gm
        self.graph = gm.graph
        self.config = config
        self.casts: dict[tuple[fx.Node, torch.dtype, bool], fx.Node] = {}
        self.changed: set[fx.Node] = set()

    def run(self) -> bool:
        for node in list(self.graph.nodes):
            if (stored := ir.stored(node)) is not None:
                ir.set_value(node, stored)
                self.changed.add(node)
            elif node.op == "output":
                self._restore_outputs(node)
            elif ir.is_marked(node) and ir.role(node) not in ir.ADDED:
                self._rewrite(node)
        return bool(self.casts or self.changed)

    def _rewrite(self, node: fx.Node) -> None:
        before = node.args, node.kwargs
        self._take_operands(node, low=ir.precision(node) is Precision.LOW)
        fresh = any(n in self.changed for n in node.all_input_nodes)
        if (node.args, node.kwargs) == before and not fresh:
            return
        try:
            self._refresh(node)
        except (RuntimeError, TypeError, ValueError) as error:
            # The operator refuses these dtypes together: restore the captured operands.
            node.args, node.kwargs = before
            reason = f"refuses low operands: {str(error).splitlines()[0][:120]}"
            ir.remark(node, precision=Precision.FULL, by=ir.By.KERNEL, reason=reason)
            self._take_operands(node, low=False)
            ir.restore(node)  # no refresh: it would recompute data-dependent shapes

    def _refresh(self, node: fx.Node) -> None:
        if ir.is_opaque(node):
            return  # its operands, and so its results, are as captured
        ir.refresh(node)
        now, then = ir.tensor(node), ir.captured(node)
        if now is None or then is None or now.dtype != then.dtype:
            self.changed.add(node)
        if not ir.lies_as_captured(node) and ir.has_own_memory(node):
            self._lay_out(node)

    def _lay_out(self, node: fx.Node) -> None:
        """Hand the result on in its captured layout: the kernel for these dtypes has another."""
        users, captured = list(node.users), ir.captured(node)
        assert captured is not None
        decision = ir.added(ir.Role.LAYOUT, "in the layout that it was captured in")
        decision = replace(decision, low=ir.mark(node).low)
        with self.graph.inserting_before(ir.after(node)):
            laid = ir.dense_in_order(node, captured, f"{node.name}_dense", decision)
        node.replace_all_uses_with(laid, users.__contains__)
        ir.stands_for(laid, node)
        if node in self.changed:
            self.changed.add(laid)

    def _take_operands(self, node: fx.Node, *, low: bool) -> None:
        """Replace the node's operands by values in the dtype that it reads."""
        keep_numbers = low and ir.rule(node).promotes
        for position, operand in ir.float_args(node):
            dtype = torch.float32
            if low and rules.castable(node.target, position):
                number = ir.captured(operand).ndim == 0  # type: ignore[union-attr]
                dtype = torch.float32 if keep_numbers and number else ir.mark(node).low
            masked = position in rules.places(node.target, ir.rule(node).masks)
            masked = masked and not ir.is_parameter(operand)  # a trained bias is not a mask
            cast = self._cast(operand, dtype, node, masked=masked and low)
            if cast is not operand:
                _replace_operand(node, position, operand, cast)

    def _restore_outputs(self, output: fx.Node) -> None:
        wanted = self.gm.meta.get("mp_output_dtypes", [])
        results = list(output.args[0])  # type: ignore[arg-type]
        for i, result in enumerate(results):
            if isinstance(result, fx.Node) and ir.was_f32(result):
                dtype = wanted[i] if i < len(wanted) and wanted[i] else torch.float32
                results[i] = self._cast(result, dtype, output, masked=False)
        output.args = (tuple(results),)

    def _cast(self, value: fx.Node, dtype: torch.dtype, user: fx.Node, *, masked: bool) -> fx.Node:
        if ir.is_stored_low(value) and dtype is torch.float32:
            value = self._cast(value, ir.mark(value).low, user, masked=False)
        if ir.dtype(value) == dtype:
            return value
        key, at_use = (value, dtype, masked), ir.is_mutable(value)
        if at_use or key not in self.casts:
            like = user if at_use else value
            reader = "the caller" if user.op == "output" else user.name
            decision = ir.added(ir.Role.CAST, f"{reader} reads {ir.SHORT[dtype]}")
            call = functools.partial(ir.insert, like=like, decision=decision)
            before = user if at_use or _may_wait(value, user) else ir.after(value)
            with self.graph.inserting_before(before):
                if masked:
                    value = _clamped(value, dtype, call)
                name = f"{value.name}_{ir.SHORT[dtype]}"
                self.casts[key] = call(aten.to.dtype, value, dtype, name=name)
        return self.casts[key]


def _clamped(mask: fx.Node, dtype: torch.dtype, insert: Callable[..., fx.Node]) -> fx.Node:
    """`mask` with finite values in the low range; its lower half leaves room for a score."""
    call = functools.partial(insert, name=f"{mask.name}_clamped")
    minus_inf = call(aten.eq.Scalar, mask, float("-inf"))
    clamped = call(aten.clamp_min.default, mask, torch.finfo(dtype).min / 2)
    return call(aten.masked_fill.Scalar, clamped, minus_inf, float("-inf"))


def _may_wait(value: fx.Node, user: fx.Node) -> bool:
    """Whether the cast of a value may stand before this reader: in no region, in grad mode."""
    waits = ir.is_parameter(value) is True and ir.is_op(user)
    return waits and ir.grad_enabled(user) and not ir.regions(user)


def _replace_operand(node: fx.Node, position: int, old: fx.Node, new: fx.Node) -> None:
    """Replace one operand at one schema position; the same value elsewhere in the call stays."""

    def swap(argument: fx.node.Argument) -> fx.node.Argument:
        return map_aggregate(argument, lambda a: new if a is old else a)

    if 0 <= position < len(node.args):
        node.update_arg(position, swap(node.args[position]))
        return
    for name, argument in node.kwargs.items():
        node.update_kwarg(name, swap(argument))
