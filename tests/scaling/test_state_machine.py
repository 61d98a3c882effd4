"""Any training loop at all: random ones, next to a reference that knows which steps to skip."""

from typing import Any

import pytest
import torch
from guarded_parts import Setup
from guarded_world import World
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:the loss scale is at its floor"),
    pytest.mark.filterwarnings("ignore:.*changes nothing"),  # all optimizers step, each time
    pytest.mark.filterwarnings("ignore:.*optimizer steps in a row"),  # overflows are planted here
]


@st.composite
def setups(draw: Any) -> Setup:
    inputs = [draw(st.sampled_from(["data", "stem", "latent"]))]
    later = st.sampled_from(["data", "stem", "latent", "chain"])
    inputs += draw(st.lists(later, max_size=2))
    by_hand = draw(st.sampled_from([False, False, False, True]))
    shared = not by_hand and len(inputs) > 1 and draw(st.booleans())
    kind = st.sampled_from(["sgd", "adamw", "mp-sgd", "mp-adamw"])
    init_scale = draw(st.sampled_from([2.0**10, 2.0**9, None]))
    return Setup(
        # Where the search may end at a scale that does not fit, it is not told what did overflow.
        min_scale=1.0 if init_scale is None else 2.0**8,
        level=draw(st.sampled_from(["O1", "O2"])),
        inputs=tuple(inputs),
        shared=shared,
        layout="each" if by_hand else draw(st.sampled_from(["each", "one", "layers", "biases"])),
        kinds=tuple(draw(st.lists(kind, min_size=1, max_size=3))),
        by_hand=by_hand,
        init_scale=init_scale,
        growth_interval=draw(st.integers(1, 3)),
        max_scale=draw(st.sampled_from([2.0**11, 2.0**24])),
        seed=draw(st.integers(0, 9)),
    )


MODELS = OPTIMIZERS = st.integers(0, 5)
BATCHES = st.integers(2, 4)
FACTORS = st.sampled_from([1.0, 0.5, 32.0, 1e30])
RARELY = st.sampled_from([False, False, True])


class Machine(RuleBasedStateMachine):
    """Each rule is one line of someone's loop; the world asserts after each."""

    world: Any = None  # a World, once there is one

    @initialize(setup=setups())
    def begin(self, setup: Setup) -> None:
        torch._dynamo.reset()
        self.world = World(setup)

    def model(self, k: int) -> int:
        return k % len(self.world.setup.inputs)  # type: ignore[no-any-return]

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

    @rule(what=st.sampled_from(["evaluate", "evaluate", "lr", "reload"]), i=OPTIMIZERS)
    def other(self, what: str, i: int) -> None:
        """What a loop does now and then."""
        if what == "evaluate":
            self.world.evaluate(self.model(i))
        elif what == "reload":
            self.world.reload()
        elif self.world.held:
            self.world.lr(i, 0.5)

    @rule(k=MODELS, batch=BATCHES, factor=FACTORS, set_to_none=st.booleans())
    def iteration(self, k: int, batch: int, factor: float, set_to_none: bool) -> None:
        self._iteration(self.model(k), batch, factor, set_to_none=set_to_none)

    @rule(k=MODELS, huge=st.booleans(), set_to_none=st.booleans(), clips=st.booleans())
    def overflow(self, k: int, huge: bool, set_to_none: bool, clips: bool) -> None:
        factor = 1.0 if huge else 1e30
        self._iteration(self.model(k), 2, factor, huge, set_to_none=set_to_none, clips=clips)

    def _iteration(
        self,
        k: int,
        batch: int,
        factor: float,
        huge: bool = False,
        *,
        set_to_none: bool,
        clips: bool = False,
    ) -> None:
        """A whole one, as most are."""
        world = self.world
        world.forward(k, batch, huge)
        world.backward([len(world.outputs) - 1], factor)
        if world.setup.by_hand:
            world.by_hand()
            world.zero_model(0)
        for i in range(len(world.held)):
            if clips:
                world.clip(i)
            world.step(i)
            world.zero_grad(i, set_to_none)


def run(examples: int, *, seeded: bool = True) -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples, stateful_step_count=20, derandomize=seeded, deadline=None,
            suppress_health_check=list(HealthCheck), phases=[Phase.generate], database=None,
        ),
    )  # fmt: skip


@pytest.mark.slow("random loops")
def test_any_loop() -> None:
    run(12)


@pytest.mark.sweep("random loops")
@pytest.mark.parametrize("part", range(50))
def test_many_loops(part: int) -> None:
    """Other ones in each run; `guarded_world.World` can repeat what a failure prints."""
    run(100, seeded=False)


@pytest.mark.parametrize("kind", ["sgd", "adamw", "mp-sgd"])
def test_an_overflow_that_only_the_flag_tells(kind: str) -> None:
    """The gradients of the biases are finite, and what is not is made so."""
    world = World(Setup(layout="biases", kinds=(kind,)))
    world.forward(0, huge=True)
    world.backward([0])
    for i in range(len(world.held)):
        world.clip(i)
        world.step(i)
    assert world.skips == world.steps == 2
