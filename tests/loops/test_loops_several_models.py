"""Models together: a frozen critic behind a plain generator, shared weights, a teacher."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops import O1, O2, WAYS, Way, agree
from torch import nn

from mpcompile import LossScale


def features() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU()
    )


@pytest.mark.parametrize("planted", [None, 2])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_perceptual_loss_behind_a_plain_generator(level: str, planted: int | None) -> None:
    """Only the frozen critic is compiled: the generator's optimizer holds none of its parameters,
    and the gradients that overflow in the critic end in the generator.
    """

    def loop(way: Way) -> None:
        generator = way.follow(nn.Conv2d(3, 3, 3, padding=1))
        critic = way.model(features().requires_grad_(False).eval())
        optimizer = way.optimizer(torch.optim.Adam(generator.parameters(), lr=1e-2, eps=1e-2))
        x, y = torch.rand(4, 2, 3, 6, 6), torch.rand(4, 2, 3, 6, 6)
        for step, update in way.updates(4, generator, optimizer, planted=planted):
            update(F.mse_loss(critic(generator(x[step])), critic(y[step])))

    agree(Way(level), loop, tolerance=0.1)


@WAYS
def test_a_compiled_body_before_a_plain_head(way: Way) -> None:
    """The overflow arises in the loss; the head's own gradients are finite in FP32."""

    def loop(way: Way) -> None:
        body = way.model(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32)))
        head = way.follow(nn.Linear(32, 4))
        optimizer = way.optimizer(torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.2))
        x, y = torch.randn(4, 8, 16), torch.randint(4, (4, 8))
        for step, update in way.updates(4, body, head, optimizer, planted=2):
            update(F.cross_entropy(head(body(x[step])), y[step]))

    agree(way, loop)


class Tower(nn.Module):
    def __init__(self, trunk: nn.Module, out: int) -> None:
        super().__init__()
        self.trunk, self.head = trunk, nn.Linear(32, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.trunk(x)))  # type: ignore[no-any-return]


def share(way: Way, **options: Any) -> None:
    """An actor and a critic over one trunk, one optimizer over all, one loss."""
    trunk = nn.Linear(16, 32)
    actor, critic = way.model(Tower(trunk, 4), **options), way.model(Tower(trunk, 1), **options)
    parameters = {id(p): p for m in (actor, critic) for p in m.parameters()}
    optimizer = way.optimizer(torch.optim.SGD(list(parameters.values()), lr=0.2, momentum=0.9))
    x, y = torch.randn(4, 8, 16), torch.randint(4, (4, 8))
    for step, update in way.updates(4, actor, critic, optimizer, planted=2):
        values = critic(x[step]).squeeze(1)
        loss = (F.cross_entropy(actor(x[step]), y[step], reduction="none") * values).mean()
        update(loss + values.square().mean())


def test_two_models_share_a_trunk() -> None:
    agree(O1, share)


def test_two_o2_models_share_a_trunk_under_one_scale() -> None:
    scale = LossScale.dynamic(init_scale=1024.0)
    agree(O2, lambda way: share(way, loss_scale=scale))
    assert scale.skipped_steps == 1


def test_two_o2_models_share_a_trunk_under_two_scales() -> None:
    agree(O2, share)


@WAYS
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_a_student_learns_from_a_teacher(compiled: bool, way: Way) -> None:
    """The teacher runs in eval mode and without gradients, and follows by an average (BYOL)."""

    def loop(way: Way) -> None:
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

    agree(way, loop, tolerance=0.05 if way.dtype is torch.float16 else 0.3)
