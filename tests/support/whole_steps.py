"""One training step, run as a whole and in pieces, and compared after each call.

A program is a function of a `Run`: it hands over its models, forwards and optimizers, and returns
its step, which is otherwise plain PyTorch. As a whole, `mpcompile()` compiles the step; in pieces
it compiles the forwards, and the step is Python. All else is the same, so all numbers must be, but
for the order in which FP32 is summed.

Nothing is handed to Inductor, which would take an hour or two. To have it so:

    WHOLE_STEP_EMIT=inductor pytest tests/whole_step/test_whole_step_*.py
"""

import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from mpcompile import LossScale, MPCompileWarning, MPOptimizer, mpcompile
from mpcompile.scaling import copies
from mpcompile.whole_step import one_graph

F = TypeVar("F", bound=Callable[..., Any])
M = TypeVar("M", bound=nn.Module)
Program = Callable[["Run"], Callable[..., Any]]


@dataclass(frozen=True)
class Setting:
    """How a program is compiled: `generated` makes each optimizer an MPOptimizer."""

    level: str
    dtype: torch.dtype
    generated: bool
    emit: str = os.environ.get("WHOLE_STEP_EMIT", "aot_eager")

    def __str__(self) -> str:
        kind = "mp" if self.generated else "plain"
        return f"{self.level}-{str(self.dtype).removeprefix('torch.')}-{kind}"


O2 = Setting("O2", torch.float16, True)
O1 = Setting("O1", torch.float16, False)
O1_MP = Setting("O1", torch.float16, True)
O2_BF16 = Setting("O2", torch.bfloat16, True)
SETTINGS = pytest.mark.parametrize(
    "setting",
    [O2, O1, pytest.param(O2_BF16, marks=pytest.mark.sweep("the rest of a matrix"))],
    ids=str,
)
BOTH = pytest.mark.parametrize("setting", [O2, O1], ids=str)


@dataclass
class Run:
    """One of the two ways.

    Attributes:
        whole: which.
        before: number of a call -> what is done before it.
        scale: of all that is compiled; its start is given, so no first step is different.
    """

    whole: bool
    setting: Setting
    before: dict[int, Callable[[], Any]] = field(default_factory=dict)
    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    scale: LossScale = field(default_factory=lambda: LossScale.dynamic(init_scale=1024.0))

    def options(self) -> dict[str, Any]:
        scale = self.scale if self.setting.dtype is torch.float16 else "dynamic"
        return {"level": self.setting.level, "dtype": self.setting.dtype,
                "emit": self.setting.emit, "loss_scale": scale}  # fmt: skip

    def model(self, model: M) -> M:
        self.models.append(model)
        return model

    def forward(self, function: F) -> F:
        """What computes a loss from models."""
        return function if self.whole else mpcompile(function, **self.options())

    def loss_of(self, model: nn.Module) -> Callable[..., torch.Tensor]:
        """The forward of a classifier: its loss, times a factor."""
        return self.forward(lambda x, y, f: cross_entropy(model(x), y) * f)

    def optimizer(self, optimizer: Optimizer, **settings: Any) -> Any:
        if self.setting.generated:
            optimizer = MPOptimizer(optimizer, emit="eager", **settings)
        self.optimizers.append(optimizer)
        return optimizer

    def sgd(self, parameters: Any, lr: float = 0.1, **settings: Any) -> Any:
        return self.optimizer(torch.optim.SGD(parameters, lr=lr, momentum=0.9), **settings)

    def adamw(self, parameters: Any, **settings: Any) -> Any:
        return self.optimizer(torch.optim.AdamW(parameters, lr=1e-2), **settings)

    def classifier(
        self, make: Callable[..., Any] | None = None, **settings: Any
    ) -> tuple[nn.Sequential, Any, Callable[..., torch.Tensor]]:
        """A classifier, its optimizer, by default SGD, and the forward that gives its loss."""
        model = self.model(net())
        optimizer = (make or Run.sgd)(self, model.parameters(), **settings)
        return model, optimizer, self.loss_of(model)

    @staticmethod
    def usual(
        loss_of: Callable[..., Any],
        *optimizers: Optimizer,
        end: Callable[..., Any] = torch.Tensor.detach,
        then: Callable[[], Any] = lambda: None,
        **backward: Any,
    ) -> Callable[..., Any]:
        """The step of most loops: `end` makes the result of the loss, `then` is done at last."""

        def step(*args: Any) -> Any:
            loss = loss_of(*args)
            loss.backward(**backward)
            result = end(loss)
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            then()
            return result

        return step

    def step(self, function: F) -> F:
        return mpcompile(function, **self.options()) if self.whole else function

    def everything(self) -> dict[str, Any]:
        """Copies of all that training keeps."""
        found: dict[str, Any] = {"scale": self.scale.state.scale}
        found["skipped"] = self.scale.skipped_steps
        for i, model in enumerate(self.models):
            found.update({f"{i}.{k}": v.detach().clone() for k, v in model.named_buffers()})
            for name, p in model.named_parameters():
                found[f"{i}.{name}"] = p.detach().clone()
                found[f"{i}.{name}.grad"] = true_gradient(p)
                for j, copy in enumerate(copies.copies_of(p).values()):
                    copy.refresh(p)
                    found[f"{i}.{name}.copy{j}"] = copy.stored.clone()
                for k, optimizer in enumerate(self.optimizers):
                    for key, value in optimizer.state.get(p, {}).items():
                        kept = value.clone() if torch.is_tensor(value) else value
                        found[f"{i}.{name}.{k}.{key}"] = kept
        return found


def true_gradient(p: torch.Tensor) -> torch.Tensor | None:
    if p.grad is None:
        return None
    grad = p.grad.detach().float()
    return grad.where(grad.isfinite(), torch.nan)  # which of them is no matter


@contextmanager
def traces() -> Iterator[list[Any]]:
    """What was traced as one graph in this context."""
    found: list[Any] = []
    own = one_graph.trace

    def trace(program: Any) -> Any:
        found.append(program)
        return own(program)

    one_graph.trace = trace
    try:
        yield found
    finally:
        one_graph.trace = own


def both(program: Program, setting: Setting) -> Iterator[tuple[Run, Callable[..., Any]]]:
    for whole in (True, False):
        torch.manual_seed(0)
        run = Run(whole, setting)
        yield run, run.step(program(run))


def agree(
    program: Program,
    calls: Sequence[tuple[Any, ...]],
    setting: Setting,
    *,
    compiled: int = 1,
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> Run:
    """Assert that the step does the same as a whole and in pieces, and is one graph.

    Args:
        program: see above.
        calls: the arguments of each call.
        setting: how.
        compiled: how many graphs are made.
        rtol, atol: relative and absolute tolerance.

    Returns:
        The run as a whole.
    """
    (whole, ours), (pieces, theirs) = both(program, setting)
    with traces() as found:
        compare(whole, ours, pieces, theirs, calls, rtol=rtol, atol=atol)
    assert ours.left is None, ours.left
    assert len(found) == compiled
    return whole


def agree_left(
    program: Program,
    calls: Sequence[tuple[Any, ...]],
    setting: Setting,
    reason: str,
    *,
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> Run:
    """Assert that the step runs in pieces, and says so once, with this reason (a regex)."""
    (whole, ours), (pieces, theirs) = both(program, setting)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MPCompileWarning)
        compare(whole, ours, pieces, theirs, calls, rtol=rtol, atol=atol)
    said = [str(w.message) for w in caught if "runs in pieces" in str(w.message)]
    assert len(said) == 1, said
    assert re.search(reason, said[0]), said
    assert ours.left is not None
    return whole


def compare(
    whole: Run,
    ours: Callable[..., Any],
    pieces: Run,
    theirs: Callable[..., Any],
    calls: Sequence[tuple[Any, ...]],
    *,
    rtol: float,
    atol: float,
) -> None:
    if whole.setting.emit == "inductor":  # a value that stays in a kernel is not rounded: 2**-9
        rtol, atol = max(rtol, 2e-3), max(atol, 5e-4)
    start = whole.everything()
    for i, call in enumerate(calls):
        results = []
        for run, step in ((whole, ours), (pieces, theirs)):
            run.before.get(i, lambda: None)()
            torch.manual_seed(i)
            results.append(step(*call))
        text = f"call {i}: ".__add__
        torch.testing.assert_close(
            *results, rtol=max(rtol, 1e-3), atol=max(atol, 1e-5), equal_nan=True, msg=text
        )
        mine, others = whole.everything(), pieces.everything()
        assert mine.keys() == others.keys(), f"call {i}: {mine.keys() ^ others.keys()}"
        for name, value in mine.items():
            msg = f"call {i}, {name}: ".__add__
            if name.endswith(".grad"):
                assert (value is None) == (others[name] is None), msg("one gradient is None")
            if value is not None:
                torch.testing.assert_close(
                    value, others[name], rtol=rtol, atol=atol, equal_nan=True, msg=msg
                )
    end = whole.everything()
    assert any(not torch.equal(v, end[k]) for k, v in start.items() if torch.is_tensor(v)), (
        "nothing was trained"
    )


def batches(
    count: int, *, factors: dict[int, float] | None = None, rows: int = 8
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Batches of a classifier of 16 features into 8 classes, with a factor for the loss: 1, or what
    `factors` gives for the number of a batch.
    """
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(rows, 16, generator=generator),
            torch.randint(0, 8, (rows,), generator=generator),
            torch.tensor((factors or {}).get(i, 1.0)),
        )
        for i in range(count)
    ]


def net() -> nn.Sequential:
    """A classifier of 16 features into 8 classes."""
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))


def gan(zero_first: bool) -> Program:
    """A step of two networks; what the first loss is, is a part of the second."""

    def program(run: Run) -> Callable[..., Any]:
        g = run.model(nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16)))
        d = run.model(net())
        opt_g, opt_d = run.sgd(g.parameters()), run.sgd(d.parameters())

        of_g = run.loss_of(nn.Sequential(g, d))
        of_d = run.forward(
            lambda x, y, f: (cross_entropy(d(x), y) + d(g(x).detach()).square().mean()) * f
        )

        def step(x: torch.Tensor, y: torch.Tensor, fd: torch.Tensor, fg: torch.Tensor) -> Any:
            if zero_first:
                opt_d.zero_grad()
            loss_d = of_d(x, y, fd)
            loss_d.backward()
            opt_d.step()
            (opt_g if zero_first else opt_d).zero_grad()
            loss_g = of_g(x, y, fg) + loss_d.detach()
            loss_g.backward()
            opt_g.step()
            if not zero_first:
                opt_g.zero_grad()
                opt_d.zero_grad()
            return {"d": loss_d.detach(), "g": loss_g.detach()}

        return step

    return program


def gan_calls(count: int, bad: str | None = None) -> list[tuple[torch.Tensor, ...]]:
    """Batches with a factor for each loss: 1, but for the loss `bad` of the third."""
    return [
        (x, y, *(torch.tensor(1e30 if bad == which and i == 2 else 1.0) for which in "dg"))
        for i, (x, y, _) in enumerate(batches(count))
    ]
