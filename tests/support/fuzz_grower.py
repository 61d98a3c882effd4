"""How a random program grows, line by line.

Each line is run in eager FP32 as soon as it is drawn, on the values that the lines before it made,
so the next one can be chosen by the shapes, dtypes and memory that are really there; a line that
PyTorch refuses, whose result leaves a modest range, or after which nothing can be differentiated
any more, is taken back. What is left is valid by construction.

Every choice is made by one function, `choose(n) -> 0..n-1`. Hypothesis may answer, or a seed.
"""

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from fuzz_programs import Input, Line, Program, draw_inputs, names_in_scope, pruned

Choose = Callable[[int], int]
T = TypeVar("T")
HOLES = "n0"  # data of which some are NaN
LARGEST = 60.0  # in size; far from FP16's 65504 even after sums and products of the backward


class Unfit(Exception):
    """Nothing is there that this line could be about."""


@functools.lru_cache(maxsize=20_000)
def _code(text: str) -> Any:
    return compile(text, "<line>", "exec")


class Grower:
    """A program under construction, and the values that its lines have made so far."""

    def __init__(self, choose: Choose) -> None:
        self.choose = choose
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
        return self.pick(lambda t: is_float(t) and dims <= t.dim() <= at_most)

    def exactly(self, dims: int) -> str:
        return self.any(dims=dims, at_most=dims)

    def number(self) -> str:
        """A floating-point value of any dtype and rank."""
        return self.pick(lambda t: t.is_floating_point())

    def half(self) -> str:
        return self.pick(lambda t: t.dtype in (torch.float16, torch.float64))

    def last(self, size: int, *, dims: int = 2) -> str:
        return self.pick(lambda t: is_float(t) and t.dim() >= dims and t.shape[-1] == size)

    def shaped(self, *size: int) -> str:
        return self.pick(lambda t: is_float(t) and t.shape == size)

    def like(self, a: str) -> str:
        size = self.eval(a).shape
        return self.pick(lambda t: is_float(t) and t.shape == size)

    def broad(self, a: str) -> str:
        """What can be broadcast to `a`."""
        size = self.eval(a).shape
        return self.pick(lambda t: is_float(t) and _broadcasts(t.shape, size))

    def mask(self, a: str) -> str:
        size = self.eval(a).shape
        if self.choose(2):
            return self.pick(lambda t: t.dtype is torch.bool and _broadcasts(t.shape, size))
        return f"({self.broad(a)} > 0.1)"

    def right(self, a: str) -> str:
        """The right operand of a product with `a`."""
        value = self.eval(a)

        def fits(t: torch.Tensor) -> bool:
            if not is_float(t) or t.dim() < 2 or t.shape[-2] != value.shape[-1]:
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

    def of(self, *options: T) -> T:
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
        return not ((t.is_leaf and t.requires_grad) or overlaps(t) or 0 in t.stride())

    def eval(self, expression: str) -> torch.Tensor:
        value = self.values.get(expression)
        if value is None:
            with torch.no_grad():
                value = eval(expression, {**self.scope, **self.values})
            assert isinstance(value, torch.Tensor)
        return value

    # Growing.

    def grow(self, table: Mapping[str, "Maker"]) -> bool:
        """Add one line, or a few that belong together; False if it didn't work out."""
        op = list(table)[self.choose(len(table))]
        return self.add(op, table[op])

    def add(self, op: str, maker: "Maker") -> bool:
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

    def region(self, header: str, count: int, tables: Sequence[Mapping[str, "Maker"]]) -> None:
        """A `with` statement around a few lines."""
        before = len(self.lines)
        self._run("region", header)
        grown = 0
        for _ in range(count):
            grown += self.grow(tables[self.choose(len(tables))])
        if grown:
            self._run("region", "<end>")
        else:
            self._take_back(before)

    def _draw_inputs(self) -> list[Input]:
        choose = self.choose
        kinds = ("leaf", "inner", "plain")
        sizes = ((-1, 8), (-1, 8), (-1, 2, 4), (2, -1, 8))
        drawn = [Input("i0", "index", (-1,)), Input("m0", "mask", (-1, 8))]
        drawn += [Input(HOLES, "holes", (-1, 8))]
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
        self.modes: list[Any] = []
        self.depth = 0
        self.scope = names_in_scope(compiled=False)
        for name, value in zip(
            [i.name for i in self.inputs],
            draw_inputs(Program(tuple(self.inputs), ()), 0)[0],
            strict=True,
        ):
            self._bind(name, value)
        self.order.remove(HOLES)  # no line picks it but those that are about it

    def _take_back(self, count: int) -> None:
        """Undo lines: whatever they wrote can only be had again by starting over."""
        lines = self.lines[:count]
        self.lines = []
        self.leave(0)
        self._begin()
        try:
            for line in lines:
                self._run(line.op, line.text, line.wide, line.depth)
        except RuntimeError as error:  # rare: it ran once, and does not again
            raise Unfit(str(error)) from error

    def leave(self, depth: int) -> None:
        while len(self.modes) > depth:
            self.modes.pop().__exit__(None, None, None)
        self.depth = depth

    def _run(self, op: str, text: str, wide: str | None = None, depth: int | None = None) -> None:
        if depth is not None and depth < self.depth:
            self.leave(depth)
        if text == "<end>":
            self.leave(self.depth - 1)
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
        written = re.match(r"(?:F\.\w+\(|AddTo\.apply\()?([vxb]\d+)(?! = )", text)
        if written and written[1] in self.order:  # read it again, rather
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

    def _check(self) -> None:
        roots = []
        for name, value in self.values.items():
            if value.is_floating_point() and name != HOLES:
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
        self.leave(0)
        names = self._outputs()
        outputs = tuple(self._dressed(name) for name in names)
        module = bool(self.choose(2))
        doubled = None
        if self.choose(5) == 4:  # results that share memory may come back apart (README)
            doubled = self.choose(len(names))
            memory = [memory_of(self.values[n]) for n in [*names, *(i.name for i in self.inputs)]]
            if memory.count(memory[doubled]) > 1:
                doubled = None
        form, backwards = self.choose(7), self.of("one", "one", "one", "again", "each")
        lines = tuple(self.lines)
        return pruned(Program(tuple(self.inputs), lines, outputs, form, module, doubled, backwards))

    def _outputs(self) -> list[str]:
        inputs = {i.name for i in self.inputs}
        made = [n for n in reversed(self.order) if n not in inputs]
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
        form = self.choose(14)
        if form == 8 and value.dim():
            return f"{name}[0]"
        if form == 9 and value.is_floating_point():
            return f"{name}.mean()"
        if form == 10:
            return f"{name}.detach()"
        if form == 11 and value.is_floating_point():
            return f"{name} > 0.1"
        if form == 12 and value.dim():
            return f"{name}.argmax(-1)"
        if form == 13 and value.is_floating_point():
            return f"({name} * 4).round().long()"
        return name


Drawn = str | tuple[str, str] | list[Any]
Maker = Callable[[Grower], Drawn]


def is_float(t: torch.Tensor) -> bool:
    return t.dtype is torch.float32


def memory_of(t: torch.Tensor) -> int:
    return int(t.untyped_storage()._cdata)


def _broadcasts(size: Iterable[int], to: Iterable[int]) -> bool:
    size, to = tuple(size), tuple(to)
    if len(size) > len(to):
        return False
    return all(a in (1, b) for a, b in zip(reversed(size), reversed(to), strict=False))


def overlaps(value: torch.Tensor) -> bool:
    """Whether two elements share memory otherwise than by expansion (`unfold`)."""
    pairs = [(n, s) for n, s in zip(value.shape, value.stride(), strict=True) if n > 1 and s]
    reach = 1 + sum((n - 1) * s for n, s in pairs)
    count = 1
    for n, _ in pairs:
        count *= n
    return reach < count
