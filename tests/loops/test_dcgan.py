"""PyTorch's DCGAN tutorial, small: two models, two optimizers, and D in three graphs of a step."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from public_images import NOISE, dcgan
from torch import nn

from benchmarks.papers.tasks.gan import frechet_distance
from mpcompile import LossScale, MPOptimizer, compiled_plans, mpcompile
from mpcompile.scaling.copies import copies_of

BATCH = 16


def images(count: int) -> torch.Tensor:
    """A round white spot somewhere in each, 16 x 16, from -1 to 1."""
    at = torch.arange(16.0)
    x, y = (3 + 10 * torch.rand(2, count, 1)).unbind()
    spot = torch.exp(-((at - x) ** 2)[:, None, :] / 8 - ((at - y) ** 2)[:, :, None] / 8)
    return (2 * spot - 1).unsqueeze(1).repeat(1, 3, 1, 1)


Compile = Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=2e-4, betas=(0.5, 0.999))


def fp32(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, adam(model)


def o2(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = mpcompile(
        model,
        level="O2",
        dtype=torch.float16,
        emit="aot_eager",
        fullgraph=True,
        loss_scale=LossScale.dynamic(init_scale=2.0**10),
    )
    return model, MPOptimizer(adam(model), emit="eager")


def train(seed: int, steps: int, prepare: Compile) -> tuple[torch.Tensor, list[Any]]:
    """The tutorial's loop. Returns the losses of D and G at each step, and what was trained."""
    torch.manual_seed(seed)
    (netG, optimizerG), (netD, optimizerD) = map(prepare, dcgan())
    criterion = nn.BCELoss()
    real_label, fake_label = torch.ones(BATCH), torch.zeros(BATCH)
    losses = []
    for _ in range(steps):
        netD.zero_grad()
        errD_real = criterion(netD(images(BATCH)), real_label)
        errD_real.backward()
        fake = netG(torch.randn(BATCH, NOISE, 1, 1))
        errD_fake = criterion(netD(fake.detach()), fake_label)
        errD_fake.backward()
        optimizerD.step()
        netG.zero_grad()
        errG = criterion(netD(fake), real_label)
        errG.backward()
        optimizerG.step()
        losses.append(torch.stack([errD_real + errD_fake, errG]).detach())
    return torch.stack(losses), [netG, netD, optimizerG, optimizerD]


@pytest.mark.slow("a loop in each way of training, against FP64")
def test_the_first_steps_of_a_dcgan_follow_fp32() -> None:
    losses, (netG, netD, *optimizers) = train(0, 4, o2)
    wanted, (g, d, *_) = train(0, 4, fp32)
    torch.testing.assert_close(losses, wanted, rtol=5e-3, atol=0)
    for ours, theirs in ((netG, g), (netD, d)):
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            # Adam's first steps are as large for a gradient of nearly zero as for any other.
            assert (p - q).norm() < 2e-2 * q.norm() or name.endswith("bias"), name
    assert not any(optimizer.skipped_steps for optimizer in optimizers)
    assert len(compiled_plans(netD)) == 2  # without and with a gradient for what it is given
    for p in (*netG.parameters(), *netD.parameters()):
        assert p.grad.dtype is torch.float32
    assert sum(bool(copies_of(p)) for p in (*netG.parameters(), *netD.parameters())) == 6


@pytest.mark.sweep("a training to its end")
def test_a_dcgan_trains_to_the_losses_of_fp32() -> None:
    steps, last = 150, 50
    ends = torch.stack([train(seed, steps, fp32)[0][-last:].mean(0) for seed in range(3)])
    spread = ends.max(0).values - ends.min(0).values
    end = train(0, steps, o2)[0][-last:].mean(0)
    assert ((end - ends[0]).abs() <= spread).all(), f"{end} against {ends}"


def test_the_frechet_distance_of_two_gaussians() -> None:
    """In one dimension it is (m1 - m2)^2 + (s1 - s2)^2: of the means and the deviations."""
    first = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    second = 3 * first + 5
    deviation = math.sqrt(2)  # of the first, with n - 1 in the denominator
    assert frechet_distance(first, second) == pytest.approx(25 + (2 * deviation) ** 2)
    assert frechet_distance(first, first) == pytest.approx(0.0, abs=1e-12)
    assert math.isnan(frechet_distance(first, first * math.inf))
