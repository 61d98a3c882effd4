"""classify: every computing node gets a class, by the first rule that applies."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import leaf
from graphs import Stage, ran

from mpcompile.passes.graph.classify import classify
from mpcompile.rules.policy import Policy, Precision

pytestmark = pytest.mark.inside


def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = F.gelu(F.linear(x, w))
    return (h.softmax(-1) @ w).t() + torch.special.bessel_j0(x.t())


def test_the_table() -> None:
    stage = Stage(classify, program, leaf(8, 16), leaf(16, 16))
    assert not stage.run()  # it only decides
    stage.run_twice()
    stage.expect_marks("""\
linear: LOW [table]
gelu: FOLLOW [table]
softmax: FULL [table]
matmul: LOW [table]
t: FOLLOW [table]
t_1: FOLLOW [table]
special_bessel_j0: KEEP [table]
add: FOLLOW [table]
""")
    assert stage.mark("gelu").reason == "activation that grows no faster than its input"


def other_dtypes(x: torch.Tensor, w: torch.Tensor) -> Any:
    return F.linear(x.double(), w.double()), torch.arange(3) + 1, torch.fft.fft(x)


def written(x: torch.Tensor, w: torch.Tensor) -> Any:
    h = x + w
    h[0] = 1
    return h.view(-1)


def opaque(x: torch.Tensor, w: torch.Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda a: a @ w, lambda a: a + 1, (x,))


@pytest.mark.parametrize(
    ("kept", "reason"),
    [
        (other_dtypes, "touches f64"),
        (written, "its memory is written in place"),
        (
            opaque,
            "opaque: its body was captured in these dtypes; 1 matrix product stays FP32 there",
        ),
    ],
)
def test_hands_off(kept: Any, reason: str) -> None:
    policy = Policy(
        low=["linear", "to", "view", "add", "_fft_c2c", "fft_fft", "higher_order::cond"]
    )
    stage = ran(classify, kept, torch.randn(4, 4), torch.randn(4, 4), policy=policy)
    marks = {name: stage.mark(name) for name in stage.marks.replace(":", "").split()[::3]}
    assert reason in {mark.reason for mark in marks.values()}
    low = {name for name, mark in marks.items() if mark.precision is Precision.LOW}
    assert low == set()
