"""The words in a rule that say what an operator does with dimensions, and the text that declares it
a product: `"mat1[m,k] mat2[k,n] -> [m,n]"`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

# Operators whose number of dimensions varies, or that are not a product of two arrays: each has
# its own function in padding/products.py.
NAMED = ("linear", "matmul", "einsum", "convolution", "conv_tbc", "attention", "recurrent")

# What an operator may do with the dimensions of its operand: each has its own function in
# padding/lanes.py.
DIMS = ("reshape", "permute", "unsqueeze")


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
    """Parse the text, which may add a bias: `"a[m,k] b[k,n] + bias -> [m,n]"`. None: it is no
    signature.
    """
    match = re.fullmatch(r"(\w+)\[([\w,]+)\] (\w+)\[([\w,]+)\](?: \+ (\w+))? -> \[([\w,]+)\]", text)
    if match is None:
        return None
    left, left_labels, right, right_labels, added, result = match.groups()
    factors = {left: tuple(left_labels.split(",")), right: tuple(right_labels.split(","))}
    return Signature(factors, added, tuple(result.split(",")))
