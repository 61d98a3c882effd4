"""Observed ranges become pins, and the pins hold."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpcompile import MPCompileError, Policy, calibrate, compiled_plans, diagnose, mpcompile

END = 65504.0


class Net(nn.Module):
    """`hot` multiplies ones of the input by `gain / 4`, so that its results are `gain`."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.first, self.hot, self.last = (nn.Linear(4, 4, bias=False) for _ in range(3))
        with torch.no_grad():
            self.first.weight.fill_(0.25)
            self.hot.weight.fill_(gain / 4)
            self.last.weight.fill_(2.0**-20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hot: torch.Tensor = self.hot(self.first(x))
        return self.last(hot)


def ones(times: float = 1.0) -> torch.Tensor:
    return times * torch.ones(2, 4)


FP16: dict[str, Any] = {"dtype": torch.float16, "emit": "eager"}


@pytest.mark.parametrize(
    ("gain", "margin", "pinned"),
    [
        (END / 4.1, {}, False),
        (END / 3.9, {}, True),
        (1e6, {}, True),
        (END / 8, {"margin": torch.tensor(10).numpy()[()]}, True),
    ],
)
def test_a_result_near_the_end_is_pinned_with_all_who_read_it(
    gain: float, margin: dict[str, Any], pinned: bool
) -> None:
    policy = calibrate(Net(gain), [ones()], **margin, **FP16)
    assert set(policy.nodes) == ({"linear_1", "linear_2"} if pinned else set())


def test_the_pins_make_a_model_train_that_did_not() -> None:
    def loss_of(**options: Any) -> tuple[float, torch.Tensor | None]:
        model = mpcompile(Net(1e6), **FP16, **options)
        loss = model(ones()).sum()
        loss.backward()
        return float(loss.detach()), model.first.weight.grad

    exact = Net(1e6)
    exact(ones()).sum().backward()
    assert not torch.isfinite(torch.tensor(loss_of()[0]))
    policy = calibrate(Net(1e6), [ones()], **FP16)
    loss, gradient = loss_of(policy=policy)
    assert loss == pytest.approx(float(exact(ones()).sum().detach()), rel=1e-2)
    torch.testing.assert_close(gradient, exact.first.weight.grad, rtol=1e-2, atol=0.0)


def test_a_steep_gradient_is_pinned() -> None:
    """The loss multiplies by 2**20; the results that it reads are small."""
    steep = calibrate(
        Net(1.0), [ones()], lambda model, batch: model(batch).sum() * 2.0**20 / 1.0, **FP16
    )
    assert "linear_2" in steep.nodes
    assert "gradient" in steep.reasons["linear_2"]


class Halves(Net):
    """`last` reads the result of `hot` in two parts, as an attention does its queries and keys."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = self.hot(self.first(x)).chunk(2)
        return self.last(one) + self.last(other)


def test_a_part_of_a_result_has_the_numbers_of_its_operator() -> None:
    """Who reads it is pinned; and where all but its readers are, its operator is named."""
    policy = calibrate(Halves(1e6), [ones()], **FP16)
    assert policy.nodes.keys() >= {"linear_1", "linear_2", "linear_3"}
    assert torch.isfinite(mpcompile(Halves(1e6), policy=policy, **FP16)(ones())).all()
    pins = Policy(nodes={"linear_1": "fp32", "chunk": "fp32"})
    report = diagnose(Halves(1e6), ones(), policy=pins, **FP16)
    assert (report.first.node.name, report.pins) == ("chunk", ("linear_2", "linear_3"))
    assert "its result, up to 1e+06, doesn't fit float16" in report.first.reason


def test_it_says_in_how_many_batches_and_how_large() -> None:
    batches = [ones(), ones(1e6), ones(2e6)]
    policy = calibrate(Net(1.0), batches, **FP16)
    assert policy.reasons["linear_2"] == "operand linear_1 up to 2e+06 in 2 of 3 batches"


def test_it_is_saved_with_the_reasons_and_loaded(tmp_path: Path) -> None:
    policy = calibrate(Net(1e6), [ones()], **FP16)
    policy.save(tmp_path / "pins.toml")
    assert "in 1 of 1 batches" in (tmp_path / "pins.toml").read_text()
    assert Policy.load(tmp_path / "pins.toml") == policy
    model = mpcompile(Net(1e6), policy=tmp_path / "pins.toml", **FP16)
    assert torch.isfinite(model(ones())).all()


def test_plans_show_the_reason() -> None:
    model = mpcompile(Net(1e6), policy=calibrate(Net(1e6), [ones()], **FP16), **FP16)
    model(ones())
    (node,) = [n for n in compiled_plans(model)[0].nodes if n.name == "linear_1"]
    assert node.rule == "policy"
    assert "up to 1e+06 in 1 of 1 batches" in node.reason


def test_the_users_policy_stays() -> None:
    own = Policy(full=["gelu"], modules={"last": "fp32"})
    policy = calibrate(Net(1e6), [ones()], policy=own, **FP16)
    assert (policy.full, policy.modules) == (own.full, own.modules)
    assert "linear_1" in policy.nodes


def test_a_compiled_models_options_hold() -> None:
    model = mpcompile(Net(1e6), dtype=torch.bfloat16, emit="eager")
    assert calibrate(model, [ones()]).nodes == {}  # BF16 has FP32's range
    assert calibrate(model, [ones()], dtype=torch.float16).nodes


def test_batches_as_a_loader_gives_them() -> None:
    x, y = ones(1e6), torch.zeros(2, dtype=torch.long)
    with_target = calibrate(
        Net(1.0), [(x, y)], lambda model, b: F.cross_entropy(model(b[0]), b[1]), **FP16
    )
    assert with_target == calibrate(Net(1.0), [{"x": x}], **FP16)
    assert with_target == calibrate(Net(1.0), [(x,)], **FP16)
    assert "linear" in with_target.nodes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batches": []}, "batches is empty"),
        ({"batches": [ones()], "margin": 0.5}, "margin=0.5"),
        ({"batches": [ones()], "margin": "4"}, "margin='4': give a number from 1"),
        ({"batches": [ones()], "level": "O0"}, "nothing to pin"),
        ({"batches": [ones()], "loss_fn": lambda model, batch: model(batch)}, "loss_fn returned"),
        ({"batches": [ones()], "levle": "O1"}, "did you mean 'level'"),
    ],
)
def test_mistakes(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(MPCompileError, match=message):
        calibrate(Net(1.0), **{**FP16, **arguments})
