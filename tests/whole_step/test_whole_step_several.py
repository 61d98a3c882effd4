"""Whole training steps with several models, optimizers, losses and backwards; and training that is
saved between two of them and goes on elsewhere, as a whole or in pieces.
"""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from whole_steps import BOTH, SETTINGS, Run, Setting, agree, batches, gan, gan_calls, net

from mpcompile import LossScale

pytestmark = pytest.mark.slow("compiles whole steps of several kinds, against FP64")

Step = Callable[..., Any]


@pytest.mark.sampled(3)
@SETTINGS
@pytest.mark.parametrize(
    ("zero_first", "bad"), [(True, None), (False, None), (False, "d"), (False, "g")]
)
def test_a_gan(setting: Setting, zero_first: bool, bad: str | None) -> None:
    if bad and setting.dtype is torch.bfloat16:
        pytest.skip("BF16 skips nothing")
    # What the generator's loss leaves in D's gradients has, in pieces at O2, the low dtype.
    loose = {"rtol": 2e-2, "atol": 1e-3} if zero_first and setting.level == "O2" else {}
    compiled = 2 if zero_first else 1  # Dynamo guards on whether a gradient is None
    run = agree(gan(zero_first), gan_calls(5, bad), setting, compiled=compiled, **loose)
    assert run.scale.skipped_steps == (bad is not None)


@pytest.mark.sampled(3)
@BOTH
@pytest.mark.parametrize("bad", ["d", "g"])
def test_a_gans_overflow_skips_the_step_of_one_network(setting: Setting, bad: str) -> None:
    """Also where the gradients stay until the next call. (In pieces one more step is skipped.)"""
    run = Run(True, setting)
    step = run.step(gan(True)(run))
    for i, call in enumerate(gan_calls(5, bad)):
        before = [[p.detach().clone() for p in m.parameters()] for m in run.models]
        step(*call)
        after = [[p.detach() for p in m.parameters()] for m in run.models]
        moved = [not all(map(torch.equal, b, a)) for b, a in zip(before, after, strict=True)]
        assert moved == ([bad == "d", bad == "g"] if i == 2 else [True, True])
    assert step.left is None
    assert (run.scale.skipped_steps, run.scale.value) == (1, 512.0)


def two_optimizers_after_one_backward(run: Run) -> Step:
    model = run.model(net())
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    return run.usual(run.loss_of(model), run.sgd(matrices), run.adamw(others))


def two_optimizers_of_the_same_parameters(run: Run) -> Step:
    model = run.model(net())
    optimizers = [run.sgd(model.parameters(), lr) for lr in (0.1, 0.01)]
    return run.usual(run.loss_of(model), *optimizers)


def param_groups_with_settings_of_their_own(run: Run) -> Step:
    model = run.model(net())
    groups = [{"params": model[0].parameters(), "lr": 0.1},
              {"params": model[2].parameters(), "weight_decay": 0.1}]  # fmt: skip
    optimizer = run.optimizer(torch.optim.AdamW(groups, lr=1e-2))
    run.before[2] = lambda: optimizer.param_groups[1].update(lr=1e-3)
    return run.usual(run.loss_of(model), optimizer)


def two_losses_and_a_gradient_given(run: Run) -> Step:
    trunk, heads = run.model(net()), run.model(nn.ModuleList([nn.Linear(8, 8)] * 2))
    optimizer = run.sgd([*trunk.parameters(), *heads.parameters()])

    def losses_of(x: torch.Tensor, y: torch.Tensor, f: torch.Tensor) -> Any:
        shared = trunk(x)
        return [F.cross_entropy(h(shared), y) * f for h in heads], shared

    losses_of = run.forward(losses_of)

    def step(x: torch.Tensor, y: torch.Tensor, f: torch.Tensor) -> Any:
        losses, logits = losses_of(x, y, f)
        (losses[0] + 0.5 * losses[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
        right = (logits.argmax(-1) == y).float().mean()
        return [x.detach() for x in losses], {"logits": logits.detach(), "right": right}

    return step


@SETTINGS
@pytest.mark.parametrize(
    "program",
    [two_optimizers_after_one_backward, two_optimizers_of_the_same_parameters,
     param_groups_with_settings_of_their_own, two_losses_and_a_gradient_given],
)  # fmt: skip
def test_two_of_a_kind(setting: Setting, program: Callable[[Run], Step]) -> None:
    bad = {2: 1e30} if setting.dtype is torch.float16 else {}
    agree(program, batches(4, factors=bad), setting)


class Tied(nn.Module):
    """A language model whose head is its embedding, with a block that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 16)
        self.block = nn.Linear(16, 16)
        self.head = nn.Linear(16, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(3, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.block(x).relu()
        return self.head(x + self.block(x).relu())


@SETTINGS
@pytest.mark.parametrize("make", [Run.sgd, Run.adamw])
def test_tied_weights_a_shared_module_and_an_unused_one(setting: Setting, make: Any) -> None:
    def program(run: Run) -> Step:
        model = run.model(Tied())
        optimizer = make(run, model.parameters())

        def loss_of(tokens: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
            logits = model(tokens[:, :-1])
            return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) * f

        return run.usual(run.forward(loss_of), optimizer)

    generator = torch.Generator().manual_seed(1)
    scaled = setting.dtype is torch.float16
    calls = [
        (torch.randint(0, 8, (4, 7), generator=generator),
         torch.tensor(1e30 if scaled and i == 2 else 1.0))
        for i in range(4)
    ]  # fmt: skip
    agree(program, calls, setting, atol=1e-5)


@BOTH
def test_the_scale_moves_between_two_backwards_of_one_step(setting: Setting) -> None:
    """The second optimizer's gradients come from forwards before and after the first one's step,
    which doubles the scale.
    """

    def program(run: Run) -> Step:
        run.scale = LossScale.dynamic(init_scale=1024.0, growth_interval=1)
        models = [run.model(net()) for _ in range(3)]
        other = run.sgd(models[1].parameters())
        two = run.sgd([*models[0].parameters(), *models[2].parameters()])
        losses = [run.loss_of(model) for model in models]

        def step(x: torch.Tensor, y: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
            losses[0](x, y, f).backward()
            losses[1](x, y, f).backward()
            other.step()
            loss = losses[2](x, y, f)
            loss.backward()
            two.step()
            other.zero_grad()
            two.zero_grad()
            return loss.detach()

        return step

    run = agree(program, batches(3), setting)
    assert run.scale.value > 1024.0


BATCHES = batches(6, factors={1: 1e30, 4: 1e30})  # one skip before, one after


def started(setting: Setting, *, whole: bool, seed: int) -> tuple[Run, Step]:
    torch.manual_seed(seed)
    run = Run(whole, setting)
    _, optimizer, loss_of = run.classifier(Run.adamw)
    return run, run.step(run.usual(loss_of, optimizer))


def saved(run: Run) -> io.BytesIO:
    file = io.BytesIO()
    (model,), (optimizer,) = run.models, run.optimizers
    parts = {"model": model, "optimizer": optimizer, "scale": run.scale}
    torch.save({name: part.state_dict() for name, part in parts.items()}, file)
    file.seek(0)
    return file


def load(run: Run, file: io.BytesIO) -> None:
    state = torch.load(file)
    run.models[0].load_state_dict(state["model"])
    run.optimizers[0].load_state_dict(state["optimizer"])
    run.scale.load_state_dict(state["scale"])


@pytest.mark.sampled(3)
@BOTH
@pytest.mark.parametrize("then", ["whole", "pieces"])
@pytest.mark.parametrize("first", ["whole", "pieces"])
def test_it_goes_on_as_if_nothing_had_been(setting: Setting, first: str, then: str) -> None:
    run, step = started(setting, whole=first == "whole", seed=0)
    for batch in BATCHES[:3]:
        step(*batch)
    file = saved(run)
    losses = [step(*batch) for batch in BATCHES[3:]]

    again, step_again = started(setting, whole=then == "whole", seed=1)
    load(again, file)
    torch.testing.assert_close(
        [step_again(*batch) for batch in BATCHES[3:]], losses, equal_nan=True, rtol=1e-3, atol=1e-5
    )
    assert again.scale.skipped_steps == run.scale.skipped_steps
    ours, theirs = again.everything(), run.everything()
    exact = {"rtol": 0.0, "atol": 0.0} if first == then else {"rtol": 1e-5, "atol": 1e-6}
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if value is not None:
            torch.testing.assert_close(value, theirs[name], equal_nan=True, **exact)
