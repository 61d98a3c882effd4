"""Training loops as users write them, run in plain FP32 and in mixed precision, and compared.

A loop is a function of a `Way`: it hands its models to `way.model`, its optimizers to
`way.optimizer`, its losses to `way.log`, and is otherwise plain PyTorch. `agree` runs it both ways;
`agreeing` makes a test of one.

What is compared is how far each parameter has moved: against weights that training leaves almost
where they were, any update would look right, and none at all.
"""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from mpcompile import LossScale, MPOptimizer, compiled_plans, mpcompile

M = TypeVar("M", bound=nn.Module)

# Of a movement: several steps, each with a gradient that went through a few roundings.
TOLERANCE = {torch.float16: 3e-2, torch.bfloat16: 0.15}


@dataclass
class Way:
    """How a loop is run, and what it did.

    Attributes:
        level, dtype: for `mpcompile()`; no level is the reference, plain PyTorch in FP32.
        generated: whether each optimizer becomes an `MPOptimizer`.
        overflows: whether the planted overflows are there (BF16 has no scale and skips nothing).
        planting: whether the loop is in a step with an overflow.
    """

    level: str | None
    dtype: torch.dtype = torch.float16
    generated: bool = False
    emit: str = "eager"
    overflows: bool = True
    planting: bool = False
    models: list[nn.Module] = field(default_factory=list)
    before: list[dict[str, torch.Tensor]] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)

    @property
    def plain(self) -> bool:
        return self.level is None

    @property
    def reference(self) -> "Way":
        return Way(None, overflows=self.overflows)

    @property
    def again(self) -> "Way":
        """The same way, with nothing done yet."""
        return Way(self.level, self.dtype, self.generated, self.emit, self.overflows)

    def __str__(self) -> str:
        names = (self.level, str(self.dtype).removeprefix("torch."), "mp" if self.generated else "")
        return "-".join(filter(None, names))

    def model(self, model: M, **options: Any) -> M:
        self.follow(model)
        if self.plain:
            return model
        return mpcompile(model, **self.options(**options))

    def options(self, **options: Any) -> dict[str, Any]:
        # The default scale, 65536, makes the first gradients of some loops overflow: these steps
        # are skipped, which is right, but then there is nothing to compare step by step.
        scale = {torch.float16: LossScale.dynamic(init_scale=1024.0)}.get(self.dtype, "dynamic")
        return {"dtype": self.dtype, "level": self.level, "emit": self.emit, "strict": True,
                "loss_scale": scale, **options}  # fmt: skip

    def follow(self, model: M) -> M:
        """A model that stays plain, compared all the same."""
        self.models.append(model)
        self.before.append({name: p.detach().clone() for name, p in model.named_parameters()})
        return model

    def optimizer(
        self, optimizer: Optimizer, *, max_grad_norm: float | None = None, hit: bool = True
    ) -> Optimizer:
        """Args:
        hit: whether the planted overflow reaches this optimizer's gradients.
        """
        if self.generated:
            return MPOptimizer(optimizer, max_grad_norm=max_grad_norm, emit="eager")
        if max_grad_norm is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            optimizer.register_step_pre_hook(
                lambda *_: _nothing(nn.utils.clip_grad_norm_(parameters, max_grad_norm))
            )
        if self.plain and hit:  # what a skipped step is: no parameter has a gradient
            optimizer.register_step_pre_hook(
                lambda *_: optimizer.zero_grad() if self.planting else None
            )
        return optimizer

    def log(self, loss: torch.Tensor) -> None:
        if not self.planting:
            self.losses.append(loss.detach().clone())

    def steps(
        self, count: int, *watched: Any, planted: int | None = None
    ) -> Iterator[tuple[int, float]]:
        """Numbers of steps, each with a factor for the loop to put on its batch or its loss.

        In the planted one the factor is 1e30, and when the loop comes back for the next step no
        watched model or optimizer may have changed by one bit. The reference does that step with
        a factor of 1, and its optimizers leave it out.
        """
        for step in range(count):
            self.planting = step == planted and self.overflows
            before = snapshot(watched)
            yield step, 1e30 if self.planting and not self.plain else 1.0
            after = snapshot(watched)
            assert all(bool(t.isfinite().all()) for t in after), f"not finite after step {step}"
            if self.planting:
                assert same(before, after), f"changed by the overflow in step {step}"
        self.planting = False

    def updates(
        self, count: int, *watched: Any, planted: int | None = None
    ) -> Iterator[tuple[int, Callable[[torch.Tensor], None]]]:
        """Numbers of steps, each with what does the rest of it to a loss: the backward, and a step
        of each optimizer that is watched.
        """
        optimizers = [thing for thing in watched if isinstance(thing, Optimizer)]
        for step, factor in self.steps(count, *watched, planted=planted):

            def update(loss: torch.Tensor, factor: float = factor) -> None:
                (loss * factor).backward()
                for optimizer in optimizers:
                    optimizer.step()
                self.log(loss)

            for optimizer in optimizers:
                optimizer.zero_grad()
            yield step, update


O1 = Way("O1")
O2 = Way("O2", generated=True, emit="aot_eager")
ALL = [O1, O2, Way("O1", torch.bfloat16, overflows=False),
       Way("O2", torch.bfloat16, generated=True, emit="aot_eager", overflows=False)]  # fmt: skip


def ways(*, but: Mapping[str, pytest.MarkDecorator] = MappingProxyType({})) -> Any:
    """All ways, with a mark on some. BF16 runs with the slow tests."""
    unknown = but.keys() - set(map(str, ALL))
    assert not unknown, unknown
    return pytest.mark.parametrize("way", [_param(w, but) for w in ALL])


def _param(way: Way, but: Mapping[str, pytest.MarkDecorator] = MappingProxyType({})) -> Any:
    marks = [pytest.mark.sweep("the rest of a matrix")] if way.dtype is torch.bfloat16 else []
    return pytest.param(
        way, id=str(way), marks=[*marks, *(m for n, m in but.items() if n == str(way))]
    )


WAYS = ways()
ONLY_O1 = pytest.mark.parametrize("way", [O1])
# For loops whose O2 says little that another's does not.
MOSTLY_O1 = ways(but={"O2-float16-mp": pytest.mark.sweep("the rest of a matrix")})
# For optimizers and loops that no MPOptimizer takes.
PLAIN = pytest.mark.parametrize("way", [_param(w) for w in ALL if not w.generated])


def agree(way: Way, loop: Callable[[Way], Any], tolerance: float | None = None) -> Way:
    """Assert that the loop trains as in FP32. Returns the way as it was run, for more questions."""
    reference, mixed = way.reference, way.again
    for run in (reference, mixed):
        torch.manual_seed(0)
        loop(run)
    tolerance = tolerance or TOLERANCE[way.dtype]
    lowered = [node for model in mixed.models for node in low_nodes(model)]
    assert lowered, "nothing ran in low precision"
    for mine, theirs in zip(mixed.losses, reference.losses, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance / 10)
    assert reference.losses, "a loop must log its losses"
    for mine, theirs in zip(movements(mixed), movements(reference), strict=True):
        assert_moved_alike(mine, theirs, tolerance)
    return mixed


def agreeing(ways: Any = None, *, tolerance: float | None = None, bf16: float | None = None) -> Any:
    """A test whose body is a loop: that it agrees, in the `way` that the test is given.

    Args:
        ways: a mark that gives them, if none above does.
        tolerance, bf16: for `agree`; in BF16 the second, if it is there.
    """

    def made(loop: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(loop)
        def test(*, way: Way, **given: Any) -> None:
            allowed = bf16 if bf16 and way.dtype is torch.bfloat16 else tolerance
            agree(way, lambda run: loop(way=run, **given), allowed)

        return ways(test) if ways else test

    return made


def low_nodes(model: Any) -> list[str]:
    try:
        plans = compiled_plans(model)
    except ValueError:
        return []
    return [n.op for plan in plans for n in plan.nodes if n.precision == "LOW"]


def movements(way: Way) -> list[dict[str, torch.Tensor]]:
    """How far each parameter of each model is from where it began (from zero, if it is new)."""
    return [
        {name: p.detach() - before.get(name, 0) for name, p in model.named_parameters()}
        for model, before in zip(way.models, way.before, strict=True)
    ]


def assert_moved_alike(
    mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float
) -> None:
    assert mine.keys() == theirs.keys()
    total = torch.stack([t.norm() for t in theirs.values()]).norm()
    for name, wanted in theirs.items():
        # Some gradients are zero but for rounding, as of a bias before a norm; hence the second
        # term, which is small next to the model's whole movement.
        allowed = tolerance * (wanted.norm() + total / 10)
        error = (mine[name] - wanted).norm()
        assert error <= allowed, f"{name}: moved {wanted.norm():g} in FP32, and is off by {error:g}"


def snapshot(things: Any) -> list[torch.Tensor]:
    """Copies of all tensors of models (their parameters) and optimizers (their state)."""
    found: list[torch.Tensor] = []
    for thing in things:
        if isinstance(thing, nn.Module):
            found += [p.detach().clone() for p in thing.parameters()]
        elif isinstance(thing, Optimizer):
            values = [v for state in thing.state.values() for v in state.values()]
            found += [copy.deepcopy(v) for v in values if isinstance(v, torch.Tensor)]
        else:
            found.append(thing.detach().clone())
    return found


def same(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return len(before) == len(after) and all(map(torch.equal, before, after))


def finite(*things: Any) -> bool:
    return all(bool(t.isfinite().all()) for t in snapshot(things))


def _nothing(_: Any) -> None: ...
