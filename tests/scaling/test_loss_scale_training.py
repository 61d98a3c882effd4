"""Training loops that never mention the loss scale: skipped steps, true gradients, warnings."""

import copy
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpcompile import LossScale, MPCompileError, MPCompileWarning, loss_scale_of, mpcompile
from mpcompile.ir.fakes import duplicate
from mpcompile.scaling.fit_scale import FACTOR, check_two_scales

FP16: dict[str, Any] = {"dtype": torch.float16, "strict": True}


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


OPTIMIZERS: list[Callable[..., torch.optim.Optimizer]] = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    lambda p: torch.optim.AdamW(p, lr=0.1),
    lambda p: torch.optim.Adagrad(p, lr=0.1),
]


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


@pytest.mark.parametrize("emit", ["eager", "aot_eager"])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_an_overflow_step_changes_nothing_and_is_counted(
    make: Callable[..., torch.optim.Optimizer], emit: str
) -> None:
    model = mpcompile(mlp(), emit=emit, **FP16)
    optimizer = make(model.parameters())
    x = torch.randn(4, 8)

    def step(data: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    step(x)
    before, value = snapshot(model, optimizer), loss_scale_of(model).value
    step(x * 1e6)  # 8e6 has no FP16 value: inf in the first layer, nan gradients
    torch.testing.assert_close(snapshot(model, optimizer), before, rtol=0, atol=0, equal_nan=True)
    scale = loss_scale_of(model)
    assert (scale.skipped_steps, scale.value) == (1, value / 2)
    assert all(p.grad is not None for p in model.parameters())  # still there to be looked at
    step(x)
    assert not torch.equal(model[0].weight, before["model"]["0.weight"])
    assert scale.skipped_steps == 1


@pytest.mark.slow("trainings that overflow, against FP64")
@pytest.mark.usefixtures("own_inductor_cache")
def test_a_search_for_the_scale_repeats_the_call_with_a_slice() -> None:
    """Inductor's graph asserts the strides of its inputs: a copy without the gaps fails."""

    class Words(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Embedding(16, 8), nn.Linear(8, 16))

    tokens = torch.randint(16, (4, 9))
    gradients = []
    for low in (False, True):
        torch.manual_seed(0)
        model = mpcompile(Words(), emit="inductor", **FP16) if low else Words()
        logits = model(tokens[:, :-1])
        # gradients of up to 2000 / 32 overflow at a scale of 65,536
        (2000 * F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert loss_scale_of(model).value < 2**16
    torch.testing.assert_close(gradients[1], gradients[0], rtol=2e-2, atol=0.5)


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(4, 9)[:, 1:],
        torch.randn(4, 1, 5).expand(4, 3, 5),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(8, 8)[::2, ::3].t(),
        torch.randn(3, 9)[:0, 1:],
        torch.tensor(2.0),
    ],
    ids=lambda value: f"{tuple(value.shape)} {value.stride()}",
)
def test_a_duplicate_has_the_strides_of_its_tensor(value: torch.Tensor) -> None:
    found = duplicate(value)
    assert found.stride() == value.stride() or not value.numel()
    assert torch.equal(found, value)
    assert found.data_ptr() != value.data_ptr() or not value.numel()


def test_a_hopeless_overflow_warns_once_at_the_floor() -> None:
    scale = LossScale.dynamic(init_scale=4.0, min_scale=2.0)
    model = mpcompile(mlp(), emit="eager", loss_scale=scale, **FP16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.full((4, 8), 1e6)).sum().backward()
            optimizer.step()
    ours = [w for w in caught if issubclass(w.category, MPCompileWarning)]
    assert len(ours) == 1
    assert "floor" in str(ours[0].message)
    assert scale.value == 2.0


def test_bf16_has_no_scale_unless_one_is_handed_over() -> None:
    for scale, skipped in (("dynamic", 0), (LossScale.static(8.0), 1)):
        model = mpcompile(mlp(), dtype=torch.bfloat16, emit="eager", loss_scale=scale)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        (model(torch.ones(4, 8)) * float("inf")).sum().backward()
        optimizer.step()
        assert loss_scale_of(model).skipped_steps == skipped


def test_a_new_scale_does_not_recompile() -> None:
    model = mpcompile(mlp(), emit="eager", **FP16)
    scale = loss_scale_of(model)
    x = torch.randn(4, 8)
    for value in (2.0**16, 2.0**10, 3.0):
        scale.state = dataclasses.replace(scale.state, scale=value)
        with torch.compiler.set_stance("default" if value == 2.0**16 else "fail_on_recompile"):
            model.zero_grad()
            model(x).sum().backward()


GRADIENTS = {
    "real": torch.tensor([1.0, -2.0]),
    "imaginary": torch.tensor([1j, -2j]),
    "conjugate": torch.tensor([1j, 2 + 1j]).conj(),
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_a_gradient_that_follows_the_scale(kind: str) -> None:
    gradient = GRADIENTS[kind]
    check_two_scales([gradient], [gradient], ())
    check_two_scales([gradient * FACTOR], [gradient], (0,))  # it is to leave scaled
    for higher, lower in ((gradient * FACTOR, gradient), (gradient, gradient * FACTOR)):
        with pytest.raises(MPCompileError, match="depends on the loss scale"):
            check_two_scales([higher], [lower], ())
