"""The text by which a rule says that an operator is a product: `"mat1[m,k] mat2[k,n] -> [m,n]"`."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

# Operators whose number of dimensions varies, or that are no product of two arrays: each has a
# function of its own in padding/products.py.
NAMED = ("linear", "matmul", "einsum", "convolution", "conv_tbc", "attention", "recurrent")


@dataclass(frozen=True)
class Signature:
    """A product of two arrays, by the names of the operator's arguments.

    Attributes:
        factors: argument -> the labels of its dimensions.
        added: the argument that is added to the product, by broadcasting; or None.
        result: the labels of the result.
    """

    factors: Mapping[str, tuple[str, ...]]
    added: str | None
    result: tuple[str, ...]


@functools.cache
def signature(text: str) -> Signature | None:
    """Read the text; None: it is none. One that adds: `"a[m,k] b[k,n] + bias -> [m,n]"`."""
    match = re.fullmatch(r"(\w+)\[([\w,]+)\] (\w+)\[([\w,]+)\](?: \+ (\w+))? -> \[([\w,]+)\]", text)
    if match is None:
        return None
    left, left_labels, right, right_labels, added, result = match.groups()
    factors = {left: tuple(left_labels.split(",")), right: tuple(right_labels.split(","))}
    return Signature(factors, added, tuple(result.split(",")))
