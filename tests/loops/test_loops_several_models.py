"""Models together: a frozen critic after a plain generator, shared weights, a teacher; and GANs,
two networks with two optimizers and one graph that runs through both.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops import O1, O2, ONLY_O1, WAYS, Way, agree, agreeing, same, snapshot
from module_of import module_of
from torch import nn
from torch.nn.utils import parametrizations

from mpcompile import LossScale, MPCompileError


def features() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU()
    )


@pytest.mark.parametrize("planted", [None, 2])
@agreeing(pytest.mark.parametrize("way", [Way("O1"), Way("O2")], ids=str), tolerance=0.1)
def test_a_perceptual_loss_after_a_plain_generator(way: Way, planted: int | None) -> None:
    """Only the frozen critic is compiled: the generator's optimizer holds none of its parameters,
    and the gradients that overflow in the critic end in the generator.
    """
    generator = way.follow(nn.Conv2d(3, 3, 3, padding=1))
    critic = way.model(features().requires_grad_(False).eval())
    optimizer = way.optimizer(torch.optim.Adam(generator.parameters(), lr=1e-2, eps=1e-2))
    x, y = torch.rand(4, 2, 3, 6, 6), torch.rand(4, 2, 3, 6, 6)
    for step, update in way.updates(4, generator, optimizer, planted=planted):
        update(F.mse_loss(critic(generator(x[step])), critic(y[step])))


@agreeing(WAYS)
def test_a_compiled_body_before_a_plain_head(way: Way) -> None:
    """The overflow arises in the loss; the head's own gradients are finite in FP32."""
    body = way.model(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32)))
    head = way.follow(nn.Linear(32, 4))
    optimizer = way.optimizer(torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.2))
    x, y = torch.randn(4, 8, 16), torch.randint(4, (4, 8))
    for step, update in way.updates(4, body, head, optimizer, planted=2):
        update(F.cross_entropy(head(body(x[step])), y[step]))


def tower(trunk: nn.Module, out: int) -> nn.Module:
    return module_of(
        lambda self, x: self.head(torch.tanh(self.trunk(x))), trunk=trunk, head=nn.Linear(32, out)
    )


def share(way: Way, **options: Any) -> None:
    """An actor and a critic over one trunk, one optimizer over all, one loss."""
    trunk = nn.Linear(16, 32)
    actor, critic = way.model(tower(trunk, 4), **options), way.model(tower(trunk, 1), **options)
    parameters = {id(p): p for m in (actor, critic) for p in m.parameters()}
    optimizer = way.optimizer(torch.optim.SGD(list(parameters.values()), lr=0.2, momentum=0.9))
    x, y = torch.randn(4, 8, 16), torch.randint(4, (4, 8))
    for step, update in way.updates(4, actor, critic, optimizer, planted=2):
        values = critic(x[step]).squeeze(1)
        loss = (F.cross_entropy(actor(x[step]), y[step], reduction="none") * values).mean()
        update(loss + values.square().mean())


def test_two_o2_models_share_a_trunk_under_one_scale() -> None:
    scale = LossScale.dynamic(init_scale=1024.0)
    agree(O2, lambda way: share(way, loss_scale=scale))
    assert scale.skipped_steps == 1


@pytest.mark.parametrize("way", [O1, O2], ids=str)
def test_two_models_share_a_trunk_under_two_scales(way: Way) -> None:
    agree(way, share)


@WAYS
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
@agreeing(tolerance=0.05, bf16=0.3)
def test_a_student_learns_from_a_teacher(compiled: bool, way: Way) -> None:
    """The teacher runs in eval mode and without gradients, and follows by an average (BYOL)."""
    student = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    teacher = copy.deepcopy(student).eval().requires_grad_(False)
    student = way.model(student)
    teacher = way.model(teacher) if compiled else way.follow(teacher)
    optimizer = way.optimizer(torch.optim.SGD(student.parameters(), lr=0.2))
    x, y = torch.randn(4, 16, 16), torch.randint(4, (4, 16))
    for step, update in way.updates(4, student, teacher, optimizer, planted=None):
        with torch.no_grad():
            target = (teacher(x[step]) / 2).softmax(-1)
        logits = student(x[step])
        loss = F.kl_div((logits / 2).log_softmax(-1), target, reduction="batchmean")
        update(loss + F.cross_entropy(logits, y[step]))
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
                old.mul_(0.5).add_(new, alpha=0.5)


# -- GANs ------------------------------------------------------------------------------------------


old_spectral_norm = nn.utils.spectral_norm


def generator() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(8, 16, 4, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.ConvTranspose2d(16, 3, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip


def discriminator(norm: Callable[..., Any]) -> nn.Module:
    return nn.Sequential(
        norm(nn.Conv2d(3, 16, 4, 2, 1, bias=False)), nn.LeakyReLU(0.2),
        norm(nn.Conv2d(16, 1, 4, bias=False)), nn.Flatten(0),
    )  # fmt: skip


@pytest.mark.slow("a loop in each way of training, against FP64")
@pytest.mark.filterwarnings("ignore:.*spectral_norm.*is deprecated:FutureWarning")
@WAYS
@pytest.mark.parametrize("norm", [old_spectral_norm, parametrizations.spectral_norm],
                         ids=["hook", "parametrization"])  # fmt: skip
@agreeing()
def test_dcgan_with_spectral_norm(norm: Callable[..., Any], way: Way) -> None:
    netG, netD = way.model(generator()), way.model(discriminator(norm))
    optG = way.optimizer(torch.optim.SGD(netG.parameters(), lr=0.05, momentum=0.5), hit=False)
    optD = way.optimizer(torch.optim.SGD(netD.parameters(), lr=0.05, momentum=0.5))
    criterion = nn.BCEWithLogitsLoss()
    batches = torch.rand(4, 8, 3, 8, 8)
    for step, factor in way.steps(4, netD, optD, planted=2):
        real = batches[step]
        ones, zeros = torch.ones(8), torch.zeros(8)
        netD.zero_grad()
        errD_real = criterion(netD(real), ones) * factor
        errD_real.backward()
        fake = netG(torch.randn(8, 8, 1, 1))
        errD_fake = criterion(netD(fake.detach()), zeros)
        errD_fake.backward()
        optD.step()
        netG.zero_grad()
        errG = criterion(netD(fake), ones)
        errG.backward()
        optG.step()
        way.log(errD_real + errD_fake)
        way.log(errG)


@pytest.mark.slow("a loop in each way of training, against FP64")
@agreeing(WAYS, tolerance=0.1)
def test_wgan_with_weight_clipping(way: Way) -> None:
    """Clamping `p.data` bumps no version counter, and each forward must see it."""
    netG = way.model(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16)))
    netD = way.model(nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)))
    optG = way.optimizer(torch.optim.RMSprop(netG.parameters(), lr=1e-2, eps=1e-3), hit=False)
    optD = way.optimizer(torch.optim.RMSprop(netD.parameters(), lr=1e-2, eps=1e-3))
    data = torch.randn(4, 2, 16, 16) + 1
    for p in netD.parameters():
        p.data.clamp_(-0.05, 0.05)
    for step, factor in way.steps(4, netD, optD, planted=2):
        for i in range(2):
            optD.zero_grad()
            fake = netG(torch.randn(16, 8)).detach()
            lossD = (netD(fake).mean() - netD(data[step, i]).mean()) * factor
            lossD.backward()
            optD.step()
            for p in netD.parameters():
                p.data.clamp_(-0.05, 0.05)
        optG.zero_grad()
        lossG = -netD(netG(torch.randn(16, 8))).mean()
        lossG.backward()
        optG.step()
        way.log(lossD)
        way.log(lossG)
    # As stated: some weights are at the bound, and the clamp is what put them there.
    largest = max(float(p.detach().abs().max()) for p in netD.parameters())
    assert largest == torch.tensor(0.05).item()


@agreeing(ONLY_O1)
def test_an_overflow_of_the_generator_alone_costs_its_critic_nothing(way: Way) -> None:
    """The critic's gradients of the generator's loss are zeroed before its next step, as always."""
    netG = way.model(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16)))
    netD = way.model(nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)))
    optG = way.optimizer(torch.optim.SGD(netG.parameters(), lr=0.1))
    optD = way.optimizer(torch.optim.SGD(netD.parameters(), lr=0.1), hit=False)
    data = torch.randn(4, 16, 16)
    for step, factor in way.steps(4, netG, optG, planted=2):
        fake = netG(torch.randn(16, 8))
        optD.zero_grad()
        lossD = F.softplus(netD(fake.detach())).mean() + F.softplus(-netD(data[step])).mean()
        lossD.backward()
        optD.step()
        optG.zero_grad()
        lossG = F.softplus(-netD(fake)).mean() * factor
        lossG.backward()
        optG.step()
        way.log(lossD)


def gradient_penalty(critic: nn.Module, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    mix = torch.rand(real.shape[0], 1)
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    scores = critic(between)
    (gradients,) = torch.autograd.grad(
        scores, between, torch.ones_like(scores), create_graph=True, retain_graph=True
    )
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean()


@pytest.mark.slow_rows("a loop in each way of training, against FP64")
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(
    ("generated", "emit"), [(False, "eager"), (True, "aot_eager"), (False, "inductor")]
)
def test_a_gradient_penalty_is_refused_before_anything_changes(
    level: str, generated: bool, emit: str
) -> None:
    way = Way(level, generated=generated, emit=emit)
    critic = way.model(nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 1)))
    optimizer = way.optimizer(torch.optim.Adam(critic.parameters(), lr=1e-2))
    real, fake = torch.randn(16, 16), torch.randn(16, 16)
    optimizer.zero_grad()
    (critic(fake).mean() - critic(real).mean()).backward()  # one good step first, for the state
    optimizer.step()
    before = snapshot([critic, optimizer])
    optimizer.zero_grad()
    loss = critic(fake).mean() - critic(real).mean()
    loss = loss + 10 * gradient_penalty(critic, real, fake)
    # Run op by op, it is torch that refuses to differentiate our operators.
    error, said = (
        (RuntimeError, "differentiate twice") if emit == "eager"
        else (MPCompileError, "gradient penalty")
    )  # fmt: skip
    with pytest.raises(error, match=said):
        loss.backward()
    assert same(before, snapshot([critic, optimizer]))


@agreeing(ONLY_O1)
def test_a_gradient_penalty_through_a_plain_critic(way: Way) -> None:
    """The way that works: the critic stays plain, the generator is compiled."""
    netG = way.model(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16)))
    netD = way.follow(nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 1)))
    optG = way.optimizer(torch.optim.SGD(netG.parameters(), lr=0.1))
    optD = torch.optim.SGD(netD.parameters(), lr=0.1)
    data = torch.randn(4, 16, 16)
    for step, _ in way.steps(4, netG, netD):
        fake = netG(torch.randn(16, 8))
        optD.zero_grad()
        lossD = netD(fake.detach()).mean() - netD(data[step]).mean()
        (lossD + 10 * gradient_penalty(netD, data[step], fake.detach())).backward()
        optD.step()
        optG.zero_grad()
        lossG = -netD(fake).mean()
        lossG.backward()
        optG.step()
        way.log(lossG)


@agreeing(ONLY_O1)
def test_relativistic_losses_see_both_batches_in_one_backward(way: Way) -> None:
    """One call of the discriminator for each, one loss over both: their gradients add up."""
    netD = way.model(nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)))
    optD = way.optimizer(torch.optim.SGD(netD.parameters(), lr=0.1))
    data = torch.randn(4, 2, 16, 16)
    for step, factor in way.steps(4, netD, optD, planted=1):
        real, fake = netD(data[step, 0] * factor), netD(data[step, 1])
        loss = F.softplus(fake - real.mean()).mean() + F.softplus(fake.mean() - real).mean()
        optD.zero_grad()
        loss.backward()
        optD.step()
        way.log(loss)


def test_a_copy_of_a_compiled_discriminator_is_plain() -> None:
    """An unrolled GAN deep-copies its critic: the copy must train apart, in FP32."""
    way = O1.again
    critic = way.model(nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)))
    critic(torch.randn(4, 16)).mean().backward()
    before = snapshot([critic])
    unrolled = copy.deepcopy(critic)
    optimizer = torch.optim.SGD(unrolled.parameters(), lr=0.1)
    (unrolled(torch.randn(4, 16)) * 1e6).mean().backward()  # in FP32 nothing overflows
    optimizer.step()
    assert same(before, snapshot([critic]))
    assert not same(before, snapshot([unrolled]))
