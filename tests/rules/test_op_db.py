"""torch's op_db through the compiler in FP16, forward and backward, against FP64.

Here a sample of it runs: the first two samples of every other operator between LOW operators at O2,
of every fourth by itself at O1, of every third in place at O2. The whole of it, at O1 and O2:

    pytest -m sweep tests/rules/test_op_db.py -n 2        (about 40 minutes on 2 cores)

A third sweep multiplies the operands by 1e-4 and by 1e3: where a backward squares them, or divides
by them, it leaves FP16's range although its forward stays within it.

How it is run stands in op_db_support.py, the tolerances in op_db_judge.py.
"""

import pytest
from op_db_judge import Status
from op_db_support import OPS, Case, check
from versions import before

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


@pytest.mark.sampled(2)
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
