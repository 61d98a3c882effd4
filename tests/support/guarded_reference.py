"""What a guarded training loop does, written out in plain PyTorch: the machine's reference.

Mixed precision by hand: `emulated` runs a `Net` with FP16 casts and a loss scale at its edges, and
notes each gradient that leaves it and is not finite. So the reference knows of an overflow without
asking the guard. All else is bookkeeping over whole backward passes:

    backward      a scale's pass is bad if a gradient that left one of its graphs was not finite; a
                  parameter is tainted by a scale while a part of its gradient is from a bad pass
    step          MUST be skipped if a gradient is not finite, or is tainted by a scale
                  MAY be skipped, too, if there was a bad pass of one of its scales after this
                  optimizer last looked, and after the scale's last void (below)
    forward       voids what came before, if nobody looked at the passes before it and no parameter
                  of the scale has a gradient any more

A step that must be skipped and is not is a bug, as is one that is skipped and may not be. Between
the two is what is harmless, each seen in practice:

* `zero_grad(set_to_none=False)`: gradients of zero are gradients still, so a forward voids nothing.
* Someone else looked: of two optimizers over one model (or of the model and a second one), one
  stepped and both then dropped their gradients. The next forward has nothing to look at and voids
  nothing, and the other's next step is skipped.
* Gradients of one model were dropped, and the optimizer, which holds another's too, steps before
  the first has run again. (A plain optimizer looks at all of its scales; an MPOptimizer only at
  those of parameters that have a gradient.)
* A step, skipped or not, takes the taint off what it looked at. Who clips the gradients of a
  skipped step and keeps them keeps garbage, and the next step uses it.
* A parameter that two models share answers for both: a gradient that is not finite counts for both
  scales, whichever overflowed.

Out of reach are:

* A step ends the life of the forwards before it, skipped or not: it writes O2's copies again, and a
  backward that needs them is refused by autograd, as it is after a step that was done.
* Where the search for the first scale ends in vain, the gradient is that of its lowest scale.

An optimizer over parameters that no compiled model reads looks at its own gradients only.

The scale (`Scale`) moves as `LossScale` says: at the first step after a training forward, or at the
first overflow after it; and in the next forward where no step came between. An MPOptimizer that
skips its first step leaves state of zeros behind, which is no state.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 4


class Net(nn.Module):
    """Two layers, of which the first may be shared."""

    def __init__(self, trunk: nn.Linear | None = None) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH) if trunk is None else trunk
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.trunk(x)))


Note = Callable[[torch.Tensor], None]


class _Enter(torch.autograd.Function):
    """FP32 to FP16; backward, the gradient becomes true to size, and is shown to `note`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, used: torch.Tensor, note: Note) -> torch.Tensor:
        ctx.used, ctx.note = used, note
        return x.half()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        true = grads[0].float() / ctx.used
        ctx.note(true)
        return true, None, None


class _Leave(torch.autograd.Function):
    """FP16 to FP32; backward, the gradient is multiplied by the scale."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
        ctx.used = used
        return x.float()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return (grads[0] * ctx.used).half(), None


def emulated(
    net: Net, x: torch.Tensor, used: torch.Tensor, note: Callable[[Any, torch.Tensor], None]
) -> torch.Tensor:
    """The net as O1 and O2 compute it. `used`: the loss scale, read in the backward."""

    def enter(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor.half()
        return _Enter.apply(tensor, used, lambda grad: note(tensor, grad))

    x = enter(x)
    x = torch.relu(F.linear(x, enter(net.trunk.weight), enter(net.trunk.bias)))
    x = F.linear(x, enter(net.head.weight), enter(net.head.bias))
    return _Leave.apply(x, used)


@dataclass
class Numbers:
    """What moves of a loss scale."""

    value: float
    good: int = 0
    skipped: int = 0


@dataclass(eq=False)
class Scale:
    """One loss scale. Passes are counted, and a moment is the number of passes before it.

    Attributes:
        bad: when the last bad pass was.
        looked: when someone looked last; `void`: what came before it was thrown away.
        looks: when each optimizer looked last.
        forwards, moved_at, overflow_at: training forwards, and for which one the scale has moved,
            and has moved down.
        fitting: whether a backward may search for what fits, and so move the scale.
        optimized: whether an optimizer counts its good steps.
        open: whether its graphs hand gradients on to something in front of them.
        early: it moved down for gradients that are still being accumulated.
    """

    numbers: Numbers
    growth_interval: int
    min_scale: float
    max_scale: float
    fitting: bool = False
    passes: int = 0
    bad: int = 0
    looked: int = 0
    void: int = 0
    looks: dict[Any, int] = field(default_factory=dict)
    forwards: int = 0
    moved_at: int = 0
    overflow_at: int = -1
    optimized: bool = False
    open: bool = False
    early: bool = False

    def ran(self, bad: bool) -> None:
        self.passes += 1
        if bad:
            self.bad = self.passes

    def stale(self, optimizer: Any) -> bool:
        """Whether there is a bad pass that this optimizer, or the update by hand, has not seen."""
        return self.bad > max(self.looks.get(optimizer, 0), self.void)

    def forward(self, held: bool) -> None:
        """A training forward begins; held: there are gradients."""
        if self.passes > self.looked:
            bad = self.bad > self.looked
            self.looked = self.passes
            if not held:
                self.void = self.passes
            if (bad and (self.open or not held)) or not (self.optimized or held):
                self.early |= bad and held
                skipped = self.numbers.skipped
                self._move(bad)
                self.numbers.skipped = skipped
        self.forwards += 1

    def step(self, optimizer: Any, bad: bool) -> None:
        """A step is done, or left out."""
        self.looks[optimizer] = self.looked = self.passes
        self.optimized = True
        first = self.moved_at != self.forwards
        late = bad and self.overflow_at != self.forwards
        self.moved_at = self.forwards
        if bad:
            self.overflow_at = self.forwards
        if bad and self.early:
            first = late = self.early = False
        if first or late:
            self._move(bad)
        else:
            self.numbers.skipped += bad

    def _move(self, bad: bool) -> None:
        now = self.numbers
        good = 0 if bad else now.good + 1
        value = now.value
        if bad:
            value = max(value * 0.5, self.min_scale)
        elif good >= self.growth_interval:
            value, good = min(value * 2.0, self.max_scale), 0
        self.numbers = Numbers(value, good, now.skipped + bad)

    def copy_state(self, other: "Scale") -> None:
        """A fresh one that was given the other's state."""
        self.numbers, self.fitting = dataclasses.replace(other.numbers), other.fitting
