"""Random training programs, as data: a list of lines of PyTorch, and inputs to run them on.

A program grows line by line. Each line is run in eager FP32 as soon as it is drawn, on the values
that the lines before it made, so the next one can be chosen by the shapes, dtypes and memory that
are really there; a line that PyTorch refuses, whose result leaves a modest range, or after which
nothing can be differentiated any more, is taken back. What is left is valid by construction.

`Program.source()` is the program as a user would have written it: what is compiled, and what a
failing example prints. Run in FP64, a few lines differ (`Line.wide`): a cast to another dtype is
then a plain copy, so that memory is shared, or not, as it is in FP32.

Every choice is made by one function, `choose(n) -> 0..n-1`. Hypothesis may be behind it, and then
examples shrink, or a seed (`from_seed`). In doubt 0 is the simplest choice.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import linecache
import random
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

Choose = Callable[[int], int]
BATCH = 4

# What is known to go wrong at the moment, and is not drawn: strike out what has been mended.
KNOWN_BUGS = {
    "late": "a result or input made without a gradient, then written with values that have one",
    "overlap": "a result whose elements share memory (`unfold`)",
    "detached_leaf": "a leaf that is written through `detach()`: the compiled program crashes",
    "cond": "the result of torch.cond is written: taken for a write to its operands",
    "dirty": "an autograd.Function writes one operand: taken for a write to all of them",
}
LARGEST = 60.0  # in size; far from FP16's 65504 even after sums and products of the backward


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
            "plain" (no gradient), "parameter", "buffer", "index", "mask".
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
    """

    inputs: tuple[Input, ...]
    lines: tuple[Line, ...]
    returned: tuple[str, ...] = ()
    form: int = 0
    module: bool = False
    doubled: int | None = None

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
        found: Callable[..., Any] = scope["f"]
        return found

    def ops(self) -> set[str]:
        return {line.op for line in self.lines}

    def __str__(self) -> str:
        inputs = [
            f"# {i.name}: {i.kind} {['B' if s == -1 else s for s in i.size]}" for i in self.inputs
        ]
        how = [f"# parameters and buffers are those of a module: {self.module}"]
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


# -- generation -----------------------------------------------------------------------------------


class Unfit(Exception):  # noqa: N818
    """Nothing is there that this line could be about."""


@functools.lru_cache(maxsize=20_000)
def _code(text: str) -> Any:
    return compile(text, "<line>", "exec")


class Grower:
    """A program under construction, and the values that its lines have made so far."""

    def __init__(self, choose: Choose, known_bugs: Collection[str]) -> None:
        self.choose, self.avoided = choose, known_bugs
        self.lines: list[Line] = []
        self.depth, self.made = 0, 0
        self.inputs = self._draw_inputs()
        self._begin()

    # What a line is about. Each returns the name of a value, or an expression.

    def pick(self, fits: Callable[[torch.Tensor], bool]) -> str:
        """Often one of the last few; sometimes any."""
        found = [n for n in reversed(self.order) if self._usable(n) and fits(self.values[n])]
        if not found:
            raise Unfit
        return found[self.choose(min(len(found), 4) if self.choose(3) < 2 else len(found))]

    def any(self, *, dims: int = 1, at_most: int = 5) -> str:
        return self.pick(lambda t: _is_float(t) and dims <= t.dim() <= at_most)

    def exactly(self, dims: int) -> str:
        return self.any(dims=dims, at_most=dims)

    def number(self) -> str:
        """A floating-point value of any dtype and rank."""
        return self.pick(lambda t: t.is_floating_point())

    def half(self) -> str:
        return self.pick(lambda t: t.dtype in (torch.float16, torch.float64))

    def last(self, size: int, *, dims: int = 2) -> str:
        return self.pick(lambda t: _is_float(t) and t.dim() >= dims and t.shape[-1] == size)

    def shaped(self, *size: int) -> str:
        return self.pick(lambda t: _is_float(t) and t.shape == size)

    def like(self, a: str) -> str:
        size = self.eval(a).shape
        return self.pick(lambda t: _is_float(t) and t.shape == size)

    def broad(self, a: str) -> str:
        """What can be broadcast to `a`."""
        size = self.eval(a).shape
        return self.pick(lambda t: _is_float(t) and _broadcasts(t.shape, size))

    def mask(self, a: str) -> str:
        size = self.eval(a).shape
        if self.choose(2):
            return self.pick(lambda t: t.dtype is torch.bool and _broadcasts(t.shape, size))
        return f"({self.broad(a)} > 0.1)"

    def right(self, a: str) -> str:
        """The right operand of a product with `a`."""
        value = self.eval(a)

        def fits(t: torch.Tensor) -> bool:
            if not _is_float(t) or t.dim() < 2 or t.shape[-2] != value.shape[-1]:
                return False
            return t.dim() == 2 or t.shape[:-2] == value.shape[:-2]

        return self.pick(fits)

    def dim(self, a: str) -> int:
        dims = self.eval(a).dim()
        if not dims:
            raise Unfit
        return self.choose(2 * dims) - dims

    def at(self, a: str, dim: int, least: int = 1) -> int:
        size = self.eval(a).shape[dim]
        if size < least:
            raise Unfit
        return self.choose(size)

    def rows(self, a: str, dim: int, *, unique: bool = True) -> str:
        """An index tensor along a dimension, written down."""
        size = self.eval(a).shape[dim]
        if not size:
            raise Unfit
        count = 1 + self.choose(min(size, 3))
        left = list(range(size))
        picked = []
        for _ in range(count):
            k = self.choose(len(left))
            picked.append(left.pop(k) if unique else left[k])
        return f"torch.tensor({picked})"

    def of(self, *options: Any) -> Any:
        return options[self.choose(len(options))]

    def slice(self, a: str) -> str:
        """Part of a value, as a subscript: no copy."""
        value = self.eval(a)
        if not value.dim() or 0 in value.shape:
            raise Unfit
        subscripts = []
        for size in value.shape[: 1 + self.choose(value.dim())]:
            forms = [":", str(self.choose(size)), "-1", f":{(size + 1) // 2}"]
            if size > 1:
                forms += ["1:", "::2", f"{size // 2}:"]
            subscripts.append(forms[self.choose(len(forms))])
        if all(s == ":" for s in subscripts):
            subscripts[-1] = "0"
        subscripts = ["...", subscripts[0]] if self.choose(6) == 5 else subscripts
        return f"{a}[{', '.join(subscripts)}]"

    def target(self) -> str:
        """What may be written, that is, holds each element once."""
        return self.pick(lambda t: t.is_floating_point() and self.writable(t))

    def writable(self, t: torch.Tensor) -> bool:
        if (t.is_leaf and t.requires_grad) or _overlaps(t) or 0 in t.stride():
            return False
        return "cond" not in self.avoided or _memory(t) not in self.untouched

    def eval(self, expression: str) -> torch.Tensor:
        value = self.values.get(expression)
        if value is None:
            with torch.no_grad():
                value = eval(expression, {**self.scope, **self.values})
            assert isinstance(value, torch.Tensor)
        return value

    # Growing.

    def grow(self, table: Mapping[str, Maker]) -> bool:
        """Add one line, or a few that belong together; False if it didn't work out."""
        op = list(table)[self.choose(len(table))]
        return self.add(op, table[op])

    def add(self, op: str, maker: Maker) -> bool:
        before = len(self.lines)
        try:
            drawn = maker(self)
        except (Unfit, RuntimeError, IndexError, ValueError):
            return False
        try:
            for statement in [drawn] if isinstance(drawn, (str, tuple)) else drawn:
                self._run(op, *([statement] if isinstance(statement, str) else statement))
            self._check()
        except Exception:  # whatever PyTorch says to it
            self._take_back(before)
            return False
        return True

    def region(self, header: str, count: int) -> None:
        """A `with` statement around a few lines."""
        before = len(self.lines)
        self._run("region", header)
        grown = 0
        for _ in range(count):
            grown += self.grow(WRITES if self.choose(2) else EXPRESSIONS)
        if grown:
            self._run("region", "<end>")
        else:
            self._take_back(before)

    def _draw_inputs(self) -> list[Input]:
        choose = self.choose
        kinds = ("leaf", "inner", "plain")
        sizes = ((-1, 8), (-1, 8), (-1, 2, 4), (2, -1, 8))
        drawn = [Input("i0", "index", (-1,)), Input("m0", "mask", (-1, 8))]
        drawn += [Input("b0", "buffer", ((8,), (8, 8), (2, 4))[choose(3)])]
        drawn += [Input("w1", "parameter", (8,)), Input("w0", "parameter", (8, 8))]
        drawn += [
            Input(f"x{k}", kinds[choose(3)], sizes[choose(4)] if k else sizes[0])
            for k in reversed(range(1 + choose(3)))
        ]
        return drawn

    def _begin(self) -> None:
        self.values: dict[str, torch.Tensor] = {}
        self.order: list[str] = []
        self.plain: set[str] = set()  # made without a gradient
        self.modes: list[Any] = []
        self.untouched: set[int] = set()  # memory that nothing may write to
        self.depth = 0
        self.scope = names_in_scope(compiled=False)
        for name, value in zip(
            [i.name for i in self.inputs],
            draw_inputs(Program(tuple(self.inputs), ()), 0)[0],
            strict=True,
        ):
            self._bind(name, value)

    def _take_back(self, count: int) -> None:
        """Undo lines: whatever they wrote can only be had again by starting over."""
        lines = self.lines[:count]
        self.lines = []
        self._leave(0)
        self._begin()
        for line in lines:
            self._run(line.op, line.text, line.wide, line.depth)

    def _leave(self, depth: int) -> None:
        while len(self.modes) > depth:
            self.modes.pop().__exit__(None, None, None)
        self.depth = depth

    def _run(self, op: str, text: str, wide: str | None = None, depth: int | None = None) -> None:
        if depth is not None and depth < self.depth:
            self._leave(depth)
        if text == "<end>":
            self._leave(self.depth - 1)
            return
        self.lines.append(Line(op, text, text if wide is None else wide, self.depth))
        if text.startswith("with "):
            mode = {"no": torch.no_grad, "en": torch.enable_grad, "se": torch.enable_grad}
            entered = mode[text.removeprefix("with torch.")[:2]]()
            entered.__enter__()
            self.modes.append(entered)
            self.depth += 1
            return
        scope = {**self.scope, **self.values}
        exec(_code(text), scope)
        if op == "cond":
            self.untouched.add(_memory(self.values[self.order[-1]]))
        written = re.match(r"(?:F\.\w+\(|AddTo\.apply\(|v\d+ = )?([vxb]\d+)", text)
        if op in WRITES and written and written[1] in self.order:  # read it again, rather
            self.order.remove(written[1])
            self.order.append(written[1])
        for name, value in scope.items():
            if isinstance(value, torch.Tensor) and self.values.get(name) is not value:
                self._bind(name, value)

    def _bind(self, name: str, value: torch.Tensor) -> None:
        if name in self.order:
            self.order.remove(name)
        self.values[name] = value
        self.order.append(name)
        self.plain.discard(name)
        if not value.requires_grad:
            self.plain.add(name)

    def _check(self) -> None:
        roots = []
        for item in self.inputs:
            late = self.values[item.name].requires_grad and not item.trained
            if late and "late" in self.avoided:
                raise Unfit(item.name)
        for name, value in self.values.items():
            if value.is_floating_point():
                size = value.detach().abs().amax() if value.numel() else torch.zeros(())
                if not size <= LARGEST:  # NaN too
                    raise Unfit(name)
                if value.requires_grad and not value.is_leaf:
                    roots.append(value)
        if roots:
            leaves = [v for v in self.values.values() if v.requires_grad and v.is_leaf]
            with torch.enable_grad():
                total = sum(r.sum(dtype=torch.float32) for r in roots)
                assert isinstance(total, torch.Tensor)
                torch.autograd.grad(total, leaves, allow_unused=True, retain_graph=True)

    def _usable(self, name: str) -> bool:
        return self.values[name].numel() > 0

    def new(self, count: int = 1) -> str:
        names = [f"v{self.made + k}" for k in range(count)]
        self.made += count
        return ", ".join(names)

    # Finishing.

    def finish(self) -> Program:
        self._leave(0)
        names = self._outputs()
        outputs = tuple(self._dressed(name) for name in names)
        module = bool(self.choose(2))
        doubled = None
        if self.choose(5) == 4:  # results that share memory may come back apart (README)
            doubled = self.choose(len(names))
            memory = [_memory(self.values[n]) for n in [*names, *(i.name for i in self.inputs)]]
            if memory.count(memory[doubled]) > 1:
                doubled = None
        form = self.choose(7)
        return pruned(
            Program(tuple(self.inputs), tuple(self.lines), outputs, form, module, doubled)
        )

    def _outputs(self) -> list[str]:
        inputs = {i.name for i in self.inputs}

        def allowed(name: str) -> bool:
            value = self.values[name]
            late = value.requires_grad and name in self.plain
            if late and name not in inputs and "late" in self.avoided:
                return False
            return "overlap" not in self.avoided or not _overlaps(value)

        made = [n for n in reversed(self.order) if n not in inputs and allowed(n)]
        text = "\n".join(line.text.partition(" = ")[2] or line.text for line in self.lines)
        read = set(re.findall(r"\w+", text))
        made.sort(key=lambda n: (not self.values[n].requires_grad, n in read))
        if not made:
            raise Unfit
        wanted = [made[0]] + [made[self.choose(min(len(made), 5))] for _ in range(self.choose(4))]
        if self.choose(4) == 3:
            given = [n for n in self.order if n in inputs]
            wanted.append(given[self.choose(len(given))])
        return wanted

    def _dressed(self, name: str) -> str:
        """Mostly the value itself."""
        value = self.values[name]
        form = self.choose(12)
        if form == 8 and value.dim():
            return f"{name}[0]"
        if form == 9 and value.is_floating_point():
            return f"{name}.mean()"
        if form == 10:
            return f"{name}.detach()"
        if form == 11 and value.is_floating_point():
            return f"{name} > 0.1"
        return name


Drawn = str | tuple[str, str] | list[Any]
Maker = Callable[[Grower], Drawn]


def _is_float(t: torch.Tensor) -> bool:
    return t.dtype is torch.float32


def _memory(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata


def _broadcasts(size: Iterable[int], to: Iterable[int]) -> bool:
    size, to = tuple(size), tuple(to)
    if len(size) > len(to):
        return False
    return all(a in (1, b) for a, b in zip(reversed(size), reversed(to), strict=False))


def _overlaps(value: torch.Tensor) -> bool:
    """Whether two elements share memory otherwise than by expansion (`unfold`)."""
    pairs = [(n, s) for n, s in zip(value.shape, value.stride(), strict=True) if n > 1 and s]
    reach = 1 + sum((n - 1) * s for n, s in pairs)
    count = 1
    for n, _ in pairs:
        count *= n
    return reach < count


def pruned(program: Program) -> Program:
    """Without the inputs that nothing mentions."""
    text = "\n".join(program.source().splitlines()[1:])
    used = tuple(
        i for i in program.inputs if any(f"{i.name}{end}" in text for end in ").,[ +*-/}]\n")
    )
    return replace(program, inputs=used)


# -- lines ----------------------------------------------------------------------------------------

UNARY = {
    name: "torch.{}(%s)".replace("{}", name)
    for name in ("tanh", "sigmoid", "relu", "abs", "neg", "square", "sin", "cos", "erf", "exp",
                 "atan", "clone", "sinh", "expm1")
} | {
    name: "F.{}(%s)".replace("{}", name)
    for name in ("gelu", "silu", "softplus", "elu", "selu", "leaky_relu", "mish", "hardswish",
                 "logsigmoid", "relu6", "hardtanh", "softsign", "tanhshrink", "celu")
} | {
    "sqrt": "(%s.abs() + 0.5).sqrt()",
    "rsqrt": "torch.rsqrt(%s.square() + 0.5)",
    "log": "torch.log(%s.abs() + 0.5)",
    "log1p": "torch.log1p(%s.square())",
    "log2": "(%s * %s + 1).log2()",
    "reciprocal": "(%s.square() + 1).reciprocal()",
    "rdiv": "1 / (%s.abs() + 1)",
    "pow2": "%s ** 2",
    "pow3": "%s.pow(3)",
    "clamp": "%s.clamp(-1, 1)",
    "clamp_min": "%s.clamp(min=0.05)",
    "scaled": "%s * 0.5",
    "shifted": "%s + 1",
    "rsub": "1 - %s",
    "threshold": "F.threshold(%s, 0.1, 0.0)",
    "contiguous": "%s.contiguous()",
    "alias": "%s.view_as(%s)",
}  # fmt: skip


def _unary(template: str) -> Maker:
    def make(g: Grower) -> Drawn:
        a = g.any(dims=0)
        return f"{g.new()} = {template.replace('%s', a)}"

    return make


def _binary(template: str, second: Callable[[Grower, str], str] = Grower.broad) -> Maker:
    def make(g: Grower) -> Drawn:
        a = g.any()
        text = template.replace("{a}", a)
        for name in ("{b}", "{c}"):
            if name in text:
                text = text.replace(name, second(g, a))
        if "{m}" in text:
            text = text.replace("{m}", g.mask(a))
        return f"{g.new()} = {text}"

    return make


BINARY = {
    "add": "{a} + {b}",
    "sub": "{a} - {b}",
    "mul": "{a} * {b}",
    "div": "{a} / ({b}.abs() + 1)",
    "add_alpha": "torch.add({a}, {b}, alpha=0.5)",
    "maximum": "torch.maximum({a}, {b})",
    "minimum": "torch.minimum({a}, {b})",
    "addcmul": "torch.addcmul({a}, {b}, {c}, value=0.5)",
    "addcdiv": "torch.addcdiv({a}, {b}, {c}.abs() + 1)",
    "lerp": "torch.lerp({a}, {b}, 0.3)",
    "atan2": "torch.atan2({a}, {b}.abs() + 0.5)",
    "hypot": "torch.hypot({a}, {b} + 2)",
    "where": "torch.where({m}, {a}, {b})",
    "where_number": "torch.where({m}, {a}, 0.5)",
    "masked_fill": "{a}.masked_fill({m}, -0.5)",
    "times_mask": "{a} * {m}",
    "mse_loss": "F.mse_loss({a}, {b}.expand_as({a}))",
    "smooth_l1": "F.smooth_l1_loss({a}, {b}.expand_as({a}), reduction='none')",
    "bce_logits": "F.binary_cross_entropy_with_logits({a}, {b}.sigmoid().expand_as({a}))",
    "gt": "{a} > {b}",
    "le_logical": "({a} <= {b}) & {m}",
}

REDUCTIONS = {
    "sum": "{a}.sum({d}, keepdim={k})",
    "mean": "{a}.mean({d}, keepdim={k})",
    "amax": "{a}.amax({d}, keepdim={k})",
    "max": "{a}.max({d})[0]",
    "logsumexp": "{a}.logsumexp({d}, keepdim={k})",
    "var": "{a}.var({d}, keepdim={k}, unbiased=False)",
    "std": "({a} + {a}.cumsum({d})).std({d}, unbiased=False, keepdim={k})",
    "norm": "({a} + 1).norm(dim={d}, keepdim={k})",
    "vector_norm": "torch.linalg.vector_norm({a} + 2, dim={d})",
    "cumsum": "{a}.cumsum({d})",
    "softmax": "{a}.softmax({d})",
    "log_softmax": "F.log_softmax({a}, {d})",
    "normalize": "F.normalize({a} + 0.5, dim={d})",
    "sort": "{a}.sort({d})[0]",
    "argmax": "{a}.argmax({d})",
    "flip": "{a}.flip({d})",
    "roll": "{a}.roll(1, {d})",
    "softmax_half_loss": "{a}.softmax({d}).sum()",
}


def _reduction(template: str) -> Maker:
    def make(g: Grower) -> Drawn:
        a = g.any()
        keep = "True" if g.choose(2) else "False"
        text = template.replace("{a}", a).replace("{d}", str(g.dim(a))).replace("{k}", keep)
        return f"{g.new()} = {text}"

    return make


def _weight(g: Grower) -> str:
    return g.of("w0", "w0", "w0.t()") if g.choose(4) < 3 else g.shaped(8, 8)


def _new(*names: str) -> Callable[[Callable[[Grower], str]], Maker]:
    del names

    def around(make: Callable[[Grower], str]) -> Maker:
        return lambda g: f"{g.new()} = {make(g)}"

    return around


def _expr(make: Callable[[Grower], str]) -> Maker:
    def line(g: Grower) -> Drawn:
        text = make(g)
        return f"{g.new()} = {text}"

    return line


def _matmul(g: Grower) -> str:
    a = g.any(dims=2)
    return g.of("{a} @ {b}", "torch.matmul({a}, {b})").format(a=a, b=g.right(a))


def _addmm(g: Grower) -> str:
    a = g.last(8)
    if g.eval(a).dim() != 2:
        raise Unfit
    return f"torch.addmm({g.of('w1', 'b0' if g.eval('b0').shape[-1] == 8 else 'w1')}, {a}, w0)"


def _bmm(g: Grower) -> str:
    a = g.exactly(3)
    value = g.eval(a)
    b = g.pick(
        lambda t: _is_float(t) and t.dim() == 3 and t.shape[:2] == (value.shape[0], value.shape[2])
    )
    return g.of(f"torch.bmm({a}, {b})", f"torch.baddbmm({a}.sum(-1, keepdim=True), {a}, {b})")


def _gram(g: Grower) -> str:
    a = g.any(dims=2)
    return g.of(f"{a} @ {a}.mT", f"torch.einsum('...id,...jd->...ij', {a}, {a})")


def _einsum(g: Grower) -> str:
    a = g.last(8)
    return g.of(
        f"torch.einsum('...d,de->...e', {a}, {_weight(g)})",
        f"torch.einsum('...d,ed->...e', {a}, {_weight(g)})",
        f"torch.einsum('...d,d->...', {a}, w1)",
    )


def _conv1d(g: Grower) -> str:
    a = g.exactly(3)
    _, channels, length = g.eval(a).shape
    forms = [(o, channels, 64 // (o * channels)) for o in (16, 8, 4) if 64 % (o * channels) == 0]
    forms = [f for f in forms if 1 <= f[2] <= length]
    if not forms:
        raise Unfit
    weight = f"w0.view{forms[g.choose(len(forms))]}"
    return f"F.conv1d({a}, {weight}, padding={g.choose(2)})"


def _conv2d(g: Grower) -> str:
    a = g.exactly(4)
    _, channels, height, width = g.eval(a).shape
    if 16 % channels or height < 2 or width < 2:
        raise Unfit
    weight = f"w0.view({16 // channels}, {channels}, 2, 2)"
    return f"F.conv2d({a}, {weight}, padding={g.choose(2)})"


def _image(g: Grower) -> str:
    return f"{g.last(8)}.reshape(-1, 2, 2, 2)"


def _pool(g: Grower) -> str:
    a = g.exactly(4)
    return g.of(f"F.avg_pool2d({a}, 2)", f"F.max_pool2d({a}, 2)", f"F.interpolate({a}, size=(4, 4))")


def _sdpa(g: Grower) -> str:
    a = g.any(dims=3, at_most=4)
    extra = g.of("", ", is_causal=True", ", scale=0.5")
    return f"F.scaled_dot_product_attention({a}, {g.like(a)}, {g.like(a)}{extra})"


def _layer_norm(g: Grower) -> str:
    a = g.last(8, dims=1)
    return g.of(
        f"F.layer_norm({a}, (8,))",
        f"F.layer_norm({a}, (8,), w1, w0[0])",
        f"F.rms_norm({a}, (8,), w1)",
    )


def _group_norm(g: Grower) -> str:
    a = g.any(dims=3, at_most=4)
    if g.eval(a).shape[1] % 2:
        raise Unfit
    return f"F.group_norm({a}, 2)"


def _batch_norm(g: Grower) -> str:
    a = g.last(8, dims=2)
    if g.eval(a).dim() != 2:
        raise Unfit
    return f"F.batch_norm({a}, None, None, w1, None, training=True)"


def _embedding(g: Grower) -> str:
    table = g.pick(lambda t: _is_float(t) and t.dim() == 2 and t.shape[0] >= 4)
    return g.of(
        f"F.embedding(i0, {table})",
        f"{table}[i0]",
        f"{table}.index_select(0, i0)",
        f"torch.index_select({table}, 0, i0)",
    )


def _gather(g: Grower) -> str:
    a = g.any(dims=2)
    if g.eval(a).dim() != 2 or g.eval(a).shape[1] < 4:
        raise Unfit
    return g.of(
        f"{a}.gather(1, i0.unsqueeze(1)[:{g.eval(a).shape[0]}])",
        f"torch.take_along_dim({a}, {a}.argsort(-1), -1)",
    )


def _cross_entropy(g: Grower) -> str:
    a = g.pick(lambda t: _is_float(t) and t.dim() == 2 and len(t) == BATCH and t.shape[1] >= 4)
    return g.of(
        f"F.cross_entropy({a}, i0)",
        f"F.cross_entropy({a}, i0, reduction='none')",
        f"F.nll_loss({a}.log_softmax(-1), i0)",
    )


def _index(g: Grower) -> str:
    a = g.any()
    d = g.dim(a)
    return g.of(
        f"{a}.index_select({d}, {g.rows(a, d, unique=False)})",
        f"{a}[{g.rows(a, 0, unique=False)}]",
    )


def _cat(g: Grower) -> str:
    a = g.any()
    b = g.like(a)
    d = g.dim(a)
    return g.of(
        f"torch.cat([{a}, {b}], {d})",
        f"torch.stack([{a}, {b}], {d})",
        f"torch.cat([{a}, {b}.detach(), {a}], {d})",
        f"torch.stack([{a}, {b}]).sum(0)",
    )


def _scatter(g: Grower) -> str:
    """The functional forms of writes."""
    a = g.any()
    b = g.like(a)
    rows = g.rows(a, 0)
    return g.of(
        f"{a}.index_add(0, {rows}, {b}[{rows}])",
        f"{a}.index_copy(0, {rows}, {b}[{rows}])",
        f"{a}.slice_scatter({b}[:1], 0, 0, 1)",
        f"{a}.select_scatter({b}[0], 0, 0)",
        f"{a}.scatter_add(-1, {a}.argsort(-1), {b})",
        f"{a}.index_fill(0, {rows}, 0.5)",
    )


def _tril(g: Grower) -> str:
    return f"{g.any(dims=2)}.{g.of('tril', 'triu')}()"


def _pad(g: Grower) -> str:
    a = g.any()
    return g.of(f"F.pad({a}, (0, 1))", f"F.pad({a}, (-1, 0))", f"{a}.repeat_interleave(2, -1)")


# Views. Sizes are written so that another batch may come in, mostly.


def _view(g: Grower) -> str:
    a = g.any()
    value = g.eval(a)
    size = value.shape
    forms = [f"{a}.view(-1)", f"{a}.reshape(-1)", f"{a}.flatten()"]
    if size[-1] % 2 == 0:
        forms += [
            f"{a}.unflatten(-1, (2, -1))",
            f"{a}.reshape(*{a}.shape[:-1], 2, {size[-1] // 2})",
        ]
    if value.dim() == 2 and size[1] == 8:
        forms += [f"{a}.view(-1, 2, 4)", f"{a}.view({a}.shape[0], 4, 2)", f"{a}.view(2, -1, 8)"]
    if value.dim() > 2:
        forms += [f"{a}.flatten(1)", f"{a}.view({a}.size(0), -1)", f"{a}.reshape(-1, {size[-1]})"]
        forms += [f"{a}.flatten(0, 1)"]
    return forms[g.choose(len(forms))]


def _transpose(g: Grower) -> str:
    a = g.any(dims=2)
    dims = g.eval(a).dim()
    order = list(range(dims))
    order = order[::-1] if g.choose(2) else order[1:] + order[:1]
    return g.of(
        f"{a}.transpose({g.dim(a)}, {g.dim(a)})",
        f"{a}.mT",
        f"{a}.permute({', '.join(map(str, order))})",
        f"torch.movedim({a}, 0, -1)",
        f"{a}.t()" if dims == 2 else f"{a}.swapaxes(0, 1)",
    )


def _select(g: Grower) -> str:
    a = g.any()
    d = g.dim(a)
    k = g.at(a, d)
    return g.of(
        g.slice(a),
        f"{a}.select({d}, {k})",
        f"{a}.narrow({d}, {k}, 1)",
        f"{a}[..., {g.at(a, -1)}]",
        f"{a}[None]",
    )


def _squeeze(g: Grower) -> str:
    a = g.any()
    return g.of(f"{a}.unsqueeze({g.dim(a)})", f"{a}.squeeze()", f"{a}.squeeze({g.dim(a)})")


def _expand(g: Grower) -> str:
    a = g.any(at_most=3)
    dims = g.eval(a).dim()
    return g.of(
        f"{a}.expand(2, {', '.join(['-1'] * dims)})",
        f"{a}.broadcast_to(2, *{a}.shape)",
        f"{a}.repeat(2, {', '.join(['1'] * dims)})",
        f"{a}[:1].expand_as({a})",
    )


def _diagonal(g: Grower) -> str:
    a = g.any(dims=2)
    return g.of(f"{a}.diagonal()", f"{a}.diagonal(0, -2, -1)", f"torch.diag_embed({a})")


def _unfold(g: Grower) -> str:
    a = g.any()
    d = g.dim(a)
    g.at(a, d, 2)
    return f"{a}.unfold({d}, 2, {g.of(2, 1)})"


def _pieces(g: Grower) -> Drawn:
    a = g.any()
    d = g.dim(a)
    size = g.eval(a).shape[d]
    if size < 2 or size > 8:
        raise Unfit
    if g.choose(2) and size <= 4:
        return f"{g.new(size)} = {a}.unbind({d})"
    if size % 2:
        raise Unfit
    half = size // 2
    text = g.of(f"{a}.chunk(2, {d})", f"{a}.split({half}, {d})", f"torch.tensor_split({a}, 2, {d})")
    return f"{g.new(2)} = {text}"


# New tensors.


def _created(g: Grower) -> Drawn:
    a = g.any(at_most=3)
    size = ", ".join(map(str, g.eval(a).shape))
    shape = f"{a}.shape" if g.choose(2) else f"({size})" if "," in size else f"({size},)"
    text = g.of(
        f"torch.zeros({shape})",
        f"torch.zeros_like({a})",
        f"{a}.new_zeros({shape})",
        f"torch.ones_like({a})",
        f"torch.full({shape}, 0.5)",
        f"{a}.new_full({shape}, 0.5)",
        f"torch.full_like({a}, -0.5)",
        f"{a}.new_ones({shape})",
        f"torch.arange({a}.shape[-1], dtype=torch.get_default_dtype()) / 8",
        f"{a}.detach()",
        f"{a}.detach().clone()",
    )
    return f"{g.new()} = {text}"


def _filled(g: Grower) -> Drawn:
    """A new tensor, filled whole by differentiable values."""
    a = g.any(at_most=3)
    new = g.new()
    made = g.of(
        f"torch.empty_like({a})",
        f"torch.zeros_like({a})",
        f"{a}.new_empty({a}.shape)",
        f"torch.zeros({a}.shape)",
    )
    count = len(g.eval(a))
    fills = [[f"{new}.copy_({g.broad(a)})"], [f"{new}[:] = {g.broad(a)}"]]
    if count > 1:
        fills.append([f"{new}[:1] = {a}[1:2]", f"{new}[1:] = {a}[1:] * 0.5"])
        fills.append([f"{new}[:-1].copy_({a}[1:])", f"{new}[-1] = 0.5"])
    if count <= 4:
        fills.append([f"{new}[{k}] = {a}[{k}] * {k + 1}" for k in range(count)])
    lines = [f"{new} = {made}", *fills[g.choose(len(fills))]]
    if g.choose(4) == 3:  # a view taken before the write
        lines.insert(1, f"{g.new()} = {new}[0]")
    return lines


def _accumulated(g: Grower) -> Drawn:
    """A running state and a list of its values, as in a loop written by hand."""
    a = g.any(dims=2)
    count = g.eval(a).shape[0]
    if count > 4:
        raise Unfit
    state, out = g.new(), g.new()
    lines = [f"{state} = torch.zeros_like({a}[0])"]
    lines += [f"{state} = {state} * 0.5 + {a}[{k}]" for k in range(count)]
    return [*lines, f"{out} = torch.stack([{state}, {state} * 2])"]


# Casts.


def _cast(g: Grower) -> Drawn:
    a = g.number()
    value = g.eval(a)
    new = g.new()
    other = g.pick(lambda t: t.is_floating_point())
    target, text = g.of(
        (torch.float16, f"{a}.half()"),
        (torch.float32, f"{a}.float()"),
        (torch.float16, f"{a}.to(torch.float16)"),
        (torch.float64, f"{a}.double()"),
        (g.eval(other).dtype, f"{a}.to({other}.dtype)"),
        (g.eval(other).dtype, f"{a}.type_as({other})"),
        (torch.bfloat16, f"{a}.bfloat16().float()"),
    )
    if text.endswith(".bfloat16().float()"):
        raise Unfit
    same = value.dtype is target
    return (f"{new} = {text}", f"{new} = {a}.to({a}.dtype)" if same else f"{new} = {a}.clone()")


def _in_half(g: Grower) -> Drawn:
    """Arithmetic on values of another dtype than FP32, and back."""
    a = g.half()
    new = g.new()
    form = g.choose(4)
    if form == 0:
        return (f"{new} = {a}.float()", f"{new} = {a}.clone()")
    return f"{new} = " + g.of(f"{a} * 0.5", f"{a}.tanh()", f"{a} + {a}.sum()")


# Functions, regions, and what may be inside.


def _function(g: Grower) -> Drawn:
    a = g.any()
    form = g.choose(5)
    if form == 4:
        return f"{g.new(2)} = Two.apply({a}, {g.like(a)}, 0.5)"
    return f"{g.new()} = {('Straight', 'Reverse', 'Clip', 'Clip')[form]}.apply({a})"


BODIES = (
    "torch.tanh(p) * q",
    "p * 0.5 + q",
    "F.gelu(p) - q.sum()",
    "torch.sigmoid(p * q)",
    "(p + q).mul_(0.5)",
    "Clip.apply(p) + q * 0",
    "torch.softmax(p + q, -1)",
)


def _body(g: Grower, a: str) -> str:
    product = ["F.linear(p, w0) * q", "torch.relu(p @ w0) + q", "F.layer_norm(p @ w0, (8,)) * q"]
    bodies = [*BODIES, *(product * 2 if g.eval(a).shape[-1] == 8 else [])]
    return bodies[g.choose(len(bodies))]


def _checkpoint(g: Grower) -> str:
    a = g.any()
    return f"checkpoint(lambda p, q: {_body(g, a)}, {a}, {g.broad(a)})"


def _cond(g: Grower) -> str:
    a = g.any()
    b = g.like(a)
    pred = g.of(f"{a}.sum() > 0", f"{a}.detach().amax() > 1", "w1[0] > 0")
    bodies = [t for t in BODIES if "_(" not in t and "Clip" not in t]
    if g.eval(a).shape[-1] == 8:
        bodies += ["F.linear(p, w0) * q"]
    yes, no = (bodies[g.choose(len(bodies))] for _ in range(2))
    return f"cond({pred}, lambda p, q: {yes}, lambda p, q: {no}, ({a}, {b}))"


def _hook(g: Grower) -> Drawn:
    """On a value of its own: torch 2.13 may crash on one that was written without a gradient."""
    a = g.pick(lambda t: _is_float(t) and t.requires_grad)
    new = g.new()
    return [f"{new} = {a} * 0.5", f"{new}.register_hook(clipped)"]


EXPRESSIONS: dict[str, Maker] = {
    "linear": _expr(lambda g: f"F.linear({g.last(8, dims=1)}, {_weight(g)})"),
    "linear_bias": _expr(lambda g: f"F.linear({g.last(8, dims=1)}, {_weight(g)}, w1)"),
    "matmul": _expr(_matmul),
    "mm": _expr(lambda g: f"torch.mm({g.shaped(BATCH, 8)}, {_weight(g)})"),
    "mv": _expr(lambda g: f"torch.mv({_weight(g)}, {g.shaped(8)})"),
    "outer": _expr(lambda g: f"torch.outer({g.exactly(1)}, {g.exactly(1)})"),
    "addmm": _expr(_addmm),
    "bmm": _expr(_bmm),
    "gram": _expr(_gram),
    "einsum": _expr(_einsum),
    "conv1d": _expr(_conv1d),
    "image": _expr(_image),
    "conv2d": _expr(_conv2d),
    "pool": _expr(_pool),
    "sdpa": _expr(_sdpa),
    "layer_norm": _expr(_layer_norm),
    "group_norm": _expr(_group_norm),
    "batch_norm": _expr(_batch_norm),
    "embedding": _expr(_embedding),
    "gather": _expr(_gather),
    "cross_entropy": _expr(_cross_entropy),
    "index": _expr(_index),
    "cat": _expr(_cat),
    "scatter": _expr(_scatter),
    "tril": _expr(_tril),
    "pad": _expr(_pad),
    "view": _expr(_view),
    "transpose": _expr(_transpose),
    "select": _expr(_select),
    "squeeze": _expr(_squeeze),
    "expand": _expr(_expand),
    "diagonal": _expr(_diagonal),
    "unfold": _expr(_unfold),
    "pieces": _pieces,
    "created": _created,
    "filled": _filled,
    "accumulated": _accumulated,
    "cast": _cast,
    "in_half": _in_half,
    "function": _function,
    "checkpoint": _expr(_checkpoint),
    "cond": _expr(_cond),
    "hook": _hook,
    **{name: _unary(template) for name, template in UNARY.items()},
    **{name: _binary(template) for name, template in BINARY.items()},
    **{name: _reduction(template) for name, template in REDUCTIONS.items()},
}

# The kinds of lines, the likelier ones several times; a kind is drawn first, then a row.
PRODUCTS = {k: EXPRESSIONS[k] for k in (
    "linear", "linear_bias", "matmul", "mm", "addmm", "bmm", "gram", "einsum", "conv1d", "image",
    "conv2d", "sdpa", "mv", "outer")}  # fmt: skip
VIEWS = {k: EXPRESSIONS[k] for k in (
    "view", "transpose", "select", "squeeze", "expand", "diagonal", "unfold", "pieces")}  # fmt: skip
NEW = {k: EXPRESSIONS[k] for k in ("created", "filled", "cast", "in_half", "accumulated")}
SPECIAL = {k: EXPRESSIONS[k] for k in ("function", "checkpoint", "cond", "hook")}
OTHERS = {
    k: v
    for k, v in EXPRESSIONS.items()
    if not any(k in table for table in (PRODUCTS, VIEWS, NEW, SPECIAL))
}


# Writes.


def _write(template: str) -> Maker:
    """{t}: the target, sometimes part of it; {b}: broadcast to it; {m}: a mask; result: at times."""

    def make(g: Grower) -> Drawn:
        t = g.target()
        if g.choose(3) == 2:
            t = g.slice(t)
        text = template.replace("{t}", t)
        if "{b}" in text:
            text = text.replace("{b}", g.broad(t))
        if "{c}" in text:
            text = text.replace("{c}", g.broad(t))
        if "{m}" in text:
            text = text.replace("{m}", g.mask(t))
        if text.endswith(")") and "=" not in template and g.choose(5) == 4:
            return f"{g.new()} = {text}"
        return text

    return make


def _setitem(g: Grower) -> Drawn:
    t = g.slice(g.target())
    return g.of(f"{t} = {g.broad(t)}", f"{t} += {g.broad(t)}", f"{t} *= 0.5", f"{t} = 0.5")


def _set_masked(g: Grower) -> Drawn:
    t = g.target()
    mask = g.pick(lambda x: x.dtype is torch.bool and x.shape == g.eval(t).shape)
    return g.of(f"{t}[{mask}] = 0.5", f"{t}[{mask}] = {g.like(t)}[{mask}]")


def _indexed(g: Grower) -> Drawn:
    t = g.target()
    if not g.eval(t).dim():
        raise Unfit
    b = g.like(t)
    unique = g.rows(t, 0)
    rows = g.rows(t, 0, unique=False)
    d = g.dim(t)
    along = g.rows(t, d)
    return g.of(
        f"{t}.index_put_(({unique},), {b}[{unique}])",
        f"{t}.index_put_(({rows},), {b}[{rows}], accumulate=True)",
        f"{t}[{unique}] = {b}[{unique}]",
        f"{t}.index_add_({d}, {along}, {b}.index_select({d}, {along}))",
        f"{t}.index_copy_({d}, {along}, {b}.index_select({d}, {along}))",
        f"{t}.index_fill_({d}, {along}, 0.5)",
    )


def _scattered(g: Grower) -> Drawn:
    t = g.target()
    b = g.like(t)
    return g.of(
        f"{t}.scatter_(-1, {b}.argsort(-1), {b})",
        f"{t}.scatter_add_(-1, {b}.argsort(-1), {b})",
        f"{t}.scatter_(-1, {b}.argsort(-1)[..., :1], 0.5)",
        f"{t}.masked_scatter_({b} > 0.1, {b})",
    )


def _detached(g: Grower) -> Drawn:
    anything = "detached_leaf" not in g.avoided
    t = g.pick(lambda x: _is_float(x) and (anything or g.writable(x)))
    return g.of(f"{t}.detach().mul_(0.5)", f"{t}.detach()[0].zero_()", f"{t}.detach().tanh_()")


def _out(g: Grower) -> Drawn:
    t = g.target()
    a = g.like(t)
    forms = [
        f"torch.add({a}, {g.like(t)}, out={t})",
        f"torch.mul({a}, 0.5, out={t})",
        f"torch.tanh({a}, out={t})",
    ]
    if g.eval(t).dim() == 2 and g.eval(t).shape[1] == 8:
        forms.append(f"torch.mm({a}, w0, out={t})")
    return forms[g.choose(len(forms))]


def _products_written(g: Grower) -> Drawn:
    t = g.pick(lambda x: _is_float(x) and x.dim() == 2 and x.shape[1] == 8 and g.writable(x))
    a = g.like(t)
    return g.of(f"{t}.addmm_({a}, w0)", f"{t} += {a} @ w0", f"{t}.copy_({a} @ w0)")


def _resized(g: Grower) -> Drawn:
    t = g.pick(lambda x: _is_float(x) and x.dim() > 1 and g.writable(x))
    if t[0] in "xbw":
        raise Unfit
    return g.of(f"{t}.transpose_(0, 1)", f"{t}.unsqueeze_(0)", f"{t}.squeeze_()")


def _add_to(g: Grower) -> Drawn:
    t = g.target()
    a = g.broad(t)
    if "dirty" in g.avoided:
        a = f"({a} * 1)"
    text = f"AddTo.apply({t}, {a}.expand_as({t}))"
    return text if g.choose(2) else f"{g.new()} = {text}"


WRITES: dict[str, Maker] = {
    **{
        name: _write(template)
        for name, template in {
            "add_": "{t}.add_({b})",
            "sub_": "{t}.sub_({b}, alpha=0.5)",
            "mul_": "{t}.mul_({b})",
            "mul_number_": "{t}.mul_(0.5)",
            "div_": "{t}.div_({b}.abs() + 1)",
            "relu_": "{t}.relu_()",
            "F.relu_": "F.relu({t}, inplace=True)",
            "tanh_": "{t}.tanh_()",
            "sigmoid_": "{t}.sigmoid_()",
            "exp_": "{t}.exp_()",
            "neg_": "{t}.neg_()",
            "square_": "{t}.square_()",
            "clamp_": "{t}.clamp_(-1, 1)",
            "copy_": "{t}.copy_({b})",
            "fill_": "{t}.fill_(0.5)",
            "zero_": "{t}.zero_()",
            "masked_fill_": "{t}.masked_fill_({m}, 0.5)",
            "lerp_": "{t}.lerp_({b}.expand_as({t}), 0.3)",
            "addcmul_": "{t}.addcmul_({b}, {c}, value=0.5)",
            "iadd": "{t} += {b}",
            "imul": "{t} *= {b}",
            "cumsum_": "{t}.cumsum_(-1)",
            "leaky_relu_": "F.leaky_relu_({t})",
            "fill_value_": "{t}.fill_({b}.sum())",
        }.items()
    },
    "setitem": _setitem,
    "setitem_again": _setitem,
    "set_masked": _set_masked,
    "indexed": _indexed,
    "scattered": _scattered,
    "detached": _detached,
    "out": _out,
    "products_written": _products_written,
    "add_to": _add_to,
    "resized": _resized,
}

KINDS: tuple[Mapping[str, Maker], ...] = (
    OTHERS, PRODUCTS, VIEWS, WRITES, NEW, OTHERS, PRODUCTS, VIEWS, WRITES, SPECIAL, WRITES,
)  # fmt: skip
HEADERS = (
    "with torch.no_grad():",
    "with torch.no_grad():",
    "with torch.enable_grad():",
    "with torch.set_grad_enabled(True):",
)


def generate(
    choose: Choose, *, known_bugs: Collection[str] = tuple(KNOWN_BUGS), longest: int = 14
) -> Program:
    """A program; raises Unfit in the rare case that nothing came of it.

    Args:
        known_bugs: of `KNOWN_BUGS`, those that are avoided.
    """
    g = Grower(choose, known_bugs)
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("error")
        stack.callback(g._leave, 0)
        for _ in range(3 + choose(longest - 2)):
            form = choose(14)
            if form == 13:
                header = g.of(*HEADERS)
                g.region(header, 1 + choose(3))
            else:
                g.grow(KINDS[choose(len(KINDS))])
        return g.finish()


def from_seed(seed: int, **options: Any) -> Program:
    """The program of a number."""
    source = random.Random(seed)
    while True:
        with contextlib.suppress(Unfit):
            return generate(source.randrange, **options)


def operators() -> list[str]:
    """Every row of the tables."""
    return sorted({*EXPRESSIONS, *WRITES})


# -- making failures smaller ----------------------------------------------------------------------


def reductions(program: Program) -> Iterator[Program]:
    """Programs that are a little simpler; many don't run."""
    lines = program.lines
    for k in reversed(range(len(lines))):
        yield replace(program, lines=lines[:k] + lines[k + 1 :])
        if lines[k].text.startswith("with "):
            inside = len([*itertools.takewhile(lambda x: x.depth > lines[k].depth, lines[k + 1 :])])
            moved = [replace(x, depth=x.depth - 1) for x in lines[k + 1 : k + 1 + inside]]
            yield replace(program, lines=(*lines[:k], *moved, *lines[k + 1 + inside :]))
    for k in range(len(program.returned)):
        if len(program.returned) > 1:
            yield replace(program, returned=program.returned[:k] + program.returned[k + 1 :])
        bare = re.match(r"\w+", program.returned[k])
        if bare and bare[0] != program.returned[k]:
            changed = (*program.returned[:k], bare[0], *program.returned[k + 1 :])
            yield replace(program, returned=changed)
    for k in reversed(range(len(lines))):  # without a line, one of its operands for its result
        made, is_assignment, text = lines[k].text.partition(" = ")
        if is_assignment and made.isidentifier():
            for name in dict.fromkeys(re.findall(r"\b[vwxb]\d+\b", text)):
                if name == made:
                    continue
                rest = [_renamed(x, made, name) for x in lines[k + 1 :]]
                returned = tuple(re.sub(rf"\b{made}\b", name, x) for x in program.returned)
                yield replace(program, lines=(*lines[:k], *rest), returned=returned)
    if program.module:
        yield replace(program, module=False)
    if program.doubled is not None:
        yield replace(program, doubled=None)
    if program.form:
        yield replace(program, form=0)
    for k, item in enumerate(program.inputs):
        if item.kind != "leaf" and item.kind in ("inner", "buffer", "parameter"):
            simple = replace(item, kind="plain" if item.kind == "buffer" else "leaf")
            yield replace(
                program, inputs=(*program.inputs[:k], simple, *program.inputs[k + 1 :])
            )


def _renamed(line: Line, old: str, new: str) -> Line:
    text, wide = (re.sub(rf"\b{old}\b", new, x) for x in (line.text, line.wide))
    return replace(line, text=text, wide=wide)
