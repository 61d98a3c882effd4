"""A policy may name a low dtype of its own for a part of the model."""

from typing import Any

import pytest
import torch
from compare import LEVELS, SETTINGS, Compared, check
from torch import nn

from mpcompile import LossScale, MPOptimizer, Policy, compiled_plans, mpcompile


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8))


def planned(result: Compared) -> dict[str, str]:
    """Module -> the dtype that its operator's result has."""
    (plan,) = result.plans
    rules = ("cast", "scale")
    return {n.module: n.planned.partition("[")[0] for n in plan.nodes if n.rule not in rules}


@SETTINGS
def test_a_bf16_module_in_an_fp16_compile(level: str, emit: str) -> None:
    policy = Policy(modules={r"^0$": "bf16", r"^3$": "low"})
    result = check(
        layers(), torch.randn(8, 16), level=level, emit=emit, policy=policy, tolerance=5e-2, steps=2
    )
    assert planned(result)["0"] == "bf16"
    assert planned(result)["3"] == "f16"


@SETTINGS
def test_an_fp16_module_in_a_bf16_compile_that_scales(level: str, emit: str) -> None:
    policy = Policy(modules={r"^3$": "float16"})
    result = check(
        layers(), torch.randn(8, 16), dtype=torch.bfloat16, level=level, emit=emit, policy=policy,
        loss_scale=LossScale.static(1024.0),
    )  # fmt: skip
    assert planned(result)["0"] == "bf16"
    assert planned(result)["3"] == "f16"


@LEVELS
def test_under_a_generated_step(level: str) -> None:
    """O2 stores FP16 copies; what a BF16 part reads, it casts itself, and its gradient is FP32."""
    model = layers()
    options: dict[str, Any] = {"dtype": torch.float16, "emit": "aot_eager", "level": level}
    mpcompile(model, policy=Policy(modules={r"^0$": "bf16"}), strict=True, **options)
    optimizer = MPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), emit="eager")
    before = [p.detach().clone() for p in model.parameters()]
    x = torch.randn(8, 16)
    model(x).square().mean().backward()
    optimizer.step()
    assert not optimizer.skipped
    reference = layers()
    with torch.no_grad():
        for p, value in zip(reference.parameters(), before, strict=True):
            p.copy_(value)
    reference(x).square().mean().backward()
    for p, q, value in zip(model.parameters(), reference.parameters(), before, strict=True):
        moved, wanted = p.detach() - value, -0.1 * q.grad
        assert (moved - wanted).norm() <= 5e-2 * wanted.norm()
    assert any(n.planned.startswith("bf16") for n in compiled_plans(model)[0].nodes)


@pytest.mark.parametrize("dtype", [torch.float16, "float16"])
def test_naming_the_dtype_of_the_rest_changes_nothing(dtype: Any) -> None:
    mpcompile(layers(), dtype=dtype, policy=Policy(modules={"0": "fp16"}))


@pytest.mark.parametrize(
    ("regex", "matched"),
    [
        ("^dec$", {"dec.fc", "dec.head.fc"}),
        (r"\.head", {"dec.head.fc"}),
        (r"^(?!.*head)", {"fc", "dec.fc"}),
        (r"^(?!.*head).*fc$", {"fc", "dec.fc"}),
        (r"(?<!dec\.)fc$", {"fc", "dec.head.fc"}),
    ],
)
def test_a_regex_for_a_module_is_for_all_in_it_unless_it_says_not(
    regex: str, matched: set[str]
) -> None:
    policy = Policy(modules={regex: "fp32"})
    assert {path for path in ("fc", "dec.fc", "dec.head.fc") if policy.for_module(path)} == matched
