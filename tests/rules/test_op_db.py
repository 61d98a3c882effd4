"""torch's op_db through the compiler, against FP64: in FP16, forward and backward; and operators on
integers and booleans, beside a product that trains under a loss scale.
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from op_db_judge import Status
from op_db_support import OPS, UNINITIALISED, Case, check
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree
from versions import before

from mpcompile import mpcompile

# -- floats ----------------------------------------------------------------------------------------


pytestmark = pytest.mark.slow("torch's operator table")

# Operators of which Dynamo by itself can't make one graph (torch 2.13). The user then gets FP32
# eager for the operator, or graphs around a break; that this is right is tested all the same.
BREAKS = {
    "allclose": "its result is a Python bool that depends on data",
    "combinations": "its shape depends on data; Dynamo fails on its symbols",
    "corrcoef": "torch.cov asks a tensor for a Python bool",
    "cov": "asks a tensor for a Python bool",
    "equal": "its result is a Python bool that depends on data",
    "linalg.lstsq": "its shapes depend on data (the rank)",
    "linalg.lstsq.grad_oriented": "its shapes depend on data (the rank)",
    "masked_select": "with a broadcast operand, Dynamo's own shape assertion fails",
    "nn.functional.ctc_loss": "its shape depends on data (the target lengths)",
    "nn.functional.gaussian_nll_loss": "asks a tensor for a Python bool",
    "nn.functional.linear_cross_entropy.chunked": "warns, which Dynamo can't trace",
    "nn.functional.linear_cross_entropy.chunked_none": "warns, which Dynamo can't trace",
    "resize_": "Dynamo can't trace it",
    "resize_as_": "Dynamo can't trace it",
    "sparse.mm.reduce": "Dynamo takes no sparse tensors",
    "sparse.sampled_addmm": "Dynamo takes no sparse tensors",
    "to_sparse": "Dynamo takes no sparse tensors",
}

# Operators with samples that eager FP32 itself refuses here.
REFUSED = {
    "jiterator_2inputs_2outputs": "CUDA only",
    "jiterator_4inputs_with_extra_args": "CUDA only",
    "jiterator_binary": "CUDA only",
    "jiterator_binary_return_by_ref": "CUDA only",
    "jiterator_unary": "CUDA only",
}
# The same once the operand is a result inside a program.
REFUSED_INSIDE = {
    "as_strided.partial_views": "one sample reads memory around its operand, which a copy lacks"
}
REFUSED_INPLACE = {
    "acosh": "its in-place variant has no derivative",
    "asinh": "its in-place variant has no derivative",
    "atanh": "its in-place variant has no derivative",
    "float_power": "its in-place variant would have to change the dtype",
}

# Operators of which a sample may fail, and what the error or the warning says.
MAY_FAIL = {
    # Left in FP32: its parts share memory, and their sizes depend on data: that they still do can't
    # be shown.
    "tensor_split": "no longer lies in the memory of",
    # Its backward compares the part of a gradient that rounding leaves with an absolute tolerance
    # of 1e-2. On some CPUs that part, times a loss scale of 65,536, is larger.
    "linalg.eig": "specified up to multiplication by e^{i phi}",
}


# Of tiny or large operands, what FP16 can't hold whatever the rules say.
_PRODUCT = "its matrix products are as large as the operands' squares"
BEYOND_FP16 = {
    ("nn.functional.conv_transpose2d", 1e3): _PRODUCT,
    ("nn.functional.linear_cross_entropy", 1e3): _PRODUCT,
    ("nn.functional.multi_head_attention_forward", 1e3): _PRODUCT,
    ("pca_lowrank", 1e3): _PRODUCT,
    ("svd_lowrank", 1e3): _PRODUCT,
    ("pca_lowrank", 1e-4): _PRODUCT,
    ("svd_lowrank", 1e-4): _PRODUCT,
    ("corrcoef", 1e-4): "its gradient is what cancels exactly",
    ("digamma", 1e3): "large numbers of FP16 are whole numbers, where it has poles",
    ("nn.functional.tanhshrink", 1e-4): "x - tanh(x), of which nothing is left",
}
REFUSED_SCALED = {
    "bernoulli": "a probability above 1",
    "nn.functional.binary_cross_entropy": "a probability above 1",
}

# On torch 2.12 Dynamo writes these in place with an operator that has no derivative, and fails.
FUSED_ON_2_12 = ("addcmul", "addcdiv")


def judge(case: Case) -> None:
    """Every sample passes, or its operator is excluded above for the reason that occurred."""
    verdicts = check(case)
    assert verdicts, "op_db gives no samples"
    refused = {
        **REFUSED,
        **(REFUSED_INSIDE if case.setting != "alone" else {}),
        **(REFUSED_INPLACE if case.setting == "inplace" else {}),
        **(REFUSED_SCALED if case.times > 1 else {}),
    }
    for status, excluded in ((Status.BREAK, BREAKS), (Status.SKIP, refused)):
        unexpected = [v for v in verdicts if v.status is status and case.name not in excluded]
        assert not unexpected, f"{case}: {len(unexpected)} {status.name}: {unexpected[0]}"
    allowed = MAY_FAIL.get(case.name)
    failed = [
        v
        for v in verdicts
        if v.status is Status.WRONG
        or (v.status is Status.CRASH and (allowed is None or allowed not in v.detail))
    ]
    if (case.name, case.times) in BEYOND_FP16:
        assert failed, f"{case}: excluded without need"
        return
    assert not failed, f"{case}: {len(failed)} of {len(verdicts)}: {failed[0]}"
    if case.setting == "alone" and not case.first:
        seen = {v.status for v in verdicts}
        assert (Status.BREAK in seen) == (case.name in BREAKS), "excluded without need"
        assert (Status.SKIP in seen) == (case.name in REFUSED) or case.name in BREAKS


def cases(setting: str, level: str, first: int = 0) -> list[Case]:
    names = [n for n, op in OPS.items() if setting != "inplace" or op.inplace_variant]
    if setting == "inplace" and before("2.13"):
        names = [n for n in names if n not in FUSED_ON_2_12]
    return [Case(name, setting, level, first) for name in names]


SAMPLED = [
    *cases("between", "O2", first=2)[::2],
    *cases("alone", "O1", first=2)[1::4],
    *cases("inplace", "O2", first=2)[::3],
]
WHOLE = [
    c for s in ("alone", "between", "inplace") for level in ("O1", "O2") for c in cases(s, level)
]
SCALED = [Case(name, "between", "O2", 3, times) for times in (1e-4, 1e3) for name in OPS]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", SAMPLED, ids=str)
def test_sampled(case: Case) -> None:
    judge(case)


@pytest.mark.sweep("all of torch's operator table")
@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_whole(case: Case) -> None:
    judge(case)


@pytest.mark.sweep("torch's operator table, with tiny and with large operands")
@pytest.mark.parametrize("case", SCALED, ids=str)
def test_scaled(case: Case) -> None:
    judge(case)


# -- integers and booleans -------------------------------------------------------------------------


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


def judge_exactly(call: Call) -> None:
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
    judge_exactly(call)


@pytest.mark.sweep("all of torch's operator table")
@pytest.mark.parametrize("call", calls(full=True), ids=str)
def test_operators_that_take_fp32_too(call: Call) -> None:
    judge_exactly(call)


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
