"""A program of a user's that type checkers read, and nobody runs: it uses all of the public API.

`assert_type` says what a user sees. Each `type: ignore` is a mistake of the user's that has to be
found: where it is not, the comment is reported as unnecessary.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from typing_extensions import assert_type

import mpcompile as mp
from mpcompile import Level, LossScale, MPOptimizer, Policy, Precision, mpcompile, train_step
from mpcompile.plans.model_plan import Plan


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.fc(x))

    def greet(self) -> str:
        return "hello"


def halved(x: torch.Tensor, times: int = 1) -> torch.Tensor:
    return x / (2 * times)


def modules(policy: Policy) -> Net:
    model = mpcompile(Net())
    assert_type(model, Net)
    assert_type(model.greet(), str)
    assert_type(mpcompile(Net(), level=Level.O2, dtype=torch.float16, policy=policy), Net)
    assert_type(mpcompile(Net(), loss_scale=LossScale.static(128.0), dynamic=True), Net)
    assert_type(mpcompile(level="O3", pad="never")(Net()), Net)
    chosen: dict[str, Any] = {"level": "O2"}
    assert_type(mpcompile(Net(), **chosen), Net)
    mpcompile(Net(), levle="O2")  # type: ignore[call-overload]
    mpcompile(Net(), level=2)  # type: ignore[call-overload]
    mpcompile(Net(), level="O5")  # type: ignore[call-overload]
    mpcompile(Net(), pad="often")  # type: ignore[call-overload]
    mpcompile(Net(), mode="fast", emit="eager")  # type: ignore[call-overload]
    mpcompile("net")  # type: ignore[call-overload]
    return model


@mpcompile
def plain(x: torch.Tensor, times: int = 1) -> torch.Tensor:
    return x * times


@mpcompile(level="O2", strict=True)
def with_options(x: torch.Tensor, *, times: int = 1) -> torch.Tensor:
    return x * times


def functions(x: torch.Tensor) -> None:
    assert_type(mpcompile(halved)(x, times=2), torch.Tensor)
    assert_type(plain(x, 2), torch.Tensor)
    assert_type(with_options(x, times=2), torch.Tensor)
    plain(x, "twice")  # type: ignore[arg-type]
    with_options(x, 2)  # type: ignore[call-arg]


def steps(model: Net, x: torch.Tensor, y: torch.Tensor) -> None:
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = MPOptimizer(inner, max_grad_norm=1.0)
    MPOptimizer(inner, emit="inductr")  # type: ignore[arg-type]
    torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
    optimizer.zero_grad(set_to_none=True)
    optimizer.step()
    optimizer.step(lambda: model(x).sum())
    assert_type(optimizer.skipped, torch.Tensor)
    assert_type(optimizer.grad_norm, torch.Tensor)
    assert_type(optimizer.skipped_steps, int)
    assert_type(optimizer.inner, torch.optim.Optimizer)
    assert_type(optimizer.memory(), dict[str, float])
    optimizer.load_state_dict(optimizer.state_dict())
    step = train_step(model, optimizer, F.cross_entropy, accumulate=2, level="O2")
    assert_type(step, Callable[..., torch.Tensor])
    assert_type(step(x, y), torch.Tensor)
    train_step(model, optimizer, F.cross_entropy, levle="O2")  # type: ignore[call-arg]


def policies() -> Policy:
    policy = Policy(full={"softmax"}, low=["gelu"], modules={"fc": "fp32"}, nodes={"mul": "low"})
    assert_type(policy.full, frozenset[str])
    policy.save("pins.toml")
    mp.register_rule("aten::erfinv", Precision.FULL, "it has poles", grows=True)
    return Policy.load("pins.toml")


def scales(model: Net) -> None:
    scale = mp.loss_scale_of(model)
    assert_type(scale, LossScale)
    assert_type(scale.kind, str)
    assert_type(scale.value, float)
    assert_type(scale.skipped_steps, int)
    assert_type(scale.overflowed(), bool)
    assert_type(LossScale.dynamic(init_scale=2.0**10, hysteresis=2), LossScale)
    scale.load_state_dict(scale.state_dict())


def reports(model: Net, x: torch.Tensor, y: torch.Tensor) -> None:
    plan = mp.explain(model, x, device="t4", level="O2")
    mp.explain(model, x, level="O5")  # type: ignore[arg-type]
    assert_type(mp.plan_for(model, x), Plan)
    assert_type(plan.to_dict(), dict[str, Any])
    for graph in plan.graphs:
        assert_type(graph.left, str | None)
        assert_type(graph.tensor_cores.share, float)
    for graph in mp.compiled_plans(model):
        assert_type([node.op for node in graph.nodes], list[str])
    print(plan, plan.why("fc"), plan.diff(Plan.load("plan.json")))

    report = mp.diagnose(model, x, loss_fn=lambda result: F.cross_entropy(result, y), steps=2)
    assert_type(report.pins, tuple[str, ...])
    assert_type(report.losses, dict[str, float])
    if report.first is not None:
        print(report.first)
    assert_type(mp.finalize(model, x, dtype="bf16"), torch.export.ExportedProgram)
    pins = mp.calibrate(model, [(x, y)], lambda net, batch: F.cross_entropy(net(batch[0]), y))
    assert_type(pins, Policy)


def errors(model: Net) -> str:
    warnings.simplefilter("error", mp.MPCompileWarning)
    try:
        mpcompile(model)
    except mp.MPCompileError as error:
        return str(error)
    return mp.__version__
