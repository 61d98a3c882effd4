"""Parts of a program without gradients, and programs that break into several graphs."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import LEVELS, MLP, SETTINGS, assert_near, check, leaf
from torch import nn

from mpcompile import compiled_plans, loss_scale_of, mpcompile


@LEVELS
def test_graph_breaks_compose(level: str) -> None:
    class Broken(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.norm(self.up(x))
            torch._dynamo.graph_break()
            h = F.gelu(h) * x.mean()
            torch._dynamo.graph_break()
            out: torch.Tensor = self.down(h)
            return out + x

    result = check(Broken(), leaf(8, 16), level=level, low=["linear"])
    assert len(result.plans) == 3
    assert loss_scale_of(result.model).value == 1024


@SETTINGS
def test_graph_break_inside_no_grad(level: str, emit: str) -> None:
    """A graph that ends in a no_grad region still hands on what came before it with a history."""

    class Broken(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.up(x)
            with torch.no_grad():
                size = h.abs().mean()
                torch._dynamo.graph_break()
                size = size + self.up(x).abs().mean()
            return self.down(h / size)

    check(Broken(), leaf(8, 16), level=level, emit=emit, low=["linear"])


def test_graphs_of_one_model_share_its_loss_scale() -> None:
    """An overflow in the first of three graphs skips the step; the scale backs off once."""

    class Broken(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.up(x)
            torch._dynamo.graph_break()
            return self.down(F.gelu(h))

    options: dict[str, Any] = {"emit": "eager", "strict": True, "loss_scale": "grad_scaler"}
    model = mpcompile(Broken(), dtype=torch.float16, **options)
    optimizer = torch.optim.Adam(model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.randn(8, 16)).mul(1e6).sum().backward()
    optimizer.step()
    assert loss_scale_of(model).value == 2.0**15
    assert loss_scale_of(model).skipped_steps == 1
    for p, b in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, b)


@LEVELS
def test_no_grad_region(level: str) -> None:
    class Teacher(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                target = self.up(x) + x.mean()
            return F.smooth_l1_loss(self.up(x) * 0.9, target) + super().forward(x).mean()

    result = check(Teacher(), leaf(8, 16), level=level, low=["linear"])
    assert result.plans[0].scaled


@LEVELS
def test_enable_grad_inside_no_grad(level: str) -> None:
    class Inner(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                frozen = self.norm(self.up(x))
                with torch.enable_grad():
                    out: torch.Tensor = self.down(frozen)
            return out

    result = check(Inner(), torch.randn(8, 16), level=level, low=["linear"])
    assert result.model.up.weight.grad is None


@LEVELS
def test_detach(level: str) -> None:
    class Detached(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.up(x)
            return self.down(self.norm(h).detach()) + self.down(h) * h.detach().mean()

    check(Detached(), leaf(8, 16), level=level, low=["linear"])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_graph_without_gradients_is_not_scaled(mode: Any) -> None:
    model = MLP()
    fast = mpcompile(MLP(), dtype=torch.float16, emit="eager", strict=True)
    fast.load_state_dict(model.state_dict())
    x = torch.randn(8, 16)
    with mode():
        assert_near(fast(x), model(x), "output", 1e-2)
    (plan,) = compiled_plans(fast)
    assert not plan.scaled
    assert plan.counts()["LOW"] >= 2
    fast(x).sum().backward()
    assert compiled_plans(fast)[1].scaled


@LEVELS
def test_eval_mode_still_differentiates(level: str) -> None:
    """eval() is about dropout and batch norm; gradients (of an input, say) work as before."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout()).eval()
    check(model, leaf(2, 3, 6, 6), level=level, low=["conv2d"])
