"""Hazards around autograd: every gradient of the rewritten program is the FP32 program's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import assert_near, check, fallback_reason, weighted_sum
from torch import nn

from mpcompile import compiled_plans, loss_scale_of, mpcompile

LEVELS = pytest.mark.parametrize("level", ["O1", "O2"])
BIG_SCALE = 2.0**15


class StraightThrough(torch.autograd.Function):
    """A backward that is not the derivative of the forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * 3


class ClipGradient(torch.autograd.Function):
    """A backward that is not linear: what it gets must be true to size."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad.clamp(-0.01, 0.01)


class ScaledMatmul(torch.autograd.Function):
    """Two inputs, saved tensors, a number, two outputs of which one is not differentiable."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w: torch.Tensor, factor: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, w)
        ctx.factor = factor
        y = x @ w * factor
        best = y.argmax(-1)
        ctx.mark_non_differentiable(best)
        return y, best

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _best: Any) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return grad @ w.t() * ctx.factor, x.t() @ grad * ctx.factor * 2, None


class AddInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        x.add_(y)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad, grad * 2


class TwoOutputs(torch.autograd.Function):
    """Both outputs differentiable; an input that needs no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(mask)
        return x * mask, x.sum(-1)

    @staticmethod
    def backward(ctx: Any, left: torch.Tensor, right: torch.Tensor) -> Any:  # type: ignore[override]
        (mask,) = ctx.saved_tensors
        return left * mask * 0.5 + right.unsqueeze(-1) * 4, None


class Around(nn.Module):
    """Low-precision work before and after a function of the user's own."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(16, 16), nn.Linear(16, 8)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.function(self.before(x))
        out: torch.Tensor = self.after(h)
        return out


FUNCTIONS = {
    "straight_through": lambda h: StraightThrough.apply(h * 4),
    "clip": ClipGradient.apply,
    "non_differentiable": lambda h: ScaledMatmul.apply(h, h.t() @ h, 0.5)[0],
    "mark_dirty": lambda h: AddInPlace.apply(h * 1, h),
    "two_outputs": lambda h: sum_of(TwoOutputs.apply(h, h.detach() > 0)),
}


def sum_of(results: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return results[0] + results[1].unsqueeze(-1)


@SETTINGS
@pytest.mark.parametrize("name", FUNCTIONS)
def test_autograd_function_keeps_its_backward(name: str, level: str, emit: str) -> None:
    x = torch.randn(8, 16, requires_grad=True)
    if name == "straight_through":
        x = torch.randn(8, 16)  # rounding at .5 may go either way
    check(Around(FUNCTIONS[name]), x, level=level, emit=emit, low=["linear"])


@LEVELS
def test_nonlinear_backward_sees_gradients_true_to_size(level: str) -> None:
    """At a scale of 32768 every scaled gradient would be clipped."""
    x = torch.randn(8, 16, requires_grad=True)
    check(Around(ClipGradient.apply), x, level=level, loss_scale=BIG_SCALE)


@LEVELS
def test_integer_output_of_autograd_function(level: str) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> Any:
        return ScaledMatmul.apply(F.linear(x, w), w, 2.0)

    check(program, leaf(8, 16), leaf(16, 16), level=level, low=["linear"])


@SETTINGS
def test_result_of_a_function_is_written(level: str, emit: str) -> None:
    """Autograd forbids it for views that an autograd.Function returns; ours must be none."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = ClipGradient.apply(F.linear(x, w))
        h.mul_(2)
        h[:, 0] = 1
        return F.linear(h, w)

    check(program, leaf(8, 16), leaf(16, 16), level=level, emit=emit, low=["linear"])


@LEVELS
def test_dirty_argument_read_again(level: str) -> None:
    """The write's history reaches the later read in FP32; scaled, it could not: said so."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = F.linear(x, w) * 1
        view = h.view(-1)
        AddInPlace.apply(h, x)
        return F.linear(view.view(8, 16), w)

    reason = fallback_reason(program, leaf(8, 16), leaf(16, 16), level=level)
    assert "which is read again after it" in reason


@LEVELS
def test_gradients_too_small_for_fp16_survive(level: str) -> None:
    """1e-8 is zero in FP16; scaled by 2**15 it is a normal number."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, w), w) * 1e-6

    check(program, leaf(8, 16), leaf(16, 16), level=level, loss_scale=BIG_SCALE)


def leaf(*size: int) -> torch.Tensor:
    return torch.randn(size, requires_grad=True)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(F.gelu(self.norm(self.up(x))))
        return out


@LEVELS
def test_frozen_parameters_get_no_gradient(level: str) -> None:
    model = MLP()
    model.up.requires_grad_(False)
    model.norm.weight.requires_grad_(False)
    check(model, torch.randn(8, 16), level=level, low=["linear"])
    assert model.up.weight.grad is None
    assert model.down.weight.grad is not None


@LEVELS
def test_nothing_needs_a_gradient(level: str) -> None:
    result = check(MLP().requires_grad_(False), torch.randn(8, 16), level=level, low=["linear"])
    assert not result.plans[0].scaled


@LEVELS
def test_only_the_input_needs_a_gradient(level: str) -> None:
    result = check(MLP().requires_grad_(False), leaf(8, 16), level=level, low=["linear"])
    assert result.plans[0].scaled


@LEVELS
def test_input_that_is_no_leaf(level: str) -> None:
    """The gradient goes on, true to size, into eager code before the compiled function."""
    model, w = MLP(), leaf(16, 16)
    fast = mpcompile(MLP(), dtype=torch.float16, level=level, emit="eager", strict=True)
    fast.load_state_dict(model.state_dict())
    x = torch.randn(8, 16)
    expected, actual = (
        torch.autograd.grad(weighted_sum(m(x @ w)), [w, *m.parameters()]) for m in (model, fast)
    )
    for a, e in zip(actual, expected, strict=True):
        assert_near(a, e, "gradient", 1e-2)


@LEVELS
def test_hooks_see_fp32_gradients_true_to_size(level: str) -> None:
    seen: dict[bool, list[torch.Tensor]] = {True: [], False: []}

    def prepare(model: nn.Module) -> None:
        compiled = model._compiled_call_impl is not None
        for parameter in model.parameters():
            parameter.register_hook(
                lambda g: seen[compiled].append(g.clone()) or g.clamp(-0.01, 0.01)
            )

    check(MLP(), torch.randn(8, 16), level=level, prepare=prepare)
    order = sorted(seen[False], key=lambda g: (g.shape, g.norm().item()))
    for a, e in zip(
        sorted(seen[True], key=lambda g: (g.shape, g.norm().item())), order, strict=True
    ):
        assert_near(a, e, "gradient in the hook", 1e-2)


@SETTINGS
def test_hooks_set_by_the_program(level: str, emit: str) -> None:
    """On an input and on a value inside; both clip, so both must see gradients true to size."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x.register_hook(lambda g: g.clamp(-0.01, 0.01))
        h = F.linear(x, w)
        h.register_hook(lambda g: g.clamp(-0.005, 0.005))
        return F.linear(h, w)

    check(program, leaf(8, 16), leaf(16, 16), level=level, emit=emit)


@LEVELS
def test_hook_after_accumulation_can_step_at_once(level: str) -> None:
    def prepare(model: nn.Module) -> None:
        def step(parameter: torch.Tensor) -> None:
            parameter.data.sub_(parameter.grad, alpha=0.1)

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)

    result = check(MLP(), torch.randn(8, 16), level=level, prepare=prepare)
    for a, e in zip(result.model.parameters(), result.reference.parameters(), strict=True):
        assert_near(a.detach(), e.detach(), "parameter", 1e-3)


@SETTINGS
def test_gradients_accumulate_over_steps(level: str, emit: str) -> None:
    check(MLP(), leaf(8, 16), level=level, steps=3, emit=emit)


@SETTINGS
def test_two_backward_passes_through_one_graph(level: str, emit: str) -> None:
    model = MLP()
    fast = mpcompile(MLP(), dtype=torch.float16, level=level, emit=emit, strict=True)
    fast.load_state_dict(model.state_dict())
    x = torch.randn(8, 16)
    for m in (model, fast):
        loss = weighted_sum(m(x))
        loss.backward(retain_graph=True)
        (loss * 2).backward()
    for (name, e), a in zip(model.named_parameters(), fast.parameters(), strict=True):
        assert_near(a.grad, e.grad, name, 1e-2)


@LEVELS
def test_several_losses_of_one_model(level: str) -> None:
    """Summed, one after the other, and by torch.autograd.grad: gradients are true to size."""
    model = MLP()
    fast = mpcompile(MLP(), dtype=torch.float16, level=level, emit="eager", strict=True)
    fast.load_state_dict(model.state_dict())
    x, y = torch.randn(8, 16), torch.randn(8, 16)
    for m in (model, fast):
        first, second = weighted_sum(m(x)), F.mse_loss(m(y), x)
        (first + 0.5 * second).backward(retain_graph=True)
        first.backward(retain_graph=True)
        for p, g in zip(
            m.parameters(), torch.autograd.grad(second, list(m.parameters())), strict=True
        ):
            p.grad += 3 * g
    for (name, e), a in zip(model.named_parameters(), fast.parameters(), strict=True):
        assert_near(a.grad, e.grad, name, 1e-2)


@LEVELS
def test_loss_inside_the_compiled_function(level: str) -> None:
    class WithLoss(MLP):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:  # type: ignore[override]
            out = super().forward(x)
            return F.cross_entropy(out, y), F.mse_loss(out, x), out

    check(WithLoss(), leaf(8, 16), torch.randint(16, (8,)), level=level, low=["linear"])


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


@LEVELS
def test_one_module_twice(level: str) -> None:
    class Twice(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(super().forward(x))

    check(Twice(), leaf(8, 16), level=level, low=["linear"])


@LEVELS
def test_tied_embedding_and_head(level: str) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(40, 16), nn.Linear(16, 40, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.head(self.embed(tokens)), y)

    check(Tied(), torch.randint(40, (9,)), torch.randint(40, (9,)), level=level, low=["linear"])


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
            out: torch.Tensor = self.down(h / size)
            return out

    check(Broken(), leaf(8, 16), level=level, emit=emit, low=["linear"])


def test_graphs_of_one_model_share_its_loss_scale() -> None:
    """An overflow in the first of three graphs skips the step; the scale backs off once."""

    class Broken(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.up(x)
            torch._dynamo.graph_break()
            out: torch.Tensor = self.down(F.gelu(h))
            return out

    model = mpcompile(Broken(), dtype=torch.float16, emit="eager", strict=True)
    optimizer = torch.optim.Adam(model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.randn(8, 16)).mul(1e6).sum().backward()
    optimizer.step()
    assert loss_scale_of(model).value == 2.0**15
    assert loss_scale_of(model).skipped_steps == 1
    for p, b in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, b)
