"""Every gradient of the rewritten program is the FP32 program's, however it is asked for."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import LEVELS, MLP, SETTINGS, assert_near, check, leaf
from module_of import module_of
from torch import nn

from mpcompile import MPCompileError, mpcompile

pytestmark = pytest.mark.inside

BIG_SCALE = 2.0**15


@LEVELS
def test_gradients_too_small_for_fp16_survive(level: str) -> None:
    """1e-8 is zero in FP16; scaled by 2**15 it is a normal number."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, w), w) * 1e-6

    check(program, leaf(8, 16), leaf(16, 16), level=level, loss_scale=BIG_SCALE)


@LEVELS
def test_frozen_parameters_get_no_gradient(level: str) -> None:
    model = MLP()
    model.up.requires_grad_(False)
    model.norm.weight.requires_grad_(False)
    check(model, torch.randn(8, 16), level=level, low=["linear"])
    assert model.up.weight.grad is None
    assert model.down.weight.grad is not None


@LEVELS
def test_nothing_or_only_the_input_needs_a_gradient(level: str) -> None:
    for x in (torch.randn(8, 16), leaf(8, 16)):
        result = check(MLP().requires_grad_(False), x, level=level, low=["linear"])
        assert result.plans[0].scaled == x.requires_grad


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


@LEVELS
def test_loss_inside_the_compiled_function(level: str) -> None:
    class WithLoss(MLP):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:  # type: ignore[override]
            out = super().forward(x)
            return F.cross_entropy(out, y), F.mse_loss(out, x), out

    check(WithLoss(), leaf(8, 16), torch.randint(16, (8,)), level=level, low=["linear"])


@LEVELS
def test_tied_embedding_and_head(level: str) -> None:
    def forward(m: Any, tokens: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(m.head(m.embed(tokens)), y)

    model = module_of(forward, embed=nn.Embedding(40, 16), head=nn.Linear(16, 40, bias=False))
    model.head.weight = model.embed.weight
    check(model, torch.randint(40, (9,)), torch.randint(40, (9,)), level=level, low=["linear"])


def test_second_differentiation_is_refused() -> None:
    """Under every emit, AOTAutograd's own too. Without a scale nothing stands in its way."""

    def penalty(model: nn.Module) -> torch.Tensor:
        x = leaf(8, 16)
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return grad.square().sum()

    scaled = mpcompile(MLP(), dtype=torch.float16, emit="eager", strict=True)
    with pytest.raises(MPCompileError, match=r"double backward.*inside of what is compiled"):
        penalty(scaled).backward()
    unscaled = mpcompile(MLP(), dtype=torch.bfloat16, emit="eager", strict=True)
    penalty(unscaled).backward()
    assert unscaled.up.weight.grad.norm() > 0


@pytest.mark.slow_rows("a matrix of trainings against FP64")
@pytest.mark.parametrize("emit", ["aot_eager", "inductor"])
@torch._functorch.config.patch(donated_buffer=False)  # torch refuses by itself if it is on
def test_second_differentiation_is_refused_in_any_call(emit: str) -> None:
    """Also when a graph has run before, in evaluations and in steps that nobody differentiates."""
    model, x = mpcompile(MLP(), dtype=torch.bfloat16, emit=emit, strict=True), leaf(8, 16)
    with torch.no_grad():
        model(x)
    for _ in range(3):
        model(x).square().sum().backward()
    assert not x.grad.requires_grad
    for _ in range(2):
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        assert grad.requires_grad
        with pytest.raises(MPCompileError, match="gradient penalty"):
            grad.square().sum().backward()
