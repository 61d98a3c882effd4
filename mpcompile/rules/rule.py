"""What can be said about an operator: one `Rule`, which every part of the compiler asks. And its
words for what an operator does with dimensions, and the text that declares it a product:
`"mat1[m,k] mat2[k,n] -> [m,n]"`.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from .policy import Precision


class Kind(enum.Enum):
    """What the operator does with a value; the planner treats the three differently.

    COMPUTE  arithmetic: the dtype decides the rounding.
    VIEW     the same elements under another shape: takes its input's dtype, costs nothing.
    MOVE     copies some elements of a larger tensor (embedding, gather): cast what comes out.
    """

    COMPUTE = "compute"
    VIEW = "view"
    MOVE = "move"


class Keeps(enum.Enum):
    """What the operator stores for its backward (torch's derivatives.yaml).

    OPERANDS  what it reads (and perhaps its result).
    RESULT    its result alone.
    NOTHING   no floating-point tensor.
    """

    OPERANDS = "operands"
    RESULT = "result"
    NOTHING = "nothing"


@dataclass(frozen=True)
class Recurrent:
    """A recurrent operator, which runs on the device's own kernel.

    Attributes:
        gates: how many weight matrices are stacked in one tensor.
        module: the layer that calls it.
    """

    gates: int
    module: type[nn.LSTM] | type[nn.GRU] | type[nn.RNN]


@dataclass(frozen=True)
class Rule:
    """One row of the table: everything that is known about one operator.

    Arguments are named as in the operator's schema, several in one string: `"weight bias"`.

    Attributes:
        precision: LOW, FULL or FOLLOW; KEEP: its dtypes are not ours to change.
        reason: why, in one sentence; shown beside every node.
        kind: what the operator does with a value.

        grows: the result may leave FP16's range although the inputs are inside it, or is a total
            of which the last digits count: what follows directly stays in FP32 too.
        bounded: the result lies within FP16's range whatever the inputs.
        sensitive: a rounding of the input may change the result altogether (a rank, a definite
            matrix that no longer is): what feeds it is FP32 too.
        digits: arguments of which every digit counts: a rounding moves the result to another whole
            number, bin, place or side, or the operator is steep there. At O2 arithmetic that feeds
            them stays FP32 wherever it would at O1.
        tiny: the result reaches down to FP32's smallest numbers, of which FP16 makes zeros.
        hands_on_tiny: one tiny operand makes the result tiny; elsewhere all operands must be.
        averages: the result is as large as what is read, though computed in FP32.

        product: the operator as a product of labelled arrays, for padding and for the device
            profile: the labels of each operand, as `"self[m,k] mat2[k,n] -> [m,n]"`, or the name of
            one whose rank varies, in `mpcompile/padding/products.py`.
        multiplies: comes down to matmuls; counted where no pass sees the body that holds it.
        recurrent: a recurrent operator, or None.

        adds: adds its operands, so that a number far below 1 is lost beside 1.
        uncast: arguments that are never cast.
        writes: arguments written in place without the schema saying so.
        masks: arguments that hold an additive mask: finite values below the range of the half
            precision are clamped into it, so that a fully masked row stays finite.
        promotes: promotes its operands by itself, so that a 0-d FP32 operand (a learned
            temperature) may stay FP32 beside a half-precision one.
        linear_backward: its backward is linear in the gradient in floating point, too; where not,
            it gets gradients without the loss scale.

        keeps: what it stores for its backward.
        fuses: the compiler fuses it with its neighbours; otherwise it is a kernel of its own.
        rounds_result: computes in FP32 inside, and its result keeps the magnitude of what it reads,
            or less: O2 may store it in half precision (Paddle's O2 has norms so).
        low_form: the operator that gives the half-precision result of this one, with a backward
            that reads it.

        creates: makes a tensor out of sizes and at most one number.
        fill: the argument that holds this number.
        copies_constant: of a constant it makes a constant.
        makes_positions: its result holds positions or whole numbers: 0, 1, 2, ...
        zeros_and_ones: its result holds nothing else.
        converts: changes the dtype, as the program asks.

        elementwise: computes each element of the result from the elements at the same place.
        zero_absorbs: zero in one operand makes zero, whatever the others hold.
        random: its result depends on random numbers.
        may_alias: may return its operand itself, or a copy with the same strides.
        dims: what it does with the dimensions: "reshape", "permute" or "unsqueeze"; None: something
            else.
        in_order: hands on all elements in their order.
        by_strides: what it reads depends on how its operand lies in memory.

        picks: each element of the result is one that it reads, or a number, so that a comparison of
            the two may find them equal. Views and moves (`kind`) pick, too.
        compares: arguments whose elements are compared with those of one another, by itself or by
            its backward.
        finds: arguments in which its backward finds the result again, by its value. Of a norm or a
            distance only that of order infinity does.
    """

    precision: Precision
    reason: str
    kind: Kind = Kind.COMPUTE

    grows: bool = False
    bounded: bool = False
    sensitive: bool = False
    digits: str = ""
    tiny: bool = False
    hands_on_tiny: bool = False
    averages: bool = False

    product: str | None = None
    multiplies: bool = False
    recurrent: Recurrent | None = None

    adds: bool = False
    uncast: str = ""
    writes: str = ""
    masks: str = ""
    promotes: bool = False
    linear_backward: bool = True

    keeps: Keeps = Keeps.OPERANDS
    fuses: bool = True
    rounds_result: bool = False
    low_form: str | None = None

    creates: bool = False
    fill: str | None = None
    copies_constant: bool = False
    makes_positions: bool = False
    zeros_and_ones: bool = False
    converts: bool = False

    elementwise: bool = False
    zero_absorbs: bool = False
    random: bool = False
    may_alias: bool = False
    dims: str | None = None
    in_order: bool = False
    by_strides: bool = False

    picks: bool = False
    compares: str = ""
    finds: str = ""


# Of an operator that nobody vouched for (the rule of TVM's ToMixedPrecision).
UNKNOWN = Rule(Precision.KEEP, "no rule for this operator: it keeps its dtypes", fuses=False)

# -- dimensions ------------------------------------------------------------------------------------

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
