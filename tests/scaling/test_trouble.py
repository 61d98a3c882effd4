"""When a step is watched, and that watching it changes nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from faulty_models import Activation, Steep, Training, compiled, net
from torch import nn
from torch.utils.checkpoint import checkpoint

from mpcompile import LossScale, MPOptimizer, loss_scale_of, mpcompile
from mpcompile.ir.inputs import SCALE
from mpcompile.ir.scale import ScaleRule, ScaleState
from mpcompile.observe.watch import Watch
from mpcompile.records import repairs_of
from mpcompile.scaling.live_scale import LiveScale
from mpcompile.scaling.scale_search import after_backward
from mpcompile.scaling.skips_in_a_row import EVERY, FIRST_LOOK, Trouble, Verdict

# -- counting --------------------------------------------------------------------------------------


class Steps:
    """The steps of a loss scale, without a model."""

    def __init__(self, verdict: Verdict = Verdict.WAIT) -> None:
        self.live = LiveScale(ScaleState(2.0**16), ScaleRule())
        self.trouble = Trouble(self.live)
        self.judged: list[int] = []  # the number of the step after which looks were judged
        self.verdict, self.taken = verdict, 0
        self.trouble.judge = self._judge

    def _judge(self) -> Verdict:
        self.judged.append(self.taken)
        return self.verdict

    def forward(self) -> None:
        self.live.forward_begins()
        if self.trouble.pending and self.trouble.is_watched():
            self.trouble.looks.append("a look")

    def step(self, *, overflow: bool) -> None:
        self.taken += 1
        if overflow:
            self.trouble.skipping()
            state = self.live.state
            skipped = state.skipped_steps + 1
            self.live.set(dataclasses.replace(state, scale=state.scale / 2, skipped_steps=skipped))
        self.trouble.settled(overflow=overflow)

    def run(self, overflows: str) -> list[int]:
        """One forward and one step for each letter: "x" overflows. Returns `judged`."""
        for letter in overflows:
            self.forward()
            self.step(overflow=letter == "x")
        return self.judged


def test_the_step_after_four_skipped_ones_is_watched_and_again_after_twice_as_many() -> None:
    # Watched are the steps after 4, after 2 * 5, and after 2 * 11 skipped ones.
    assert Steps().run("x" * 40) == [5, 11, 23]


def test_skipped_steps_apart_are_no_trouble() -> None:
    assert Steps().run("xxx." * 10) == []


def test_a_good_step_starts_the_count_anew() -> None:
    assert Steps().run("x" * 6 + "." + "x" * 6) == [5, 12]


def test_a_watched_step_that_is_good_is_not_judged() -> None:
    assert Steps().run("xxxx." + "xxx.") == []


def test_nothing_is_watched_once_the_user_was_told() -> None:
    assert Steps(Verdict.TOLD).run("x" * 40) == [5]


def test_the_lowest_scale_is_looked_at_before_the_user_is_warned_of_it() -> None:
    steps = Steps()
    assert steps.trouble.look_at_floor()
    assert steps.run("x") == [1]  # at once
    steps.trouble.give_up()
    assert not steps.trouble.look_at_floor()  # no look will ever tell
    told = Steps(Verdict.TOLD)
    told.run("x" * 5)
    assert told.trouble.look_at_floor()


def test_a_repair_starts_the_count_anew() -> None:
    assert Steps(Verdict.REPAIRED).run("x" * 10) == [5, 10]


def test_the_scale_before_the_trouble_is_known() -> None:
    steps = Steps()
    steps.run("x..xxxx")
    assert steps.trouble.before == 2.0**15


def test_several_forwards_make_one_step() -> None:
    steps = Steps()
    for _ in range(FIRST_LOOK):
        for _ in range(3):
            steps.forward()
        steps.step(overflow=True)
    assert steps.trouble.pending
    for _ in range(3):
        steps.forward()
    assert len(steps.trouble.looks) == 3


def test_several_optimizers_of_one_forward_count_once() -> None:
    steps = Steps()
    for _ in range(FIRST_LOOK - 1):
        steps.forward()
        for _ in range(3):
            steps.step(overflow=True)
    assert not steps.trouble.pending


def test_steps_on_a_device_are_counted_now_and_then() -> None:
    live = LiveScale(ScaleState(2.0**16), ScaleRule())
    trouble = Trouble(live)
    trouble.judge = lambda: Verdict.WAIT
    state = live.reside(torch.device("cpu"))
    counts = []
    for step in range(3 * EVERY):
        overflow = step >= 3  # three good steps, then none
        live.forward_begins()
        state["skipped_steps"].add_(overflow)
        state["scale"].mul_(0.5 if overflow else 1.0)
        trouble.stepped(live.stepped())
        counts.append(trouble.skipped)
    assert [counts[i] for i in (EVERY - 1, 2 * EVERY - 1, 3 * EVERY - 1)] == [0, EVERY, 2 * EVERY]
    assert trouble.pending
    assert trouble.before == 2.0**16


class OnDevice:
    """The generated steps of a loss scale, without a model."""

    def __init__(self, state: ScaleState) -> None:
        self.live = LiveScale(state, ScaleRule("static"))
        self.trouble = Trouble(self.live)
        self.trouble.judge = lambda: Verdict.WAIT
        self.state = self.live.reside(torch.device("cpu"))

    def run(self, overflows: str, *, optimizers: int = 1) -> None:
        """One forward, and a step of each optimizer, for each letter: "x" overflows."""
        for letter in overflows:
            self.live.forward_begins()
            for _ in range(optimizers):
                self.state["skipped_steps"].add_(letter == "x")
                self.trouble.stepped(self.live.stepped())


@pytest.mark.parametrize("loaded", ["before", "between"])
def test_what_a_loaded_run_has_skipped_is_no_trouble_of_this_one(loaded: str) -> None:
    old = ScaleState(2.0**10, skipped_steps=100)
    steps = OnDevice(old if loaded == "before" else ScaleState(2.0**16))
    if loaded == "between":
        steps.run("." * (EVERY + 3))
        steps.live.set(old)
    steps.run("." * 2 * EVERY)
    assert steps.trouble.skipped == 0
    assert not steps.trouble.pending


def test_what_other_optimizers_skipped_before_the_first_generated_step_is_none_of_its() -> None:
    steps = OnDevice(ScaleState(2.0**16))
    for _ in range(2 * EVERY):
        steps.live.forward_begins()
        steps.live.settle(overflow=True)
    steps.run("." * 2 * EVERY)
    assert not steps.trouble.pending


def test_two_generated_optimizers_of_one_forward_count_once() -> None:
    steps = OnDevice(ScaleState(2.0**16))
    steps.run("x" * (EVERY // 2), optimizers=2)
    assert steps.trouble.skipped == 0  # too early to be asked
    steps.run("x" * (EVERY // 2), optimizers=2)
    assert steps.trouble.skipped == EVERY
    steps = OnDevice(ScaleState(2.0**16))
    steps.run("x." * EVERY, optimizers=2)
    assert steps.trouble.skipped == 0  # half of the steps were good
    assert not steps.trouble.pending


def test_a_watched_generated_step_that_is_good_starts_the_count_anew() -> None:
    steps = OnDevice(ScaleState(2.0**16))
    steps.run("x" * EVERY)
    assert steps.trouble.pending
    assert steps.trouble.is_watched()
    steps.trouble.looks.append("a look")
    steps.run(".")
    assert steps.trouble.skipped == 0
    steps.run("...")
    assert not steps.trouble.pending


def test_after_a_backward() -> None:
    said: list[str] = []
    after_backward(lambda: said.append("at once"))
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: after_backward(lambda: said.append("after")))
    x.register_hook(lambda _: said.append("the last hook"))
    y.sum().backward()
    assert said == ["at once", "the last hook", "after"]


# -- a watched step --------------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 0.1 * torch.randn(x.shape)
        y: torch.Tensor = self.last(torch.relu_(self.norm(self.first(x))))
        return y


def _trained(level: str, generated: bool, *, watched: bool) -> list[torch.Tensor]:
    """All tensors after some steps, the third of which is watched."""
    torch.manual_seed(0)
    model = mpcompile(Normed(), dtype=torch.float16, level=level, emit="eager", loss_scale=128.0)
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = MPOptimizer(plain, emit="eager") if generated else plain
    for step in range(4):
        loss_scale_of(model).trouble.pending = step == 2 and watched
        optimizer.zero_grad()
        x = torch.tanh(torch.randn(4, 8, requires_grad=True))  # whose backward reads x
        model(x).square().mean().backward()
        optimizer.step()
        assert not loss_scale_of(model).trouble.pending, "nothing was concluded"
    return [*model.state_dict().values(), torch.get_rng_state()]


@pytest.mark.parametrize(("level", "generated"), [("O1", False), ("O2", True)])
def test_watching_a_step_changes_nothing(level: str, generated: bool) -> None:
    """Not a weight, not a running mean, and not the random state."""
    wanted = _trained(level, generated, watched=False)
    for mine, theirs in zip(_trained(level, generated, watched=True), wanted, strict=True):
        assert torch.equal(mine, theirs)


def test_a_graph_that_cannot_be_watched_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its running means are written once, though the watched run had begun to write them."""
    wanted = _trained("O1", False, watched=False)
    run_node = Watch.run_node

    def fails(self: Watch, n: torch.fx.Node) -> Any:
        if n.op == "output" and SCALE in {x.target for x in n.graph.nodes}:  # the rewritten one
            raise RuntimeError("out of memory")
        return run_node(self, n)

    monkeypatch.setattr(Watch, "run_node", fails)
    for mine, theirs in zip(_trained("O1", False, watched=True), wanted, strict=True):
        assert torch.equal(mine, theirs)


def test_a_checkpoint_around_the_model_computes_again_what_it_computed() -> None:
    model = compiled(Activation, repair=True)
    run = Training(model, lambda x: checkpoint(model, x, use_reentrant=False)).run(12)
    assert len(repairs_of(model)) == 1
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
                    assert p.grad is not None
                    p -= 0.01 * p.grad
    assert len(repairs_of(model)) == 1
    assert loss_scale_of(model).skipped_steps == FIRST_LOOK + 1


def test_the_critic_of_a_repaired_generator_gets_its_scale_back() -> None:
    generator = compiled(Activation, repair=True, loss_scale=LossScale.dynamic(2.0**10))
    torch.manual_seed(0)
    critic = mpcompile(
        nn.Linear(4, 1), dtype=torch.float16, emit="eager", loss_scale=LossScale.dynamic(2.0**10)
    )
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (critic, generator)]
    for _ in range(10):
        made = generator(torch.randn(8, 16))
        for optimizer, seen in zip(optimizers, (made.detach(), made), strict=True):
            optimizer.zero_grad()
            critic(seen).square().mean().backward()
            optimizer.step()
    assert len(repairs_of(generator)) == 1
    assert repairs_of(critic) == ()
    assert loss_scale_of(generator).value == 2.0**10
    # The critic's last bad backward, in the generator's step, counts once more, after the repair.
    assert loss_scale_of(critic).value == 2.0**9


def test_the_scale_of_an_unrelated_model_is_left_where_it_is() -> None:
    """It is on its way down by itself, while the other model is repaired."""
    torch.manual_seed(0)
    other = mpcompile(
        nn.Linear(16, 4), dtype=torch.float16, emit="eager", loss_scale=LossScale.dynamic(2.0**16)
    )
    model = compiled(Activation, repair=True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-9) for m in (other, model)]
    for _ in range(FIRST_LOOK + 1):
        for m, optimizer, size in zip((other, model), optimizers, (1e6, 1.0), strict=True):
            optimizer.zero_grad()
            (m(torch.randn(8, 16)).square().mean() * size).backward()
            optimizer.step()
    assert len(repairs_of(model)) == 1
    assert loss_scale_of(other).value == 2.0 ** (16 - FIRST_LOOK - 1)


def test_nothing_is_looked_for_where_nothing_is_skipped() -> None:
    torch.manual_seed(0)
    model = mpcompile(net(Steep), dtype=torch.bfloat16, emit="eager", repair=True, strict=True)
    Training(model).run(6)
    assert not loss_scale_of(model).trouble.pending
    assert repairs_of(model) == ()
