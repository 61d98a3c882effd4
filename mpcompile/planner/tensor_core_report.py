"""How much of a graph's arithmetic can run on Tensor Cores, product by product, and advice.

A product is *eligible* if it runs in the low dtype and the dims that matter on the device are
multiples of 16 bytes (NVIDIA's mixed-precision guide). FLOPs are those of the forward; the backward
has twice as many, in products of the same dims. A symbolic size counts as the number it was when
the graph was traced.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from .. import ir
from ..ir.shapes import Alignment, Product, Size
from ..ir.text import scaled
from ..rules.policy import Precision

_flops = functools.partial(scaled, unit="FLOP", digits=1)


@dataclass(frozen=True)
class TensorCoreOp:
    """One product.

    Attributes:
        name, op, module: as in the plan's line of this node.
        kind: "gemm", "conv", "attention" or "rnn".
        before, after: its dims by name, as captured and as compiled; a symbolic size as text.
        flops: of the forward, as captured.
        eligible_before, eligible: whether it can run on Tensor Cores, before and after padding.
        reason: what was done about its dims, or why nothing was.
    """

    name: str
    op: str
    module: str
    kind: str
    before: dict[str, int | str]
    after: dict[str, int | str]
    flops: int
    eligible_before: bool
    eligible: bool
    reason: str

    @property
    def sizes(self) -> str:
        """`"m 128, n 50257 -> 50264, k 768"`; a batch and groups of 1 are left out."""
        ones = [
            dim for dim in ("batch", "groups") if self.before.get(dim) == self.after.get(dim) == 1
        ]
        return ", ".join(text for dim, text in self._dims().items() if dim not in ones)

    def _dims(self) -> dict[str, str]:
        pairs = ((dim, size, self.after[dim]) for dim, size in self.before.items())
        return {d: f"{d} {old}" + (f" -> {new}" if new != old else "") for d, old, new in pairs}

    def __str__(self) -> str:
        where, dims = f" ({self.module})" if self.module else "", ", ".join(self._dims().values())
        mark = "yes" if self.eligible else "no"
        return f"{mark:<3}  {_flops(self.flops):>11}  {self.name}{where}: {dims}; {self.reason}"


@dataclass(frozen=True)
class TensorCoreReport:
    """Every product of one graph.

    Attributes:
        ops: in program order.
        advice: sentences that name sizes to change in the model, and what that would save.
    """

    ops: tuple[TensorCoreOp, ...] = ()
    advice: tuple[str, ...] = ()

    @property
    def share_before(self) -> float:
        """Share of the FLOPs, 0 to 1, in products that were eligible as captured."""
        return self._share(op for op in self.ops if op.eligible_before)

    @property
    def share(self) -> float:
        """Share of the FLOPs, 0 to 1, in products that are eligible as compiled."""
        return self._share(op for op in self.ops if op.eligible)

    def _share(self, counted: Iterable[TensorCoreOp]) -> float:
        return sum(op.flops for op in counted) / self.flops if self.flops else 1.0

    @property
    def flops(self) -> int:
        """The FLOPs of all products, forward."""
        return sum(op.flops for op in self.ops)

    def __str__(self) -> str:
        if not self.ops:
            return "Tensor Cores: no matrix product here"
        head = (
            f"Tensor Cores: {self.share_before:.1%} of {_flops(self.flops)} "
            f"eligible as captured, {self.share:.1%} as compiled"
        )
        return "\n".join([head, *map(str, self.ops), *self.advice])


def tensor_core_report(graph: fx.Graph) -> TensorCoreReport:
    """Read the report from a graph whose dims were decided (pass `plan_pads`)."""
    found = [(node, a) for node in graph.nodes if (a := ir.alignment(node)) is not None]
    ops = tuple(_op(node, alignment) for node, alignment in found)
    return TensorCoreReport(ops, tuple(_advice(graph, found)))


def _op(node: fx.Node, alignment: Alignment) -> TensorCoreOp:
    low = ir.precision(node) is Precision.LOW
    product = alignment.product
    return TensorCoreOp(
        name=node.name,
        op=ir.op_name(node),
        module=ir.module_path(node),
        kind=product.kind,
        before=_named(product.measured()),
        after=_named(product.measured(alignment.padded)),
        flops=ir.hint(product.flops()),
        eligible_before=low and not alignment.before,
        eligible=low and not alignment.after,
        reason=alignment.reason,
    )


def _named(dims: dict[str, Size]) -> dict[str, int | str]:
    return {name: size if isinstance(size, int) else str(size) for name, size in dims.items()}


# -- advice ----------------------------------------------------------------------------------------


def _advice(graph: fx.Graph, found: list[tuple[fx.Node, Alignment]]) -> Iterable[str]:
    """One sentence for each unaligned size that the model itself sets, most FLOPs first: not for
    those of its data (the channels of an image) and of what it tells (classes).
    """
    told = _told_sizes(graph, found)
    places: dict[tuple[int, int], list[str]] = defaultdict(list)
    flops: dict[tuple[int, int], int] = defaultdict(int)
    left: dict[tuple[int, int], int] = defaultdict(int)  # FLOPs that stay unaligned
    for node, alignment in ((n, a) for n, a in found if ir.precision(n) is Precision.LOW):
        for dim in alignment.before:
            size = alignment.product.measured()[dim]
            if dim in alignment.product.rows or not isinstance(size, int):
                continue
            if _is_of_data(node, alignment.product, dim) or (node, dim) in told:
                continue
            wanted = math.ceil(size / alignment.multiple) * alignment.multiple
            if wanted != size:
                places[size, wanted].append(f"{dim} of {ir.module_path(node) or node.name}")
                flops[size, wanted] += (count := ir.hint(alignment.product.flops()))
                left[size, wanted] += count if dim in alignment.after else 0
    copies = _copies(graph)
    for key in sorted(places, key=lambda key: -flops[key]):
        size, wanted = key
        where = ", ".join(dict.fromkeys(places[key][:3])) + (", ..." if places[key][3:] else "")
        saved = [
            f"{n} {what}s" if n > 1 else f"one {what}" for what, n in copies[size].items() if n
        ]
        if saved or left[key]:
            gain = f"save {' and '.join(saved)}" if saved else f"align {_flops(left[key])}"
            yield f"{size} -> {wanted} ({where}) would {gain}"


def _is_of_data(node: fx.Node, product: Product, dim: str) -> bool:
    """Whether a dim is one of an input of the graph that is no parameter."""
    labels, operands = set(product.dims[dim]), ir.operands(node)
    read = (operands[path] for path, own in product.operands.items() if labels & set(own))
    sources = [ir.unadded(operand) for operand in read]
    return any(one.op == "placeholder" and not ir.is_parameter(one) for one in sources)


def _told_sizes(
    graph: fx.Graph, products: list[tuple[fx.Node, Alignment]]
) -> set[tuple[fx.Node, str]]:
    """The dims of results that no other product reads, but those of a vocabulary: an embedding has
    as many rows, and some of them may be of no token.
    """
    feeds = ir.all_before(operand for node, _ in products for operand in node.all_input_nodes)
    tables = [n.all_input_nodes[0] for n in graph.nodes if ir.op_name(n) == "aten::embedding"]
    rows = [ir.shape(ir.unadded(table))[0] for table in tables]
    found = set()
    for node, product in ((n, a.product) for n, a in products if n not in feeds):
        result = set(product.result or ())
        for dim, size in product.measured().items():
            vocabulary = any(ir.known_equal(size, number) for number in rows)
            if result & set(product.dims[dim]) and not vocabulary:
                found.add((node, dim))
    return found


def _copies(graph: fx.Graph) -> dict[int, dict[str, int]]:
    """Unpadded size -> how many pads and slices of values that are not weights it causes."""
    counts: dict[int, dict[str, int]] = defaultdict(lambda: {"slice": 0, "pad": 0})
    for node in graph.nodes:
        if ir.role(node) is not ir.Role.PAD or ir.tensor(node) is None:
            continue
        name = ir.op_name(node).removeprefix("aten::").removeprefix("constant_")
        kind = {"slice": "slice", "pad_nd": "pad"}.get(name)
        source = node.all_input_nodes[0]
        if kind is None or ir.is_parameter(ir.unadded(source)):
            continue
        for old, new in zip(ir.shape(source), ir.shape(node), strict=True):
            if isinstance(old, int) and isinstance(new, int) and old != new:
                counts[min(old, new)][kind] += 1
    return counts
