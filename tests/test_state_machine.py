"""Any training loop at all: random ones, next to a reference that knows which steps to skip."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from guarded_world import Setup, World
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

pytestmark = pytest.mark.filterwarnings("ignore:the loss scale is at its floor")


@st.composite
def setups(draw: Any) -> Setup:
    inputs = [draw(st.sampled_from(["data", "stem", "latent"]))]
    for _ in range(draw(st.integers(0, 2))):
        inputs.append(draw(st.sampled_from(["data", "stem", "latent", "chain"])))
    by_hand = draw(st.sampled_from([False, False, False, True]))
    shared = not by_hand and len(inputs) > 1 and draw(st.booleans())
    kind = st.sampled_from(["sgd", "adamw", "mp-sgd", "mp-adamw"])
    return Setup(
        level=draw(st.sampled_from(["O1", "O2"])),
        inputs=tuple(inputs),
        shared=shared,
        layout="each" if by_hand else draw(st.sampled_from(["each", "one", "layers", "biases"])),
        kinds=tuple(draw(st.lists(kind, min_size=1, max_size=3))),
        by_hand=by_hand,
        init_scale=draw(st.sampled_from([2.0**10, 2.0**9, None])),
        growth_interval=draw(st.integers(1, 3)),
        max_scale=draw(st.sampled_from([2.0**11, 2.0**24])),
        seed=draw(st.integers(0, 9)),
    )


MODELS = OPTIMIZERS = st.integers(0, 5)
BATCHES = st.integers(2, 4)
FACTORS = st.sampled_from([1.0, 1.0, 1.0, 0.5, 32.0, 1e30])
RARELY = st.sampled_from([False, False, False, False, True])


class Machine(RuleBasedStateMachine):
    """Each rule is one line of somebody's loop; the world asserts after each."""

    world: World | None = None

    @initialize(setup=setups())
    def begin(self, setup: Setup) -> None:
        torch._dynamo.reset()
        self.world = World(setup)

    def model(self, k: int) -> int:
        assert self.world is not None
        return k % len(self.world.setup.inputs)

    @rule(k=MODELS, batch=BATCHES, huge=RARELY)
    def forward(self, k: int, batch: int, huge: bool) -> None:
        self.world.forward(self.model(k), batch, huge)

    @precondition(lambda self: self.world and self.world.outputs)
    @rule(which=st.lists(st.integers(0, 2), min_size=1, max_size=2), factor=FACTORS, retain=RARELY)
    def backward(self, which: list[int], factor: float, retain: bool) -> None:
        self.world.backward(which, factor, retain)

    @precondition(lambda self: self.world and self.world.held)
    @rule(i=OPTIMIZERS)
    def step(self, i: int) -> None:
        self.world.step(i)

    @precondition(lambda self: self.world and self.world.setup.by_hand)
    @rule()
    def by_hand(self) -> None:
        self.world.by_hand()

    @precondition(lambda self: self.world and self.world.held)
    @rule(i=OPTIMIZERS, set_to_none=st.booleans())
    def zero_grad(self, i: int, set_to_none: bool) -> None:
        self.world.zero_grad(i, set_to_none)

    @rule(k=MODELS)
    def zero_model(self, k: int) -> None:
        self.world.zero_model(self.model(k))

    @precondition(lambda self: self.world and self.world.held)
    @rule(i=OPTIMIZERS)
    def clip(self, i: int) -> None:
        self.world.clip(i)

    @precondition(lambda self: self.world and self.world.held)
    @rule(i=OPTIMIZERS, factor=st.sampled_from([0.5, 2.0]))
    def lr(self, i: int, factor: float) -> None:
        self.world.lr(i, factor)

    @rule(k=MODELS, batch=BATCHES)
    def evaluate(self, k: int, batch: int) -> None:
        self.world.evaluate(self.model(k), batch)

    @rule()
    def reload(self) -> None:
        self.world.reload()

    @rule(k=MODELS, batch=BATCHES, huge=RARELY, factor=FACTORS, set_to_none=st.booleans())
    def iteration(
        self, k: int, batch: int, huge: bool, factor: float, set_to_none: bool
    ) -> None:
        """A whole one, as most loops are."""
        world = self.world
        assert world is not None
        world.forward(self.model(k), batch, huge)
        world.backward([len(world.outputs) - 1], factor)
        if world.setup.by_hand:
            world.by_hand()
            world.zero_model(0)
        for i in range(len(world.held)):
            world.step(i)
            world.zero_grad(i, set_to_none)


def test_any_loop() -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=30, stateful_step_count=20, derandomize=True, deadline=None,
            suppress_health_check=list(HealthCheck), phases=[Phase.generate], database=None,
        ),
    )  # fmt: skip
