"""Training programs as data: lines of PyTorch, and the inputs to run them on.

`Program.source()` is the program as a user would have written it: what is compiled, and what a
failing example prints. Run in FP64, a few lines differ (`Line.wide`): a cast to another dtype is
then a plain copy, so that memory is shared, or not, as it is in FP32.
"""

import functools
import inspect
import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

BATCH = 4

# -- the user's own functions ---------------------------------------------------------------------


class Straight(torch.autograd.Function):
    """A backward that is not the derivative of the forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * 3


class Reverse(torch.autograd.Function):
    """Gradient reversal; its result is a view."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return -0.5 * grad


class Clip(torch.autograd.Function):
    """A backward that is not linear: what it gets must be true to size."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad.clamp(-0.01, 0.01)


class AddTo(torch.autograd.Function):
    """Writes its first operand."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        x.add_(y)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad, grad * 2


class Two(torch.autograd.Function):
    """Saved operands, a number, two results, one of which is not differentiable."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor, k: float) -> Any:
        ctx.save_for_backward(x, y)
        ctx.k = k
        positive = x > 0
        ctx.mark_non_differentiable(positive)
        return x * y * k, positive

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:  # type: ignore[override]
        x, y = ctx.saved_tensors
        return grad * y * ctx.k, grad * x * 2, None


FUNCTIONS = (Straight, Reverse, Clip, AddTo, Two)


def clipped(grad: torch.Tensor) -> torch.Tensor:
    """A hook on a value."""
    return grad.clamp(-0.01, 0.01)


def cond_in_eager(pred: Any, yes: Any, no: Any, operands: Sequence[Any]) -> Any:
    """What torch.cond means. By itself torch.cond compiles even in eager, which is slow."""
    return yes(*operands) if pred else no(*operands)


# -- programs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Input:
    """What the caller hands over.

    Attributes:
        kind: "leaf" (needs a gradient), "inner" (a result of the caller's; it may be written),
            "plain" (no gradient), "parameter", "buffer", "index", "mask", "holes" (no gradient,
            some elements are NaN).
        size: its shape; -1 stands for the batch.
    """

    name: str
    kind: str
    size: tuple[int, ...]

    def draw(self, generator: torch.Generator, batch: int) -> torch.Tensor:
        """An FP32 (or integer, or bool) tensor without history."""
        size = [batch if s == -1 else s for s in self.size]
        if self.kind == "index":
            return torch.randint(4, size, generator=generator)
        value = torch.randn(size, generator=generator, dtype=torch.float32)
        if self.kind == "mask":
            return value > 0
        if self.kind == "holes":
            return value.masked_fill(value > 0.7, torch.nan)
        return value * (0.4 if self.kind == "parameter" else 1.0)

    @property
    def trained(self) -> bool:
        return self.kind in ("leaf", "inner", "parameter")


@dataclass(frozen=True)
class Line:
    """One statement.

    Attributes:
        op: the row of the tables below that made it.
        wide: the statement for FP64.
        depth: of its indentation.
    """

    op: str
    text: str
    wide: str
    depth: int = 0


@dataclass(frozen=True)
class Program:
    """Lines, inputs and what is returned.

    Attributes:
        returned: the expressions that are returned; `form`: in what structure.
        module: whether the parameters and buffers belong to a module whose forward this is.
        doubled: the number of the result that the caller writes in place, or None.
        backwards: "one" of all results together; "again": two of it, on one graph; "each": one
            after the other of each result, on one graph.
    """

    inputs: tuple[Input, ...]
    lines: tuple[Line, ...]
    returned: tuple[str, ...] = ()
    form: int = 0
    module: bool = False
    doubled: int | None = None
    backwards: str = "one"

    @property
    def has_holes(self) -> bool:
        """Whether some of the data are NaN."""
        return any(item.kind == "holes" for item in self.inputs)

    def source(self, wide: bool = False) -> str:
        names = ", ".join(i.name for i in self.inputs)
        body = [
            "    " * (line.depth + 1) + (line.wide if wide else line.text) for line in self.lines
        ]
        return "\n".join([f"def f({names}):", *body, f"    return {self._results()}", ""])

    def _results(self) -> str:
        first, *rest = self.returned
        together = ", ".join(self.returned)
        if self.form == 0 and not rest:
            return first
        if self.form == 1:
            return f"[{together}]"
        if self.form == 2:
            return f"{{{', '.join(f'{k}: {name}' for k, name in enumerate(self.returned))}}}"
        if self.form == 3:
            return f"({first}, [{', '.join(rest)}], None, 3)"
        if self.form == 4:  # one of them twice
            return f'{{"a": {first}, "rest": ({", ".join([*rest, first])},)}}'
        return f"({together},)"

    def function(self, *, wide: bool = False, compiled: bool = False) -> Callable[..., Any]:
        """The program as a Python function that Dynamo can find the source of."""
        source = self.source(wide)
        name = f"<fuzz {hash(source)}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        scope = names_in_scope(compiled)
        exec(compile(source, name, "exec"), scope)
        return scope["f"]

    def ops(self) -> set[str]:
        return {line.op for line in self.lines}

    def __str__(self) -> str:
        inputs = [
            f"# {i.name}: {i.kind} {['B' if s == -1 else s for s in i.size]}" for i in self.inputs
        ]
        how = [f"# parameters and buffers are those of a module: {self.module}"]
        if self.backwards != "one":
            how.append(f"# backwards: {self.backwards}")
        if self.doubled is not None:
            how.append(f"# the caller doubles result {self.doubled} in place")
        text = self.source()
        used = [inspect.getsource(c) for c in FUNCTIONS if f"{c.__name__}.apply" in text]
        used += [inspect.getsource(clipped)] if "clipped" in text else []
        return "\n".join([*used, *inputs, *how, text])


def names_in_scope(compiled: bool) -> dict[str, Any]:
    return {
        "torch": torch,
        "F": F,
        "checkpoint": functools.partial(checkpoint, use_reentrant=False),
        "cond": torch.cond if compiled else cond_in_eager,
        "clipped": clipped,
        **{c.__name__: c for c in FUNCTIONS},
    }


def draw_inputs(
    program: Program, seed: int, batch: int = BATCH, dtype: torch.dtype = torch.float32
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(arguments, leaves): the leaves are what gradients are asked for, None where none."""
    generator = torch.Generator().manual_seed(seed)
    arguments, leaves = [], []
    for item in program.inputs:
        value = item.draw(generator, batch)
        if value.is_floating_point():
            value = value.to(dtype)
        if item.trained:
            value.requires_grad_()
        leaves.append(value)
        arguments.append(value * 1.0 if item.kind == "inner" else value)
    return arguments, leaves


def pruned(program: Program) -> Program:
    """Without the inputs that nothing mentions."""
    text = "\n".join(program.source().splitlines()[1:])
    used = tuple(
        i for i in program.inputs if any(f"{i.name}{end}" in text for end in ").,[ +*-/}]\n")
    )
    return replace(program, inputs=used)
