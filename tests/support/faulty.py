"""Modules with one fault each, planted at a line that a comment marks: `# <- square`.

Each maps (rows, 16) to (rows, 16) and goes wrong for inputs of ordinary size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from module_of import function_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from mpcompile.observe.fault import FaultKind

WIDTH = 16


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.gelu(self.fc1(self.norm(x)))
        return x + self.fc2(h)  # <- second linear


class Blocks(nn.Module):
    """Five residual blocks. `growth` times the weights of the second linear of block 3: its outputs
    pass 65504 from about 1e5 on, the weight itself from 65504 * sqrt(32) = 3.7e5 on.
    """

    def __init__(self, growth: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.norm = nn.LayerNorm(WIDTH)
        with torch.no_grad():
            self.blocks[3].fc2.weight.mul_(growth)  # type: ignore[union-attr, operator]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Mixing(nn.Module):
    """What has one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)


class Square(Mixing):
    """Values around 400, whose squares pass 65504."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        large = self.mix(x) * 1000
        power = large.square()  # <- square
        return F.linear(power, self.mix.weight) / 1e6


class Product(Square):
    """The same as a product, which mpcompile may compute in FP16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        large = self.mix(x) * 1000
        power = large * large  # <- product
        return F.linear(power, self.mix.weight) / 1e6


class Probability(nn.Module):
    """Probabilities of about 1e-9 pass a matrix product, which makes zeros of them in FP16."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mixing", torch.eye(WIDTH))
        self.register_buffer("slope", torch.linspace(0, 20, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        p = torch.softmax(x + self.slope, -1)  # e**-20 = 2e-9
        mixed = p @ self.mixing
        return mixed.log()  # <- log


class MaskedRow(nn.Module):
    """A row of a softmax that is masked out completely."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(WIDTH, WIDTH, dtype=torch.bool).triu(1)
        mask[0] = True
        scores = (x.T @ x).masked_fill(mask, -torch.inf)
        weights = torch.softmax(scores, -1)  # <- softmax
        return x @ weights


class Steep(Mixing):
    """atan(1e12 h): at h = 0 its slope is 1e12, which fits FP16 at no scale."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.mix.weight[0], self.mix.bias[0] = 0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.mix(x).float()
        return x + torch.atan(h * 1e12)  # <- slope


class Faint(nn.Module):
    """A result that hardly counts: its gradient is below 2**-24 / 65536 = 9e-13."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.side = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        side = self.side(x).float()
        return self.main(x) + side.square() * 1e-14  # <- faint


class LargeMean(nn.Module):
    """A batch norm over values of 3000 +- 1, where FP16 has steps of 2."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4)
        with torch.no_grad():
            self.conv.bias.fill_(3000.0)  # type: ignore[union-attr]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.conv(x.unsqueeze(1))
        return self.norm(h).mean(1)  # <- norm


class Power(Mixing):
    """A square, between two products."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.mix(x)
        return F.linear(h * h, self.mix.weight)  # <- power


class Twice(nn.Module):
    """One module used twice, which overflows the second time."""

    def __init__(self) -> None:
        super().__init__()
        self.power = Power()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        once = self.power(x)
        return self.power(once * 1000 / once.detach().std()) / 1e5  # <- second call


def tanh(ctx: Any, x: torch.Tensor) -> torch.Tensor:
    ctx.save_for_backward(x)
    return x.tanh()


def divide(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    slope = 1 - x.tanh().square()
    nothing = torch.zeros_like(x)
    return grad * slope / nothing.sqrt()


Tanh = function_of(tanh, divide)


class OwnBackward(Mixing):
    """An autograd.Function whose backward divides by zero."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.mix(x)
        return Tanh.apply(mixed)  # type: ignore[no-untyped-call,no-any-return]  # <- division


Loud = function_of(lambda ctx, x: x.sin(), lambda ctx, grad: grad * 1e14)


class LoudBackward(OwnBackward):
    """An autograd.Function whose backward makes gradients that fit FP32, and FP16 at no scale."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.mix(x)
        return Loud.apply(mixed)  # type: ignore[no-untyped-call,no-any-return]  # <- loud


class Host(nn.Module):
    """A faulty part between two linear layers.

    Args:
        part: the part.
        checkpointed: whether its values are computed again in the backward.
        broken: whether the graph breaks before and after it.
    """

    def __init__(self, part: nn.Module, *, checkpointed: bool = False, broken: bool = False):
        super().__init__()
        self.before, self.part, self.after = (
            nn.Linear(WIDTH, WIDTH), part, nn.Linear(WIDTH, WIDTH),
        )  # fmt: skip
        self.checkpointed, self.broken = checkpointed, broken

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        if self.broken:
            torch._dynamo.graph_break()
        x = checkpoint(self.part, x, use_reentrant=False) if self.checkpointed else self.part(x)
        if self.broken:
            torch._dynamo.graph_break()
        return self.after(x)


@dataclass(frozen=True)
class Planted:
    """A fault.

    Attributes:
        make: makes the part.
        kind: what it is to be called.
        at: the marker of its line.
        module: the module's path below the part.
        via: the marker of a line that must be among the frames, or "".
        cured: whether the pins cure it.
    """

    make: Callable[[], nn.Module]
    kind: FaultKind
    at: str
    module: str = ""
    via: str = ""
    cured: bool = True

    def host(self, **how: bool) -> Host:
        """The part in its host; the same numbers each time."""
        torch.manual_seed(0)
        return Host(self.make(), **how)

    @property
    def path(self) -> str:
        """The path of the module in its host."""
        return ".".join(filter(None, ("part", self.module)))


def line_of(marker: str) -> str:
    """`"faulty.py:40"`: where a comment marks the line."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"# <- {marker}")]
    return f"{Path(__file__).name}:{number}"


PLANTED = {
    "linear": Planted(
        lambda: Blocks(3e5), FaultKind.OVERFLOW, "second linear", "blocks.3.fc2",
    ),
    "weight": Planted(
        lambda: Blocks(1e6), FaultKind.OVERFLOW, "second linear", "blocks.3.fc2",
    ),
    "square": Planted(Square, FaultKind.OVERFLOW, "square"),
    "product": Planted(Product, FaultKind.OVERFLOW, "product"),
    "log": Planted(Probability, FaultKind.OVERFLOW, "log"),
    "softmax": Planted(MaskedRow, FaultKind.OWN, "softmax", cured=False),
    "slope": Planted(Steep, FaultKind.BACKWARD, "slope"),
    "faint": Planted(Faint, FaultKind.UNDERFLOW, "faint"),
    "norm": Planted(LargeMean, FaultKind.INACCURATE, "norm", "norm"),
    "twice": Planted(Twice, FaultKind.OVERFLOW, "power", "power", via="second call"),
    "division": Planted(OwnBackward, FaultKind.OWN, "division", cured=False),
    "loud": Planted(LoudBackward, FaultKind.BACKWARD, "loud"),
}  # fmt: skip
