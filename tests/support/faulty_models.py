"""Models with one part that leaves FP16's range, and a training of them."""

import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from faulty import WIDTH, Host
from torch import nn
from torch.optim import Optimizer

from mpcompile import MPCompileWarning, MPOptimizer, mpcompile

CLASSES, BATCH = 4, 32
Make = Callable[[Iterator[nn.Parameter]], Optimizer]


class Activation(nn.Module):
    """What the layer reads is about 1e6."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = x * 1000 * 1000  # the fault
        return torch.tanh(self.layer(high) * 1e-6) + x


class Square(Activation):
    """The product of two values of about 1e3 is above 65504."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = x * 1000
        other = 1 - high
        square = high * other  # the fault
        return torch.tanh(self.layer(square) * 1e-6) + x


class Steep(Activation):
    """The gradient of what the layer makes is about 1e4 times the loss's, and 1e6 times scaled."""

    small = 1e-6

    def __init__(self) -> None:
        super().__init__()
        nn.init.constant_(self.layer.bias, 0)
        with torch.no_grad():
            self.layer.weight *= self.small

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.tanh(self.layer(x) * 1e6) + x  # the fault
        return y


class Steepest(Steep):
    """The gradient of what the layer makes fits FP16 at no scale."""

    small = 1e-12

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.layer(x) * 1e6
        y: torch.Tensor = torch.tanh(wide * 1e6) + x  # the fault
        return y


class Own(Activation):
    """The logarithm of a negative number is no number in FP32 either."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x) + torch.log(-1 - x.square())  # the fault
        return y


def net(part: type[Activation], **how: bool) -> Host:
    """A small classifier around such a part."""
    torch.manual_seed(0)
    made = Host(part(), **how)
    made.after = nn.Linear(WIDTH, CLASSES)
    return made


def line_of(part: type[Activation]) -> str:
    """The line of the fault, as plans write it."""
    lines, first = inspect.getsourcelines(part)
    (place,) = (i for i, text in enumerate(lines) if text.endswith("# the fault\n"))
    return f"faulty_models.py:{first + place}"


def sgd(parameters: Iterator[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


def adamw(parameters: Iterator[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)


@dataclass
class Training:
    """A training of one model.

    Attributes:
        call: what runs the model; default: the model itself.
        make: the optimizer of the parameters.
        generated: whether it becomes an `MPOptimizer`.
        sizes: of the batches, in turns.
        losses, warnings: of the steps so far.
    """

    model: nn.Module
    call: Callable[[torch.Tensor], torch.Tensor] | None = None
    make: Make = sgd
    generated: bool = False
    emit: str = "eager"
    sizes: tuple[int, ...] = (BATCH,)
    losses: list[float] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def run(self, steps: int, *, idle: int = 0) -> "Training":
        """Args:
        idle: how many of the first steps change nothing, as skipped ones do.
        """
        data = torch.Generator().manual_seed(1)
        xs = torch.randn(8 * BATCH, WIDTH, generator=data)
        ys = (xs @ torch.randn(WIDTH, CLASSES, generator=data)).argmax(1)
        optimizer = self.make(self.model.parameters())
        if self.generated:
            optimizer = MPOptimizer(optimizer, emit=self.emit)
        call = self.model if self.call is None else self.call
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(steps):
                start = step * BATCH % len(xs)
                batch = slice(start, start + self.sizes[step % len(self.sizes)])
                optimizer.zero_grad()
                loss = F.cross_entropy(call(xs[batch]), ys[batch])
                loss.backward()
                if step >= idle:
                    optimizer.step()
                self.losses.append(float(loss.detach()))
        ours = [w for w in caught if issubclass(w.category, MPCompileWarning)]
        self.warnings += [str(w.message) for w in ours]
        assert all(bool(p.isfinite().all()) for p in self.model.parameters())
        return self


def compiled(part: type[Activation], *, checkpointed: bool = False, **options: Any) -> Host:
    """Such a network in FP16, with a scale that never moves if no other is asked for."""
    asked: dict[str, Any] = {"dtype": torch.float16, "emit": "eager", "strict": True}
    return mpcompile(
        net(part, checkpointed=checkpointed), **{**asked, "loss_scale": 128.0, **options}
    )
