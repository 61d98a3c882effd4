"""When it is said that steps were skipped in a row, and that noting a step changes nothing."""

import pytest
import torch
from faulty_models import Activation, Steep, Training, compiled, net
from module_of import module_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from mpcompile import MPCompileWarning, MPOptimizer, loss_scale_of, mpcompile
from mpcompile.ir.scale import ScaleRule, ScaleState
from mpcompile.scaling.live_scale import LiveScale
from mpcompile.scaling.messages import Messages
from mpcompile.scaling.scale_search import after_backward
from mpcompile.scaling.skipped_steps import SKIPS, SkippedInARow

# -- counting --------------------------------------------------------------------------------------


class Steps:
    """The steps of a loss scale, without a model."""

    def __init__(self, *, repairs: bool = False) -> None:
        self.live = LiveScale(ScaleState(2.0**16), ScaleRule())
        self.trouble = SkippedInARow(self.live, Messages())
        self.repaired: list[int] = []  # the numbers of the steps that were repaired
        self.taken = 0
        self.trouble.repair = self._repair if repairs else None

    def _repair(self) -> bool:
        self.repaired.append(self.taken)
        return True

    def step(self, *, overflow: bool) -> None:
        self.taken += 1
        self.trouble.stepped(self.live.settle(overflow))

    def run(self, overflows: str, *, optimizers: int = 1) -> None:
        """One forward, and a step of each optimizer, for each letter: "x" overflows."""
        for letter in overflows:
            self.live.forwards += 1
            if self.trouble.pending:
                self.trouble.calls.append("a call")
            for _ in range(optimizers):
                self.step(overflow=letter == "x")


def test_four_in_a_row_are_said_once() -> None:
    steps = Steps()
    steps.run("xxx." * 10)
    steps.run("xxx", optimizers=3)
    with pytest.warns(MPCompileWarning, match="4 optimizer steps in a row were skipped"):
        steps.run("x")
    steps.run("x" * 40)  # warnings are errors


def test_the_step_after_four_skipped_ones_is_repaired() -> None:
    steps = Steps(repairs=True)
    steps.run("x..xxxx")
    assert steps.trouble.pending
    assert steps.trouble.before == 2.0**15
    steps.run("xxxxxx")
    assert steps.repaired == [8, 13]


def test_a_noted_step_that_is_good_is_not_repaired() -> None:
    steps = Steps(repairs=True)
    steps.run("xxxx." + "xxx." * 3)
    assert steps.repaired == []
    assert not steps.trouble.pending


def test_steps_on_a_device_are_counted() -> None:
    """What others or a loaded run have skipped before is none of these."""
    live = LiveScale(ScaleState(2.0**10, skipped_steps=100), ScaleRule("static"))
    trouble = SkippedInARow(live, Messages())
    state = live.reside(torch.device("cpu"))
    counts = []
    for letter in "...xx.xxx":
        live.forwards += 1
        for _ in range(2):
            state["skipped_steps"].add_(letter == "x")
            trouble.stepped(live.stepped())
        counts.append(trouble.skipped)
    assert counts == [0, 0, 0, 1, 2, 0, 1, 2, 3]


def test_after_a_backward() -> None:
    said: list[str] = []
    after_backward(lambda: said.append("at once"))
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: after_backward(lambda: said.append("after")))
    x.register_hook(lambda _: said.append("the last hook"))
    y.sum().backward()
    assert said == ["at once", "the last hook", "after"]


# -- a noted step ----------------------------------------------------------------------------------


def normed() -> nn.Module:
    return module_of(
        lambda m, x: m.last(torch.relu_(m.norm(m.first(x + 0.1 * torch.randn(x.shape))))),
        first=nn.Linear(8, 8), norm=nn.BatchNorm1d(8), last=nn.Linear(8, 2),
    )  # fmt: skip


def _trained(level: str, generated: bool, *, noted: bool) -> list[torch.Tensor]:
    """All tensors after some steps, the third of which is noted."""
    torch.manual_seed(0)
    model = mpcompile(
        normed(), dtype=torch.float16, level=level, emit="eager", loss_scale=128.0, repair=True
    )
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = MPOptimizer(plain, emit="eager") if generated else plain
    for step in range(4):
        trouble = loss_scale_of(model).in_a_row
        trouble.pending = step == 2 and noted
        trouble.repair = (lambda: True) if noted else None
        optimizer.zero_grad()
        x = torch.tanh(torch.randn(4, 8, requires_grad=True))  # whose backward reads x
        model(x).square().mean().backward()
        optimizer.step()
        assert not loss_scale_of(model).in_a_row.pending, "nothing was concluded"
    return [*model.state_dict().values(), torch.get_rng_state()]


@pytest.mark.parametrize(("level", "generated"), [("O1", False), ("O2", True)])
def test_noting_a_step_changes_nothing(level: str, generated: bool) -> None:
    """Not a weight, not a running mean, and not the random state."""
    wanted = _trained(level, generated, noted=False)
    for mine, theirs in zip(_trained(level, generated, noted=True), wanted, strict=True):
        assert torch.equal(mine, theirs)


def test_a_checkpoint_around_the_model_computes_again_what_it_computed() -> None:
    model = compiled(Activation, repair=True)
    run = Training(model, lambda x: checkpoint(model, x, use_reentrant=False)).run(12)
    assert len(loss_scale_of(model).repairs.events) == 1
    assert run.warnings == []


def test_a_handwritten_update_and_accumulation() -> None:
    model = compiled(Activation, repair=True)
    for _ in range(8):
        model.zero_grad()
        for _ in range(3):
            model(torch.randn(8, 16)).square().mean().backward()
        if not loss_scale_of(model).overflowed():
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.01 * p.grad
    assert len(loss_scale_of(model).repairs.events) == 1
    assert loss_scale_of(model).skipped_steps == SKIPS + 1


def test_nothing_is_looked_for_where_nothing_is_skipped() -> None:
    model = mpcompile(net(Steep), dtype=torch.bfloat16, emit="eager", repair=True, strict=True)
    Training(model).run(6)
    assert not loss_scale_of(model).in_a_row.pending
    assert not loss_scale_of(model).repairs.events
