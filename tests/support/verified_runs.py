"""A program compiled by Inductor and verified: what verification says of it, and what is true.

Whether the values are right is judged here without anything of `mpcompile/verify`: against the
program in FP64, and against what `emit="eager"` gives, which is the same rewritten graph run
operator by operator. A value is wrong if it is more than three times as far from FP64 as eager's.
Where eager's error is small by luck, other inputs tell: those moved by a rounding, then others.
"""

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

import mpcompile
from mpcompile.errors import MPCompileWarning

TIMES, NUDGES, DRAWS = 3.0, 4, 3
WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}
SCALE = 256.0
"""Of FP16's loss: gradients come in of order one, and sums of thousands of them stay in range."""


@dataclass(frozen=True)
class Subject:
    """A program, and where its inputs come from.

    Attributes:
        name: of the operator, or the number of the program.
        program: takes what `draw` returns, in any dtypes.
        draw: the arguments, for the number of a draw: any tree; floating tensors are FP32 leaves.
        text: the program, for people.
    """

    name: str
    program: Callable[..., Any]
    draw: Callable[[int], Sequence[Any]]
    text: str = ""


@dataclass(frozen=True)
class How:
    """In which dtype and at which level a subject is compiled."""

    dtype: torch.dtype
    level: str

    def __str__(self) -> str:
        return f"{'BF16' if self.dtype is torch.bfloat16 else 'FP16'} {self.level}"


@dataclass
class Outcome:
    """What came of one subject.

    Attributes:
        subject, how: which.
        values: how many values verification found right.
        alarms: what it says was compiled wrongly, and the name of the cure.
        left: why graphs were not verified.
        unclear: how many values it says prove nothing, weren't reached in time, or are drawn.
        right_unverified: with an alarm: whether the same code is right as judged here.
        wrong: values further off than three times eager's rounding, with verification.
        worst: of the others, the largest error in units of eager's.
        random: the values are drawn at random: nothing is judged here.
        failed: the error of a compile, or of the program itself.
    """

    subject: str
    how: str
    values: int = 0
    alarms: list[tuple[str, str]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    unclear: int = 0
    right_unverified: bool | None = None
    wrong: list[str] = field(default_factory=list)
    worst: float = 0.0
    random: bool = False
    failed: str = ""

    @property
    def is_false_alarm(self) -> bool:
        """Whether verification says that code is wrong which is right."""
        return bool(self.alarms) and self.right_unverified is True

    def data(self) -> dict[str, Any]:
        """For a report."""
        return dataclasses.asdict(self)


def examine(subject: Subject, how: How) -> Outcome:
    """Compile a subject with verification, and judge both."""
    outcome = Outcome(subject.name, str(how))
    with _quiet() as caught:
        try:
            truth = _Truth(subject, how)
        except Exception as error:
            outcome.failed = f"eager: {_line(error)}"
            return outcome
        outcome.random = truth.is_random()
        torch._dynamo.reset()
        compiled = _compiled(subject, how, "inductor")
        try:
            results = [run(compiled, subject.draw(0), how) for _ in range(2)]
        except Exception as error:
            own = _fails_without_us(subject, how)
            outcome.failed = f"{'torch.compile, too: ' if own else ''}{_line(error)}"
            return outcome
        _read_verdicts(outcome, compiled)
        if not outcome.random:
            for values in results:
                outcome.wrong = outcome.wrong or _judged(outcome, truth, compiled, values)
        if outcome.alarms:
            said = [w for w in caught if "compiled wrongly" in str(w.message)]
            assert len(said) == 1, f"{len(said)} warnings"
            outcome.right_unverified = None if outcome.random else _is_right(subject, how, truth)
    return outcome


def _judged(outcome: Outcome, truth: "_Truth", run_: Any, values: list[Any]) -> list[str]:
    wrong = truth.wrong(0, values, outcome)
    for seed in range(1, DRAWS if wrong else 0):  # or it is no more than a flip
        again = truth.wrong(seed, run(run_, truth.subject.draw(seed), truth.how), None)
        wrong = [one for one in wrong if one.split(":")[0] in {w.split(":")[0] for w in again}]
    return wrong


def _is_right(subject: Subject, how: How, truth: "_Truth") -> bool:
    """Whether what Inductor makes by itself, without verification, is right here."""
    torch._dynamo.reset()
    plain = _compiled(subject, how, "inductor", verify=False)
    values = run(plain, subject.draw(0), how)
    return not _judged(Outcome("", ""), truth, plain, values)


def _read_verdicts(outcome: Outcome, compiled: Any) -> None:
    for plan in mpcompile.compiled_plans(compiled):
        for verdicts in plan.verification.found if plan.verification else ():
            for name, one in verdicts.known.items():
                outcome.values += one.values
                outcome.unclear += one.unproven + one.late + one.drawn
                if one.left is not None:
                    outcome.left.append(f"{name}: {one.left}")
                if one.wrong is not None:
                    outcome.alarms.append((one.wrong, one.cure or "none"))
            if missing := verdicts.expected - verdicts.known.keys():
                outcome.left.append(f"{', '.join(sorted(missing))}: not called")


def _compiled(subject: Subject, how: How, emit: str, **options: Any) -> Any:
    def program(*arguments: Any) -> Any:  # a function is compiled once
        return subject.program(*arguments)

    return mpcompile.mpcompile(
        program, dtype=how.dtype, level=how.level, emit=emit,
        loss_scale=SCALE if how.dtype is torch.float16 else None, **options,
    )  # fmt: skip


def _fails_without_us(subject: Subject, how: How) -> bool:
    torch._dynamo.reset()
    try:
        run(torch.compile(lambda *a: subject.program(*a)), subject.draw(0), how)
    except Exception:
        return True
    return False


def run(
    program: Callable[..., Any],
    arguments: Sequence[Any],
    how: How,
    *,
    wide: bool = False,
    nudge: int | None = None,
) -> list[torch.Tensor | None]:
    """What a program returns, and its gradients; everything else is drawn alike in each run.

    Args:
        wide: in FP64.
        nudge: move the inputs by up to a rounding, as the generator of that number says.
    """
    torch.manual_seed(0)
    moved = torch.Generator().manual_seed(nudge or 0)

    def leaf(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return WIDER.get(value, value) if wide else value
        if not isinstance(value, torch.Tensor):
            return value
        new = value.detach().clone()
        if value.dtype is torch.float32:
            new = new.to(how.dtype).float()
            if nudge is not None:
                by = torch.rand(value.shape, generator=moved) * 2 - 1
                new *= 1 + torch.finfo(how.dtype).eps * by
        new = new.to(WIDER.get(new.dtype, new.dtype)) if wide else new
        return new.requires_grad_(value.requires_grad)

    given = pytree.tree_map(leaf, tuple(arguments))
    returned = program(*given)
    results = [v for v in pytree.tree_leaves(returned) if isinstance(v, torch.Tensor)]
    heads = [v for v in results if v.requires_grad]
    if heads:
        torch.autograd.backward(heads, [_incoming(v, k, how) for k, v in enumerate(heads)])
    leaves = [v for v in pytree.tree_leaves(given) if isinstance(v, torch.Tensor)]
    found = [v.detach() for v in results] + [v.grad for v in leaves if v.requires_grad]
    return [v if v is None or v.layout is torch.strided else v.to_dense() for v in found]


def _incoming(head: torch.Tensor, number: int, how: How) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + number)
    dtype = torch.complex64 if head.is_complex() else torch.float32
    drawn = torch.randn(head.shape, generator=generator, dtype=dtype)
    if not head.is_complex():
        drawn = drawn.to(how.dtype)
    return drawn.to(head.dtype)


class _Truth:
    """A subject in FP64, and how far its rewritten graph is off that operator by operator."""

    def __init__(self, subject: Subject, how: How) -> None:
        self.subject, self.how = subject, how
        self._eager: Any = None
        self._known: dict[int, Any] = {}
        self.exact(0)

    def is_random(self) -> bool:
        """Whether it draws random numbers: another generator's state changes what comes out."""
        program, arguments = self.subject.program, self.subject.draw(0)

        def reseeded(*given: Any) -> Any:
            torch.manual_seed(12345)
            return program(*given)

        one, other = (run(f, arguments, self.how) for f in (program, reseeded))
        return any(
            a is not None and b is not None and not _same(a, b)
            for a, b in zip(one, other, strict=True)
        )

    def exact(self, seed: int) -> list[torch.Tensor | None]:
        if seed not in self._known:
            program, arguments = self.subject.program, self.subject.draw(seed)
            self._known[seed] = run(program, arguments, self.how, wide=True)
        return self._known[seed]

    def eager(self, seed: int, nudge: int | None) -> list[torch.Tensor | None]:
        if self._eager is None:
            self._eager = _compiled(self.subject, self.how, "eager")
        return run(self._eager, self.subject.draw(seed), self.how, nudge=nudge)

    def wrong(self, seed: int, values: list[Any], outcome: Outcome | None) -> list[str]:
        """Which values are wrong: `"2: 7.1 times eager's"`."""
        exact, runs = self.exact(seed), [self.eager(seed, None)]
        found = self._ratios(values, exact, runs)
        if any(ratio > TIMES for ratio in found.values()):
            runs += [self.eager(seed, k) for k in range(NUDGES)]
            found = self._ratios(values, exact, runs)
        right = [ratio for ratio in found.values() if ratio <= TIMES]
        if outcome is not None:
            outcome.worst = max([outcome.worst, *right])
        return [f"{k}: {ratio:.3g} times eager's" for k, ratio in found.items() if ratio > TIMES]

    def _ratios(self, values: list[Any], exact: list[Any], runs: list[Any]) -> dict[int, float]:
        found = {}
        for k, (value, meant, *others) in enumerate(zip(values, exact, *runs, strict=True)):
            if meant is None or value is None or others[0] is None:
                zero = value is None or not bool(value.any())  # compiled code may return zeros
                found[k] = 0.0 if zero and meant is None else 0.0 if meant is None else math.inf
            else:
                found[k] = ratio(value, meant, others, self.how.dtype)
        return found


def ratio(
    value: torch.Tensor, exact: torch.Tensor, eager: Sequence[torch.Tensor], low: torch.dtype
) -> float:
    """How far a value is off, in units of what the others are off, at most over its elements, rows
    and columns. A rounding of its dtype is free.
    """
    if not value.numel():
        return 0.0
    if not (value.is_floating_point() or value.is_complex()):
        off, *theirs = ((v != exact.to(v.dtype)).sum().item() for v in (value, *eager))
        free = math.ceil(4 * torch.finfo(low).eps * value.numel())
        return (off - free) / max(1, *theirs) if off > free else 0.0
    dtype = torch.float32 if value.is_complex() else value.dtype
    flat = [_rows(v) for v in (value, exact, *eager)]
    must = flat[1].to(dtype).isfinite() & flat[1].to(low).isfinite()
    holes, *allowed = (int((must & ~v.isfinite()).sum()) for v in (flat[0], *flat[2:]))
    if holes > TIMES * max(allowed):  # where FP16 overflows is a matter of the order of sums
        return math.inf
    for other in (flat[0], *flat[2:]):
        must &= other.isfinite()
    mine, meant, *others = (torch.where(must, v, 0.0) for v in flat)
    size = meant.square().mean().sqrt()
    free = torch.finfo(dtype).eps * (meant.abs() + (32 * size if dtype is torch.float32 else 0))
    off = _sizes((mine - meant).abs().sub(free).clamp_min(0), meant)
    theirs = [_sizes((v - meant).abs(), meant) for v in others]
    most = [max(column) for column in zip(*theirs, strict=True)]
    return max(0.0 if a == 0 else a / b if b else math.inf for a, b in zip(off, most, strict=True))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | (a != a) & (b != b)).all())


def _rows(value: torch.Tensor) -> torch.Tensor:
    value = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    return value.double().reshape(-1, value.shape[-1] if value.dim() else 1)


def _sizes(off: torch.Tensor, meant: torch.Tensor) -> list[float]:
    """The largest error; and of rows and of columns, relative to what stands there."""
    found = [off.max().item()]
    for dim in (0, 1):
        if off.shape[dim] >= 16:
            error, size = off.square().mean(dim), meant.square().mean(dim)
            found.append(torch.where(size > 0, error / size, 0.0).max().sqrt().item())
    return found


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' / '.join(lines[:2])}"[:300]


@contextlib.contextmanager
def _quiet() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", MPCompileWarning)
        yield caught
