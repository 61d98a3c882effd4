"""What the padding passes say to each other: products, lanes and shapes, as plain data.

A *product* is any operator that Tensor Cores run: a matrix product, a convolution, attention, a
recurrent layer. Each dimension of its operands and of its result carries a *label*, as in einsum;
padding a product is padding labels. *Lanes* are the elements that padding adds at a dimension's
end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

Size = int | torch.SymInt
Labels = tuple[str | None, ...]  # None: a dimension that is never padded
Path = tuple[int, ...]  # an operand: its position in the schema, then in a list that stands there


@dataclass(frozen=True)
class Product:
    """One operator as a product of labelled arrays.

        linear      x[m0, m1, k]  weight[n, k]  bias[n]  ->  [m0, m1, n]

    Attributes:
        kind: "gemm", "conv", "attention" or "rnn".
        operands: the labels of each tensor operand that can carry lanes.
        added: operands that are added to the product instead of multiplied (biases).
        result: the result's labels; None where the operator returns several tensors.
        sizes: size of each label, in elements.
        dims: what people call the sizes ("m", "in_channels"), each a product of labels.
        terms: the labels whose product is the number of multiply-adds, summed over terms.
        rows: the dims that set no row stride anywhere: how many rows there are.
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
        """The dims by name, with some labels at another size."""
        sizes = {**self.sizes, **(padded or {})}
        return {name: math.prod(sizes[x] for x in labels) for name, labels in self.dims.items()}

    def flops(self) -> Size:
        """Floating-point operations of the forward: two for each multiply-add."""
        return 2 * sum(math.prod(self.sizes[label] for label in term) for term in self.terms)


@dataclass(frozen=True)
class Alignment:
    """What was decided about a product's dims.

    Attributes:
        product: the product as captured.
        padded: label -> its size after padding, for the labels that are padded.
        wanted: the dims that ought to be multiples of `multiple`.
        unaligned: those that are not, before and after padding.
        multiple: in elements.
        reason: what was done, or why nothing was.
    """

    product: Product
    padded: Mapping[str, Size]
    wanted: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    multiple: int
    reason: str


@dataclass(frozen=True)
class Lanes:
    """The lanes at the end of one dimension of a value.

    Attributes:
        real: the size without them.
        padded: the size with them.
        content: the number that every lane holds, or None: unknown, so they must be cut off.
    """

    real: Size
    padded: Size
    content: float | None


@dataclass(frozen=True)
class Padding:
    """The shapes that a node reads and gives once padded.

    Attributes:
        operands: shape of each operand that the node wants padded.
        real: shape of its result without lanes; None where that is several tensors.
        result: shape of its result with lanes; likewise.
    """

    operands: Mapping[Path, tuple[Size, ...]]
    real: tuple[Size, ...] | None
    result: tuple[Size, ...] | None
