"""Decide which dimensions are padded for Tensor Cores, and where padding stays. A deciding pass.

    linear: f16[4, 1001] = linear(x, w)            reads x[4, 264], w[1008, 264]: gives [4, 1008]
    gelu: f16[4, 1001] = gelu(linear)         ->   stays padded: gives [4, 1008]
    linear_1: f16[4, 257] = linear(gelu, w_1)      reads gelu as it is and w_1[264, 1008]
    sum: f32[4] = sum(linear_1, 1)                 reads linear_1[4, 257]

Tensor Cores load rows in pieces of 16 bytes: the dims that are row strides (n and k of a matrix
product, the channels of a convolution, the head size of attention) should be multiples of 8 in FP16
(NVIDIA's mixed-precision guide; on Volta and Turing, the number of rows, too).

Algorithm.
1. In program order, for each product that runs low: the labels of its unaligned dims are padded if
   they can be (`_can_pad`) and, under "auto", if it pays (`_should_not_pad`). Its result then has
   lanes; later nodes may keep them (`mpcompile/padding/lanes.py`).
2. In reverse order: lanes are wanted if a product pads the same dimension anyway, or if a node
   whose own lanes are wanted reads them. Others are cut off right after the product.
3. The padded shapes of each product, and of each node that keeps lanes, are noted on it. All other
   nodes read, and the graph returns, values of their captured sizes.

Padding adds zeros, so a product's result is exact. Weights are padded after their cast to the low
dtype, in one kernel with it; the working copies of O2 are stored padded (read_copies).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import fx

from mpcompile import ir, rules
from mpcompile.ir.shapes import Alignment, Lanes, Padding, Path, Product, Size
from mpcompile.padding.lanes import DimLanes, Kept, kept
from mpcompile.padding.products import product
from mpcompile.rules.policy import Config, Precision


def plan_pads(gm: fx.GraphModule, config: Config) -> bool:
    aligner = _Aligner(gm.graph, config)
    aligner.decide()
    aligner.want()
    aligner.settle()
    return False


class _Aligner:
    def __init__(self, graph: fx.Graph, config: Config) -> None:
        self.graph = graph
        self.config = config
        self.lanes: dict[fx.Node, DimLanes] = {}  # the lanes that each value may have
        self.keeps: dict[fx.Node, dict[int, Kept]] = {}
        self.wanted: dict[fx.Node, set[int]] = {}

    def decide(self) -> None:
        for node in self.graph.nodes:
            found = product(node)
            if found is not None:
                decided = self._align(node, found)
                ir.alignment.set(node, decided)
                self.lanes[node] = _result_lanes(decided)
            elif keeps := kept(node, lambda n: self.lanes.get(n, {})):
                self.keeps[node] = keeps
                self.lanes[node] = {dim: one.lanes for dim, one in keeps.items()}

    def _align(self, node: fx.Node, found: Product) -> Alignment:
        low = ir.precision(node) is Precision.LOW
        multiple = self.config.cores.alignment // ir.mark(node).low.itemsize
        rows = self.config.cores.rows or self.config.pad == "always"
        wanted = (*found.strides, *(found.rows if rows else ()))
        before = _unaligned(found, {}, wanted, multiple)
        padded: dict[str, Size] = {}
        reason = "aligned as it is"
        if not low:
            reason = f"runs in FP32: {ir.mark(node).reason}"
        elif before:
            padded, reason = self._padded(node, found, before, multiple)
        after = _unaligned(found, padded, wanted, multiple)
        return Alignment(found, padded, before, after, multiple, reason)

    def _padded(
        self, node: fx.Node, found: Product, dims: tuple[str, ...], multiple: int
    ) -> tuple[dict[str, Size], str]:
        """Label -> new size, and the reason why it is padded or left."""
        if self.config.pad == "never":
            return {}, "pad='never'"
        padded: dict[str, Size] = {}
        obstacles = []
        for name in dims:
            if (obstacle := _can_pad(found, name)) is not None:
                obstacles.append(f"{name}: {obstacle}")
                continue
            label, size = _cheapest(found, name, multiple)
            padded[label] = size
        if obstacles and not padded:
            return {}, "; ".join(obstacles)
        if self.config.pad == "auto" and (loss := self._should_not_pad(node, found, padded)):
            return {}, loss
        return padded, "; ".join(["padded", *obstacles])

    def _should_not_pad(
        self, node: fx.Node, found: Product, padded: Mapping[str, Size]
    ) -> str | None:
        """Why padding does not pay on this device, or None if it does.

        Padding saves `slowdown - 1` times the product's own time, but none of the time in which it
        waits for memory. It costs a copy (read and write) of each operand that isn't padded
        already; weights are padded where they are cast anyway.
        """
        cores = self.config.cores
        flops = ir.hint(found.flops())
        if (cores.slowdown - 1) * flops <= 0:
            return f"unaligned dims cost nothing on {self.config.device.type}"
        moved = _elements(node, found) * ir.mark(node).low.itemsize * cores.balance
        saved = max(cores.slowdown * flops, moved) - max(flops, moved)
        if saved <= 0:
            return "bound by memory: it takes as long unaligned"
        if found.kind == "attention":
            return "the fused kernels pad heads themselves"
        copied = 0
        for path, operand in self._padded_operands(node, found, padded).items():
            dims = [d for d, x in enumerate(found.operands[path]) if x in padded]
            if not _is_stored(operand) and not self.lanes.get(operand, {}).keys() >= set(dims):
                copied += 2 * math.prod(map(ir.hint, ir.shape(operand)))
        spent = copied * ir.mark(node).low.itemsize * cores.balance
        if spent > saved:
            return f"a copy of its operands takes {spent / saved:.1f} times what alignment saves"
        return None

    def _padded_operands(
        self, node: fx.Node, found: Product, padded: Mapping[str, Size]
    ) -> dict[Path, fx.Node]:
        operands = ir.operands(node)
        return {
            path: operands[path]
            for path, labels in found.operands.items()
            if any(label in padded for label in labels)
        }

    # -- which lanes are wanted -------------------------------------------------------------------

    def want(self) -> None:
        for node in reversed(self.graph.nodes):
            decided = ir.alignment(node)
            if decided is not None and decided.padded:
                self._want_by_product(node, decided)
            for dim in self.wanted.get(node, ()):
                if node in self.keeps:
                    for path, own in self.keeps[node][dim].operands.items():
                        operand = ir.operands(node)[path]
                        if own in self.lanes.get(operand, {}):
                            self.wanted.setdefault(operand, set()).add(own)

    def _want_by_product(self, node: fx.Node, decided: Alignment) -> None:
        product = decided.product
        operands = self._padded_operands(node, product, decided.padded)
        for label, size in decided.padded.items():
            lanes_of = {
                path: self.lanes.get(operand, {}).get(dim)
                for path, operand in operands.items()
                for dim, own in enumerate(product.operands[path])
                if own == label
            }
            ready = {
                path: lanes
                for path, lanes in lanes_of.items()
                if lanes and lanes.content is not None and ir.known_equal(lanes.padded, size)
            }
            if not all(lanes.content == 0 for lanes in ready.values()):
                # A nonzero number in lanes may stay only if it meets zeros that are padded for this
                # product alone: the gradient of those zeros isn't zero, so it must be cut off.
                contracted = product.result is not None and label not in product.result
                if not (contracted and len(ready) == 1):
                    ready = {path: lanes for path, lanes in ready.items() if lanes.content == 0}
            for path in ready:
                dim = product.operands[path].index(label)
                self.wanted.setdefault(operands[path], set()).add(dim)

    # -- shapes -----------------------------------------------------------------------------------

    def settle(self) -> None:
        for node in self.graph.nodes:
            decided = ir.alignment(node)
            if decided is not None and decided.padded:
                ir.padding.set(node, _product_shapes(node, decided))
            elif node in self.keeps and (dims := self.wanted.get(node)):
                ir.padding.set(node, self._kept_shapes(node, dims))

    def _kept_shapes(self, node: fx.Node, dims: set[int]) -> Padding:
        real = ir.shape(node)
        result: list[Size] = list(real)
        operands: dict[Path, list[Size]] = {}
        for dim in dims:
            one = self.keeps[node][dim]
            result[dim] = one.lanes.padded
            for path, own in one.operands.items():
                shape = operands.setdefault(path, list(ir.shape(ir.operands(node)[path])))
                shape[own] = one.lanes.padded
        shapes = {path: tuple(shape) for path, shape in operands.items()}
        return Padding(shapes, real, tuple(result))


def _unaligned(
    product: Product, padded: Mapping[str, Size], wanted: tuple[str, ...], multiple: int
) -> tuple[str, ...]:
    """The dims in `wanted` that are no multiples."""
    sizes = {**product.sizes, **padded}

    def size(name: str) -> Size:
        return math.prod(sizes[label] for label in _counting(product, name))

    return tuple(name for name in wanted if not ir.known_multiple(size(name), multiple))


def _counting(product: Product, name: str) -> tuple[str, ...]:
    """The labels of a dim that may align it: of a row stride the innermost one."""
    labels = product.dims[name]
    return labels if name in product.rows else labels[-1:]


def _can_pad(product: Product, name: str) -> str | None:
    """Why a dim can't be padded, or None."""
    return next((product.fixed[x] for x in product.dims[name] if x in product.fixed), None)


def _elements(node: fx.Node, found: Product) -> int:
    """How many elements the product reads and writes."""
    operands = ir.operands(node)
    read = (ir.shape(operands[path]) for path in found.operands)
    return sum(math.prod(map(ir.hint, shape)) for shape in (*read, ir.shape(node)))


def _cheapest(product: Product, name: str, multiple: int) -> tuple[str, Size]:
    """The label to pad so that the dim becomes a multiple, and its new size.

    Of several labels that count rows (batch, tokens), the one that grows least is padded.
    """
    choices = []
    for label in _counting(product, name):
        others = math.prod(product.sizes[x] for x in product.dims[name] if x != label)
        step = multiple
        if name in product.rows:
            while step > 1 and ir.known_multiple(others * (step // 2), multiple):
                step //= 2
        size = product.sizes[label]
        new = (size + step - 1) // step * step
        choices.append((ir.hint(new) / max(1, ir.hint(size)), label, new))
    _, label, new = min(choices, key=lambda choice: choice[0])
    return label, new


def _result_lanes(decided: Alignment) -> DimLanes:
    """The lanes of a product's result."""
    product = decided.product
    if product.result is None:
        return {}
    return {
        # Zeros; unknown, if an operand without the label (a bias) is added to them.
        dim: Lanes(
            decided.padded[label],
            0.0 if all(label in product.operands[path] for path in product.added) else None,
        )
        for dim, label in enumerate(product.result)
        if label is not None and label in decided.padded
    }


def _product_shapes(node: fx.Node, decided: Alignment) -> Padding:
    def shape(labels: tuple[str | None, ...], real: tuple[Size, ...]) -> tuple[Size, ...]:
        pairs = zip(labels, real, strict=True)
        return tuple(decided.padded.get(x, size) if x is not None else size for x, size in pairs)

    product, operands = decided.product, ir.operands(node)
    shapes = {p: shape(x, ir.shape(operands[p])) for p, x in product.operands.items()}
    if product.result is None:
        return Padding(shapes, None, None)
    real = ir.shape(node)
    return Padding(shapes, real, shape(product.result, real))


def _is_stored(node: fx.Node) -> bool:
    """Whether it is a parameter, after casts and views: it is padded in the cast's kernel."""
    while ir.is_cast(node) or (ir.is_op(node) and ir.kind(node) is rules.Kind.VIEW):
        node = node.all_input_nodes[0]
    return ir.is_parameter(node) is True
