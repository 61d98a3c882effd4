"""torch's operators on integers and booleans, beside a product that trains under a loss scale.

They have no gradient and no precision to choose: whatever stands around them, their results and
what they write are eager's, to the bit. In all forms that op_db lists: `a & b` is not `bitwise_and`
in a captured graph, and `a &= b` writes.

Here those run that take nothing else; the others, which test_op_db.py calls in FP32:

    pytest -m sweep tests/rules/test_op_db_exact.py        (about 5 minutes)
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from op_db_support import UNINITIALISED
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from mpcompile import mpcompile

pytestmark = pytest.mark.slow("torch's operator table")

SAMPLES = 3  # of each call
FORMS = {"": "op", "operator": "operator_variant", "in place": "inplace_variant"}

# Left out, and why.
RANDOM = "its result is random"
DATA = "its shape depends on data"
PYTHON = "its result is Python's"
CUDA = "CUDA only"
WARNS = "torch warns of it, which fails a test"
LEFT_OUT = {
    "argwhere": DATA, "bincount": DATA, "combinations": DATA, "histogramdd": DATA, "nonzero": DATA,
    "unique": DATA, "unique_consecutive": DATA, "repeat_interleave": DATA, "masked_select": DATA,
    "tensor_split": DATA, "narrow": DATA, "to_sparse": "Dynamo takes no sparse tensors",
    "sparse.mm": "Dynamo takes no sparse tensors", "randint": RANDOM, "randint_like": RANDOM,
    "bernoulli": RANDOM, "geometric": RANDOM, "equal": PYTHON, "item": PYTHON, "allclose": PYTHON,
    "cov": "asks a tensor for a Python bool", "corrcoef": "asks a tensor for a Python bool",
    "resize_": "Dynamo can't trace it", "resize_as_": "Dynamo can't trace it", "cross": WARNS,
    "scatter": WARNS, "chalf": WARNS, "jiterator_unary": CUDA, "jiterator_binary": CUDA,
    "jiterator_4inputs_with_extra_args": CUDA, "jiterator_binary_return_by_ref": CUDA,
    "jiterator_2inputs_2outputs": CUDA,
    "nn.functional.triplet_margin_with_distance_loss": "takes a module, of which no two are equal",
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """An operator of op_db in one of its forms, on operands of one dtype."""

    op: Any
    form: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return " ".join(filter(None, [self.op.name, self.form, str(self.dtype).split(".")[1]]))

    @property
    def function(self) -> Callable[..., Any] | None:
        return getattr(self.op, FORMS[self.form])

    def samples(self) -> Iterator[tuple[Any, ...]]:
        """Arguments: the first, the others, those by name."""
        torch.manual_seed(0)
        for sample in self.op.sample_inputs("cpu", self.dtype):
            if not (self.form == "in place" and sample.broadcasts_input):
                yield sample.input, sample.args, sample.kwargs


def calls(*, full: bool) -> list[Call]:
    """Those of operators that take FP32, too, or all others."""
    ops = [
        op for op in op_db
        if not op.variant_test_name and op.name not in {*LEFT_OUT, *UNINITIALISED}
        and (torch.float32 in op.supported_dtypes("cpu")) is full
    ]  # fmt: skip
    found = [
        Call(op, form, dtype)
        for op in ops
        for dtype in (torch.bool, torch.int64)
        if dtype in op.supported_dtypes("cpu")
        for form in FORMS
    ]
    return [call for call in found if call.function is not None]


def judge(call: Call) -> None:
    function = call.function
    assert function is not None

    def program(arguments: Any, x: torch.Tensor, w: torch.Tensor) -> Any:
        operand, others, named = arguments
        return function(operand, *others, **named), F.linear(x, w)

    tried = 0
    for arguments in itertools.islice(call.samples(), SAMPLES):
        x, w = torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)
        theirs, mine = copy.deepcopy(arguments), copy.deepcopy(arguments)
        try:
            wanted, _ = program(theirs, x, w)
        except (RuntimeError, TypeError):
            continue  # eager refuses it
        tried += 1
        torch._dynamo.reset()
        fast = mpcompile(
            program, dtype=torch.float16, loss_scale=2.0**10, emit="eager", strict=True
        )
        found, y = fast(mine, x, w)
        y.sum().backward()
        same((found, mine), (wanted, theirs))
        torch.testing.assert_close(w.grad, x.sum(0).expand(8, 8), rtol=1e-2, atol=1e-2)
    assert tried or call.form == "in place", "eager takes no sample"


@pytest.mark.parametrize("call", calls(full=False), ids=str)
def test_operators_that_take_no_fp32(call: Call) -> None:
    judge(call)


@pytest.mark.sweep("all of torch's operator table")
@pytest.mark.parametrize("call", calls(full=True), ids=str)
def test_operators_that_take_fp32_too(call: Call) -> None:
    judge(call)


def same(found: Any, wanted: Any) -> None:
    """The same types and shapes, the same bits."""
    left, right = (pytree.tree_leaves(tree) for tree in (found, wanted))
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        if isinstance(b, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        else:
            assert type(a) is type(b)
            assert a == b
