"""The data that the padding passes exchange: products, lanes and shapes.

A *product* is any operator that Tensor Cores run: a matrix product, a convolution, attention, a
recurrent layer. Each dimension of its operands and of its result carries a *label*, as in einsum;
to pad a product is to pad labels. *Lanes* are the elements that padding adds at the end of a
dimension.

Sizes may hold symbols; no comparison here adds a guard.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch.fx.experimental import symbolic_shapes

Size = int | torch.SymInt
Labels = tuple[str | None, ...]  # None: a dimension that is never padded
Path = tuple[int, ...]  # an operand: its schema position, then its index if that holds a list


@dataclass(frozen=True)
class Product:
    """One operator as a product of labelled arrays.

        linear      x[m0, m1, k]  weight[n, k]  bias[n]  ->  [m0, m1, n]

    Attributes:
        kind: "gemm", "conv", "attention" or "rnn".
        operands: the labels of each tensor operand that can have lanes.
        added: operands that are added to the product instead of multiplied (biases).
        result: the result's labels; None where the operator returns several tensors.
        sizes: size of each label, in elements.
        dims: the usual names of the sizes ("m", "in_channels"), each a product of labels.
        terms: sets of labels; the products of their sizes add up to the number of multiply-adds.
        rows: the dims that are nowhere a row stride: they say how many rows there are.
        strides: the dims that are row strides of an operand or of the result, here or in the
            backward.
        fixed: labels that can't be padded, and why.
    """

    kind: str
    operands: Mapping[Path, Labels]
    result: Labels | None
    sizes: Mapping[str, Size]
    dims: Mapping[str, tuple[str, ...]]
    terms: tuple[tuple[str, ...], ...]
    strides: tuple[str, ...]
    rows: tuple[str, ...] = ()
    added: frozenset[Path] = frozenset()
    fixed: Mapping[str, str] = field(default_factory=dict)

    def measured(self, padded: Mapping[str, Size] | None = None) -> dict[str, Size]:
        """The dims by name; `padded` gives some labels another size."""
        sizes = {**self.sizes, **(padded or {})}
        return {name: math.prod(sizes[x] for x in labels) for name, labels in self.dims.items()}

    def flops(self) -> Size:
        """Floating-point operations of the forward: two for each multiply-add."""
        return 2 * sum(math.prod(self.sizes[label] for label in term) for term in self.terms)


@dataclass(frozen=True)
class Alignment:
    """The decision about a product's dims.

    Attributes:
        product: the product as captured.
        padded: label -> its size after padding, for the labels that are padded.
        before, after: the dims that should be multiples of `multiple` and are not, before padding
            and after.
        multiple: in elements.
        reason: what was padded, or why nothing was.
    """

    product: Product
    padded: Mapping[str, Size]
    before: tuple[str, ...]
    after: tuple[str, ...]
    multiple: int
    reason: str


@dataclass(frozen=True)
class Lanes:
    """The lanes at the end of one dimension of a value.

    Attributes:
        padded: the size with them.
        content: the number that every lane holds, or None: unknown, so the lanes must be cut off.
    """

    padded: Size
    content: float | None


@dataclass(frozen=True)
class Padding:
    """The padded shapes of a node's operands and result.

    Attributes:
        operands: shape of each operand that the node reads padded.
        real: shape of its result without lanes; None if it has several results.
        result: shape of its result with lanes; likewise.
    """

    operands: Mapping[Path, tuple[Size, ...]]
    real: tuple[Size, ...] | None
    result: tuple[Size, ...] | None


def known_equal(a: Size, b: Size) -> bool:
    """Whether two sizes are equal for all values of their symbols."""
    return bool(symbolic_shapes.statically_known_true(a == b))


def known_multiple(size: Size, of: int) -> bool:
    """Whether a size is a multiple of a number for all values of its symbols."""
    return bool(symbolic_shapes.statically_known_true(size % of == 0))


def same_shape(a: Iterable[Size], b: Iterable[Size]) -> bool:
    """Whether two shapes are equal for all values of their symbols."""
    left, right = tuple(a), tuple(b)
    return len(left) == len(right) and all(map(known_equal, left, right))


def hint(size: Size) -> int:
    """The size in the inputs that were traced; use it for estimates only. Adds no guard."""
    if isinstance(size, int):
        return size
    return symbolic_shapes.optimization_hint(size, fallback=1)
