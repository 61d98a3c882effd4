"""Gradients that are unscaled many at once, as on a GPU: trained with the kernels of a CPU, and
with an overflow in exactly one small gradient, which must skip the step.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from module_of import module_of
from torch import nn

from mpcompile import LossScale, MPOptimizer, Policy, mpcompile
from mpcompile.devices.cpu import CPU
from mpcompile.lower import joint
from mpcompile.passes.joint import together as module

pytestmark = pytest.mark.slow("trainings that overflow, against FP64")

HUGE = 1e35  # times the loss scale, beyond FP32; itself within it


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """What the pass said of each graph. A cached graph isn't lowered again."""
    told: list[bool] = []
    pass_ = module.unscale_together

    def unscale_together(graph: torch.fx.Graph) -> bool:
        told.append(pass_(graph))
        return told[-1]

    unscale_together.__wrapped__ = pass_  # type: ignore[attr-defined]  (its file is asked for)
    monkeypatch.setattr(CPU, "spares_launches", True)
    monkeypatch.setattr(joint, "unscale_together", unscale_together)
    torch._dynamo.reset()
    with (
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch._inductor.config.patch(fx_graph_cache=False),
    ):
        yield told
    torch._dynamo.reset()


def weigh(*size: int) -> Any:
    """A parameter times x. What it is called with decides how large the gradient is."""
    return module_of(lambda m, x: x * m.p, p=nn.Parameter(torch.full(size, 0.5)))


class Net(nn.Module):
    """Gradients that products, sums, casts and elementwise operators write; `first`, `middle` and
    `last` are the first parameter, one in the middle and the last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = weigh(6)
        self.low = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.middle = weigh(6)
        self.full = nn.Linear(6, 6)
        self.alone = weigh()
        self.last = weigh(6)

    def forward(self, x: torch.Tensor, *weighed: torch.Tensor) -> torch.Tensor:
        h = self.alone(self.full(self.norm(self.low(x))))
        for by, given in zip((self.first, self.middle, self.last), weighed, strict=True):
            h = h + by(given)
        return h.sum()


def compiled(level: str) -> Net:
    torch.manual_seed(0)
    full = dict.fromkeys(("first", "middle", "last", "full", "alone"), "fp32")
    return mpcompile(
        Net(), dtype=torch.float16, level=level, policy=Policy(modules=full),
        loss_scale=LossScale.dynamic(init_scale=2.0**14), strict=True,
    )  # fmt: skip


def batch(overflow: int | None = None) -> list[torch.Tensor]:
    torch.manual_seed(1)
    x, *weighed = torch.randn(4, 4, 6)
    if overflow is not None:
        weighed[overflow][2, 3] = HUGE
    return [x, *weighed]


ARMS = [(level, generated) for level in ("O1", "O2") for generated in (False, True)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("level", "generated"), ARMS)
def test_one_small_gradient_that_overflows_skips_the_step(
    level: str, generated: bool, as_on_a_gpu: list[bool]
) -> None:
    model = compiled(level)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    optimizer = MPOptimizer(sgd) if generated else sgd
    held = list(model.parameters())

    def step(overflow: int | None) -> tuple[list[int], bool]:
        """Which gradients were not finite, and whether the step changed a parameter."""
        before = [p.detach().clone() for p in held]
        model(*batch(overflow)).backward()
        bad = [i for i, p in enumerate(held) if not p.grad.isfinite().all()]
        optimizer.step()
        optimizer.zero_grad()
        return bad, any(not p.equal(old) for p, old in zip(held, before, strict=True))

    names = [name for name, _ in model.named_parameters()]
    places = [names.index(f"{weigh}.p") for weigh in ("first", "middle", "last")]
    assert (places[0], places[-1]) == (0, len(names) - 1)
    assert step(None) == ([], True)
    for which, place in enumerate(places):
        assert step(which) == ([place], False)
    assert step(None) == ([], True)
    assert any(as_on_a_gpu)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_gradients_are_those_of_fp64(level: str, as_on_a_gpu: list[bool]) -> None:
    model = compiled(level)
    torch.manual_seed(0)
    exact = Net().double()
    inputs = batch()
    given = [x.clone().requires_grad_() for x in inputs]
    wanted = [x.double().requires_grad_() for x in inputs]
    for _ in range(2):  # they accumulate
        model(*given).backward()
        exact(*wanted).backward()
    assert any(as_on_a_gpu)
    pairs = [*zip(model.parameters(), exact.parameters(), strict=True),
             *zip(given, wanted, strict=True)]  # fmt: skip
    for found, expected in pairs:
        assert found.grad.stride() == expected.grad.stride()
        error = (found.grad - expected.grad).norm()
        assert error <= 2e-3 * expected.grad.norm() + 1e-6


def test_a_second_backward_through_the_same_graph(as_on_a_gpu: list[bool]) -> None:
    """Nothing that was saved is written to."""
    model = compiled("O1")
    loss = model(*batch())
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    loss.backward()
    assert any(as_on_a_gpu)
    for p, first in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(p.grad, 2 * first)


def test_an_overflow_of_one_backward_of_several(as_on_a_gpu: list[bool]) -> None:
    """Accumulated, also where the gradient was set to zero in between."""
    model = compiled("O1")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    before = [p.detach().clone() for p in model.parameters()]
    model(*batch()).backward()
    optimizer.zero_grad()
    model(*batch(1)).backward()
    model.middle.p.grad.zero_()
    model(*batch()).backward()
    optimizer.step()
    assert any(as_on_a_gpu)
    assert all(p.equal(old) for p, old in zip(model.parameters(), before, strict=True))
