"""Insert the pads and cuts that `plan_pads` decided. A rewriting pass; it decides nothing.

    linear: f16[4, 1001] = linear(x, w)        x_padded: f16[4, 264] = constant_pad_nd(x, [0, 7])
    sum: f16[4] = sum(linear, 1)          ->   w_padded: f16[1008, 264] = constant_pad_nd(w, ...)
                                               linear: f16[4, 1008] = linear(x_padded, w_padded)
                                               linear_cut: f16[4, 1001] = slice(linear, 1, 0, 1001)
                                               sum: f16[4] = sum(linear_cut, 1)

There is one pad or cut for each value and shape, right after the value's producer, as for casts. A
cut gets the memory layout that its value was captured with, which its readers (a view, the caller)
rely on; elementwise readers, which make a dense result of any operand, read the slice directly.

A symbolic size is padded by a symbolic amount, computed in the graph.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx

from mpcompile import ir
from mpcompile.errors import CannotRewrite
from mpcompile.ir import aten
from mpcompile.ir.shapes import Padding, Path, Size
from mpcompile.padding.lanes import densifies
from mpcompile.rules.policy import Config
from mpcompile.torch_inside.names import CleanDiv, FloorDiv, Mod, PythonMod

# The operations in symbolic sizes (torch 2.13: sympy's sums and products, torch's own divisions).
_ARITHMETIC = {
    sympy.Add: operator.add, sympy.Mul: operator.mul, FloorDiv: operator.floordiv,
    CleanDiv: operator.floordiv, Mod: operator.mod, PythonMod: operator.mod,
}  # fmt: skip


def place_pads(gm: fx.GraphModule, config: Config) -> bool:
    return _PadPlacer(gm.graph).run()


class _PadPlacer:
    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.captured: dict[fx.Node, torch.Tensor] = {}  # value with lanes -> its fake without them
        self.fitted: dict[tuple[fx.Node, str, bool], fx.Node] = {}
        self.sizes = _Sizes(graph)

    def run(self) -> bool:
        placed = [node for node in self.graph.nodes if ir.padding(node) is not None]
        for node in list(self.graph.nodes) if placed else ():
            padding = ir.padding(node)
            if padding is not None and not self._is_done(node, padding):
                self._resize(node, padding)
            elif padding is None:
                for operand in [n for n in node.all_input_nodes if n in self.captured]:
                    cut = self._fit(operand, self.captured[operand].shape, node)
                    node.replace_input_with(operand, cut)
        return bool(self.fitted)

    def _is_done(self, node: fx.Node, padding: Padding) -> bool:
        """Whether the node was resized already."""
        operands = ir.operands(node)
        shapes = [(ir.shape(operands[path]), shape) for path, shape in padding.operands.items()]
        if padding.result is not None:
            shapes.append((ir.shape(node), padding.result))
        return all(itertools.starmap(ir.same_shape, shapes))

    def _resize(self, node: fx.Node, padding: Padding) -> None:
        """Give a node its padded operands, and its new shape."""
        wanted: dict[Path, Sequence[Size]] = dict(padding.operands)
        for path, operand in ir.operands(node).items():
            if operand in self.captured:
                wanted.setdefault(path, self.captured[operand].shape)
        if ir.op_name(node) == "aten::scaled_dot_product_attention":
            self._keep_scale(node)
        for path, shape in wanted.items():
            ir.set_operand(node, path, self._fit(ir.operands(node)[path], shape, node))
        before = ir.tensor(node)
        if before is not None and padding.result is not None:
            self.captured[node] = before
            if ir.rule(node).dims == "reshape":
                _resize_reshape(node, before.shape, padding.result)
        ir.refresh(node)
        if padding.result is not None:
            assert ir.same_shape(ir.shape(node), padding.result), f"{node.name} went astray"

    def _keep_scale(self, node: fx.Node) -> None:
        """Set attention's scale from the unpadded head size."""
        if ir.argument(node, "scale") is None:
            query = ir.argument(node, "query")
            head = self.captured.get(query, ir.value(query)).shape[-1]
            node.update_kwarg("scale", head**-0.5)

    # -- pads and cuts ----------------------------------------------------------------------------

    def _fit(self, value: fx.Node, shape: Sequence[Size], user: fx.Node) -> fx.Node:
        """The value in another shape: dims that are too large are cut, others padded with zeros."""
        now = ir.shape(value)
        if ir.same_shape(now, shape):
            return value
        as_captured = user.op == "output" or not densifies(user)
        key = (value, str(tuple(shape)), as_captured)
        if key not in self.fitted or ir.is_mutable(value):
            real = self.captured[value].shape if value in self.captured else now
            kept = [
                a if ir.known_equal(a, b) else c for a, b, c in zip(now, shape, real, strict=True)
            ]
            before = user if ir.is_mutable(value) else ir.after(value)
            with self.graph.inserting_before(before):
                why = f"{_reader(user)} reads the real size"
                fitted = ir.cut_to(value, kept, why, self.sizes.argument)
                if as_captured and value in self.captured and ir.same_shape(kept, real):
                    fitted = self._laid_out(fitted, self.captured[value], value)
                self.fitted[key] = self._pad(fitted, shape, value, user)
        return self.fitted[key]

    def _laid_out(self, cut: fx.Node, captured: torch.Tensor, like: fx.Node) -> fx.Node:
        """The value in the memory layout of its captured form."""
        if ir.same_shape(ir.value(cut).stride(), captured.stride()):
            return cut
        decision = ir.added(ir.Role.PAD, "in the layout that it was captured in")
        return ir.dense_in_order(cut, captured, f"{like.name}_dense", decision)

    def _pad(self, value: fx.Node, shape: Sequence[Size], like: fx.Node, user: fx.Node) -> fx.Node:
        now = ir.shape(value)
        if ir.same_shape(now, shape):
            return value
        amounts: list[Any] = []
        changes = []
        for old, new in reversed(list(zip(now, shape, strict=True))):
            amounts += [0, 0 if ir.known_equal(old, new) else self.sizes.argument(new - old)]
            if not ir.known_equal(old, new):
                changes.append(f"{old} -> {new}")
        while amounts[-1] == 0:
            amounts = amounts[:-2]
        why = f"{', '.join(reversed(changes))} for {_reader(user)}"
        args = (value, amounts)
        pad, decision = aten.constant_pad_nd.default, ir.added(ir.Role.PAD, why)
        name = f"{like.name}_padded"
        return ir.insert(pad, *args, name=name, like=like, decision=decision)


class _Sizes:
    """Symbolic sizes as arguments of calls: each is computed once, right after the inputs."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.decision = ir.added(ir.Role.PAD, "a size that is known at run time")
        self.nodes: dict[sympy.Expr, fx.Node] = {}
        self.first = ir.first_call(graph)
        self.inputs: list[fx.Node] = list(graph.find_nodes(op="placeholder"))

    def argument(self, size: Size) -> fx.Node | int:
        """The size itself, or a node that computes it."""
        return size if isinstance(size, int) else self._of(size.node.expr)

    def _of(self, expr: sympy.Expr) -> Any:
        if expr.is_Integer:
            return int(expr)
        if expr not in self.nodes:
            self.nodes[expr] = self._read(expr) if expr.is_Symbol else self._compute(expr)
        return self.nodes[expr]

    def _read(self, symbol: sympy.Expr) -> fx.Node:
        for node in self.inputs:
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt) and value.node.expr == symbol:
                return node
            for dim, size in enumerate(ir.shape(node) if ir.tensor(node) is not None else ()):
                if not isinstance(size, int) and size.node.expr == symbol:
                    return self._insert(aten.sym_size.int, (node, dim), node)
        raise CannotRewrite(f"the size {symbol} of a padded value can't be read off an input")

    def _compute(self, expr: sympy.Expr) -> Any:
        if expr.func not in _ARITHMETIC:
            raise CannotRewrite(f"a padded size is computed by {expr.func.__name__}")
        operation = _ARITHMETIC[expr.func]
        first, *rest = map(self._of, expr.args)
        return functools.reduce(
            lambda so_far, other: self._insert(operation, (so_far, other), self.inputs[0]),
            rest,
            first,
        )

    def _insert(self, target: Any, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
        with self.graph.inserting_before(self.first):
            return ir.insert(target, *args, name="size", like=like, decision=self.decision)


def _resize_reshape(node: fx.Node, before: Sequence[Size], after: Sequence[Size]) -> None:
    """Set a view's new sizes; make it a reshape, because its operand may now be strided."""
    sizes = list(node.args[1])  # type: ignore[arg-type]
    for dim, (old, new) in enumerate(zip(before, after, strict=True)):
        if not ir.known_equal(old, new):
            sizes[dim] = new
    node.target = aten.reshape.default
    node.update_arg(1, sizes)


def _reader(user: fx.Node) -> str:
    return "the caller" if user.op == "output" else user.name
