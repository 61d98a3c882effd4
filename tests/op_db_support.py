"""One operator of torch's op_db through the compiler, forward and backward, judged against FP64.

What is run. `alone`: the operator by itself. `between`: each FP32 operand first passes through a LOW
identity (`prelu` with slope 1) and so does each FP32 result, so that FOLLOW operators, which stay in
FP32 by themselves, run in the low dtype too. `inplace`: the in-place variant on an intermediate value.
The road is the user's: torch.compile with our backend, emit="eager", strict=True. Several samples
share one graph (their subgraphs touch nowhere), because Dynamo's cost is per graph; when anything is
wrong with a batch, its samples are run again one by one.

What is compared: results, gradients of the inputs, and the inputs themselves afterwards (hidden
writes), with

* the same program in eager FP32: dtypes, shapes, which results need a gradient, which results share
  memory with an input, integers and booleans exactly; and first of all the bits. An operator that
  stays in FP32 alone is expected to be bit-for-bit what eager computes;
* the same program in FP64, within a tolerance.

The tolerance. In a graph without LOW nodes, FULL_FACTOR times eager FP32's own error against FP64,
plus as many units of FP32 roundoff of the tensor's largest entry. In a graph with LOW nodes: an algorithm
in FP16 with wider accumulation is as good as the data it was given, so its error is measured in
multiples of what rounding the data to FP16 does by itself. With u = 2**-11 the unit roundoff,
t = 2**-25 half of the smallest subnormal,

    noise(y) = max over 3 draws of max|y64(x + s(u|x| + t)) - y64(x)|,  s = +-1 drawn per element
    error(y) <= LOW_FACTOR * (noise(y) + u max|y64| + t)

x being all FP32 operands, and for gradients also the incoming gradients. Products that cancel, and
derivatives near a pole, so get the room that their conditioning asks for and no more.

The scale. Loss scaling is on, from 2**16 as ever; incoming gradients are standard normal, so FP16
overflows there for many operators. As a training loop does, we let the scale back off (`settle`) and
run again until the gradients are finite wherever eager FP32's are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from torch.testing._internal import common_methods_invocations as invocations
from torch.utils import _pytree as pytree

from mpcompile.backend import mpcompile_backend
from mpcompile.errors import MPCompileWarning
from mpcompile.loss_scale import LossScale

SEED = 1
BATCH = 16
DRAWS = 3
LOW_FACTOR, FULL_FACTOR = 8.0, 4.0
U16, TINY16, MAX16 = 2.0**-11, 2.0**-25, 65504.0
U32 = 2.0**-24

WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


class Status(enum.Enum):
    EXACT = "bit for bit eager FP32"
    FP32 = "within FP32 tolerance"
    FP16 = "within FP16 tolerance"
    BREAK = "Dynamo breaks the graph"
    SKIP = "eager FP32 refuses the sample"
    WRONG = "wrong"
    CRASH = "crash"


@dataclass(frozen=True)
class Verdict:
    status: Status
    detail: str = ""
    index: int = -1  # which sample
    ratio: float = 0.0  # error over tolerance


@dataclass(frozen=True)
class Sample:
    input: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    process: Callable[[Any], Any]  # makes what is unique only up to a phase comparable

    @property
    def call(self) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        return self.input, self.args, self.kwargs


def name_of(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def _call(op: Any, *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


# op_db seeds some random operators inside the call, which Dynamo can't trace; we seed outside.
invocations.wrapper_set_seed = _call

# What these return is whatever stood in memory: only its dtype and shape can be compared.
UNINITIALISED = frozenset(
    "empty empty_like empty_strided empty_permuted new_empty new_empty_strided".split()
)

OPS = {name_of(op): op for op in invocations.op_db if torch.float32 in op.supported_dtypes("cpu")}


# -- samples --------------------------------------------------------------------------------------


def samples_of(op: Any, *, inplace: bool = False) -> list[Sample]:
    """The FP32 samples, the same in every run."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = list(op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd))
    blank = op.name in UNINITIALISED
    return [
        Sample(
            s.input,
            tuple(s.args),
            s.kwargs,
            torch.zeros_like if blank else s.output_process_fn_grad,
        )
        for s in found
        if not (inplace and s.broadcasts_input)
    ]


@dataclass(frozen=True)
class Twin:
    """How a sample is copied: wider, rounded to FP16, or with its operands moved by a rounding."""

    wide: bool = False
    quantised: bool = False
    draw: int | None = None

    def __call__(self, sample: Sample) -> Sample:
        generator = torch.Generator().manual_seed(self.draw or 0)
        memo: dict[int, torch.Tensor] = {}

        def leaf(value: Any) -> Any:
            if isinstance(value, torch.dtype):
                return WIDER.get(value, value) if self.wide else value
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) not in memo:
                memo[id(value)] = self._tensor(value, generator)
            return memo[id(value)]

        return Sample(*pytree.tree_map(leaf, sample.call), sample.process)

    def _tensor(self, value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """A leaf of its own over memory of its own, laid out like the original."""
        old = value.detach()
        if old.layout is not torch.strided:
            return self._numbers(old, generator).requires_grad_(value.requires_grad)
        length = old.untyped_storage().nbytes() // old.itemsize
        memory = self._numbers(old.as_strided((length,), (1,), 0), generator)
        new = memory.as_strided(old.shape, old.stride(), old.storage_offset())
        return new.requires_grad_(value.requires_grad)

    def _numbers(self, old: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        new = old.to(WIDER.get(old.dtype, old.dtype) if self.wide else old.dtype, copy=True)
        if old.dtype is torch.float32 and old.layout is torch.strided:
            if self.quantised:
                new.copy_(old.half())
            if self.draw is not None:
                new.copy_(_nudge(new, generator))
        return new


def _nudge(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Each element moved up or down by what rounding it to FP16 may do."""
    sign = torch.randint(0, 2, value.shape, generator=generator) * 2 - 1
    moved = value + sign * (U16 * value.abs() + TINY16)
    return torch.where(value.isfinite(), moved, value)


# -- programs -------------------------------------------------------------------------------------

Program = Callable[[Sequence[tuple[Any, ...]]], list[Any]]


def _identity(value: Any) -> Any:
    """The same numbers through a LOW operator."""
    if _is_float(value):
        return F.prelu(value, torch.ones(1, dtype=value.dtype))
    if isinstance(value, (tuple, list)):
        return type(value)([_identity(v) for v in value])
    return value


def _is_float(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.dtype in (torch.float32, torch.float64)
        and value.layout is torch.strided
    )


def alone(call: Callable[..., Any]) -> Program:
    def program(batch: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [call(x, *args, **kwargs) for x, args, kwargs in batch]

    return program


def between(call: Callable[..., Any]) -> Program:
    def program(batch: Sequence[tuple[Any, ...]]) -> list[Any]:
        results = []
        for x, args, kwargs in batch:
            named = {k: _identity(v) for k, v in kwargs.items()}
            result = call(_identity(x), *[_identity(a) for a in args], **named)
            if isinstance(result, (tuple, list)):
                result = [_identity(r) for r in result]
            results.append(_identity(result) if isinstance(result, torch.Tensor) else result)
        return results

    return program


def inplace(call: Callable[..., Any]) -> Program:
    def program(batch: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [call(x.clone(), *args, **kwargs) for x, args, kwargs in batch]

    return program


PROGRAMS = {"alone": alone, "between": between, "inplace": inplace}


# -- one run --------------------------------------------------------------------------------------


@dataclass
class Result:
    """What one sample gave."""

    outputs: list[Any]
    gradients: list[torch.Tensor | None]
    operands: list[torch.Tensor]
    tracked: list[bool] = field(default_factory=list)
    shared: set[tuple[int, int]] = field(default_factory=set)


def run(program: Program, batch: Sequence[Sample], *, draw: int | None = None) -> list[Result]:
    """Forward and backward of a batch; incoming gradients are drawn alike in every run."""
    torch.manual_seed(SEED)
    operands = [_tensors(s.call) for s in batch]
    outputs = program([s.call for s in batch])
    results = []
    heads: list[torch.Tensor] = []
    for sample, own, output in zip(batch, operands, outputs, strict=True):
        processed = _processed(sample, output)
        leaves = [_dense(v) for v in pytree.tree_leaves(processed)]
        raw = _tensors(output)
        result = Result(leaves, [], own)
        result.tracked = [v.requires_grad for v in raw]
        result.shared = {
            (i, j) for i, o in enumerate(raw) for j, x in enumerate(own) if _same_memory(o, x)
        }
        results.append(result)
        heads += [v for v in leaves if isinstance(v, torch.Tensor) and v.requires_grad]
    if heads:
        torch.autograd.backward(heads, _incoming(heads, draw))
    for result in results:
        result.gradients = [_dense(x.grad) for x in result.operands]
        result.operands = [_dense(x.detach()) for x in result.operands]
        result.outputs = [v.detach() if isinstance(v, torch.Tensor) else v for v in result.outputs]
    return results


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [v for v in pytree.tree_leaves(tree) if isinstance(v, torch.Tensor)]


def _processed(sample: Sample, output: Any) -> Any:
    tracked = any(v.requires_grad for v in _tensors(output))
    return sample.process(output) if tracked or sample.process is torch.zeros_like else output


def _dense(value: Any) -> Any:
    sparse = isinstance(value, torch.Tensor) and value.layout is not torch.strided
    return value.to_dense() if sparse else value


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.layout is not torch.strided or b.layout is not torch.strided or not a.numel():
        return False
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _incoming(heads: Sequence[torch.Tensor], draw: int | None) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    nudges = torch.Generator().manual_seed(draw or 0)
    made = []
    for head in heads:
        dtype = torch.complex64 if head.is_complex() else torch.float32
        gradient = torch.randn(head.shape, generator=generator, dtype=dtype).to(head.dtype)
        if draw is not None and not head.is_complex():
            gradient = _nudge(gradient, nudges)
        made.append(gradient)
    return made


# -- the comparison -------------------------------------------------------------------------------


class Mismatch(Exception):
    """What differs, in words."""


class Reference:
    """Eager FP32 and FP64 of one batch; how much rounding its data moves it, when asked.

    FP64 draws other random numbers than FP32: for a random operator FP32 is the reference.
    """

    def __init__(self, program: Program, batch: Sequence[Sample], *, quantised: bool) -> None:
        self.program, self.batch, self.quantised = program, batch, quantised
        torch.manual_seed(SEED)
        before = torch.get_rng_state()
        self.narrow = run(program, [Twin(quantised=quantised)(s) for s in batch])
        self.random = not torch.equal(before, torch.get_rng_state())
        self._wide: list[Result] | None = None
        self._noise: list[list[Result]] | None = None

    @property
    def wide(self) -> list[Result]:
        if self._wide is None:
            self._wide = self._run(None)
        return self._wide

    @property
    def noise(self) -> list[list[Result]]:
        if self._noise is None:
            self._noise = [self._run(draw) for draw in range(1, DRAWS + 1)]
        return self._noise

    def _run(self, draw: int | None) -> list[Result]:
        twin = Twin(wide=not self.random, quantised=self.quantised, draw=draw)
        return run(self.program, [twin(s) for s in self.batch], draw=draw)


def compare(ours: list[Result], reference: Reference, *, low: bool) -> list[Verdict]:
    """The verdict on each sample of a batch that ran."""
    return [_compare(i, mine, reference, low) for i, mine in enumerate(ours)]


def _compare(i: int, mine: Result, reference: Reference, low: bool) -> Verdict:
    theirs = reference.narrow[i]
    if len(mine.outputs) != len(theirs.outputs):
        return Verdict(Status.WRONG, f"{len(mine.outputs)} results, not {len(theirs.outputs)}")
    if mine.tracked != theirs.tracked:
        return Verdict(Status.WRONG, f"needs a gradient: {mine.tracked}, not {theirs.tracked}")
    if not low and mine.shared != theirs.shared:
        return Verdict(Status.WRONG, f"shares memory: {mine.shared}, not {theirs.shared}")
    worst = Verdict(Status.EXACT)
    order = [Status.EXACT, Status.FP32, Status.FP16]
    for part in ("outputs", "gradients", "operands"):
        for k, (a, b) in enumerate(zip(getattr(mine, part), getattr(theirs, part), strict=True)):
            try:
                status, ratio = _judge(a, b, reference, (i, part, k), low)
            except Mismatch as error:
                return Verdict(Status.WRONG, f"{part}[{k}]: {error}")
            if order.index(status) > order.index(worst.status) or ratio > worst.ratio:
                status = max(status, worst.status, key=order.index)
                worst = Verdict(status, f"{part}[{k}]", ratio=max(ratio, worst.ratio))
    return worst


def _judge(
    mine: Any,
    theirs: Any,
    reference: Reference,
    where: tuple[int, str, int],
    low: bool,
) -> tuple[Status, float]:
    if (mine is None) != (theirs is None):
        raise Mismatch(f"{mine} instead of {theirs}")
    if not isinstance(theirs, torch.Tensor):
        if mine != theirs and not (mine != mine and theirs != theirs):
            raise Mismatch(f"{mine} instead of {theirs}")
        return Status.EXACT, 0.0
    for what in ("dtype", "shape"):
        if getattr(mine, what) != getattr(theirs, what):
            raise Mismatch(f"{what} {getattr(mine, what)} instead of {getattr(theirs, what)}")
    if _same_bits(mine, theirs):
        return Status.EXACT, 0.0
    if not (theirs.is_floating_point() or theirs.is_complex()):
        raise Mismatch(f"{int((mine != theirs).sum())} of {mine.numel()} entries differ")
    if reference.random and not low:
        raise Mismatch("random numbers differ from eager's under the same seed")
    i, part, k = where
    exact = getattr(reference.wide[i], part)[k]
    noise = [getattr(r[i], part)[k] for r in reference.noise] if low else []
    error, bad = _error(mine, exact, theirs, low)
    if bad:
        raise Mismatch(bad)
    biggest = _biggest(exact)
    narrow = _error(theirs, exact, theirs, False)[0]
    tolerance = FULL_FACTOR * (narrow + U32 * biggest)
    if error <= tolerance:
        return Status.FP32, error / tolerance if tolerance else 0.0
    if not low:
        raise Mismatch(f"error {error:.3g}, eager FP32's {narrow:.3g}, largest {biggest:.3g}")
    moved = max((_biggest(n - exact) for n in noise), default=0.0)
    tolerance = LOW_FACTOR * (moved + U16 * biggest + TINY16)
    if error > tolerance:
        raise Mismatch(
            f"error {error:.3g} above {tolerance:.3g} (noise {moved:.3g}, largest {biggest:.3g})"
        )
    return Status.FP16, error / tolerance


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype is torch.complex32:  # has no comparison
        a, b = a.to(torch.complex64), b.to(torch.complex64)
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    return bool(torch.isclose(a, b, rtol=0, atol=0, equal_nan=True).all())


def _biggest(value: torch.Tensor) -> float:
    value = value[value.isfinite()]
    return float(value.abs().max()) if value.numel() else 0.0


def _error(
    mine: torch.Tensor, exact: torch.Tensor, narrow: torch.Tensor, low: bool
) -> tuple[float, str]:
    """The largest error over finite entries; what is wrong with the others."""
    finite = exact.isfinite() & narrow.isfinite()
    if low:  # beyond FP16's range, infinity is the right answer
        finite &= exact.abs() <= MAX16
    lost = finite & ~mine.isfinite()
    if lost.any():
        worst = float(exact[lost].abs().min())
        return 0.0, f"{int(lost.sum())} entries not finite, e.g. {worst:.4g} in FP64"
    if not low and (mine.isfinite() & ~narrow.isfinite()).any():
        return 0.0, "finite where eager FP32 is not"
    return _biggest((mine.to(exact.dtype) - exact)[finite]), ""


# -- the whole of it ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One operator at one level in one setting."""

    name: str
    level: str = "O1"
    setting: str = "alone"
    low: torch.dtype = torch.float16
    only: tuple[int, ...] = ()  # sample numbers; empty for all

    def __str__(self) -> str:
        return f"{self.name}-{self.setting}-{self.level}"


def check(case: Case) -> list[Verdict]:
    """Verdicts on all samples of a case, in order."""
    op = OPS[case.name]
    call = op.inplace_variant if case.setting == "inplace" else op.op
    found = samples_of(op, inplace=case.setting == "inplace")
    picked = [(i, s) for i, s in enumerate(found) if not case.only or i in case.only]
    with _quiet():
        verdicts = []
        for start in range(0, len(picked), BATCH):
            part = picked[start : start + BATCH]
            results = _check_batch(case, call, [s for _, s in part])
            verdicts += [
                dataclasses.replace(v, index=i) for (i, _), v in zip(part, results, strict=True)
            ]
    return verdicts


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The operators' own warnings are not ours to answer for; a fallback of ours is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", MPCompileWarning)
        yield


def _check_batch(case: Case, call: Any, batch: list[Sample]) -> list[Verdict]:
    try:
        verdicts = _attempt(case, call, batch, fullgraph=True)
        if all(v.status in (Status.EXACT, Status.FP32, Status.FP16) for v in verdicts):
            return verdicts
    except Exception:  # whatever it was, one of the samples alone will show it
        if len(batch) == 1:
            return [_check_one(case, call, batch[0])]
    return [_check_one(case, call, sample) for sample in batch]


def _check_one(case: Case, call: Any, sample: Sample) -> Verdict:
    try:
        Reference(PROGRAMS[case.setting](call), [sample], quantised=case.setting == "between")
    except Exception as error:
        return Verdict(Status.SKIP, _first_line(error))
    try:
        return _attempt(case, call, [sample], fullgraph=True)[0]
    except Exception as error:
        reason = _first_line(error)
        if not _fails_without_us(PROGRAMS[case.setting](call), sample):
            return Verdict(Status.CRASH, reason)
    try:
        (verdict,) = _attempt(case, call, [sample], fullgraph=False)
    except Exception as error:
        return Verdict(Status.CRASH, f"after a graph break: {_first_line(error)}")
    if verdict.status is Status.WRONG:
        return verdict
    return Verdict(Status.BREAK, reason)


def _fails_without_us(program: Program, sample: Sample) -> bool:
    """Whether Dynamo by itself can't make one graph of the program, or makes one that fails."""
    torch._dynamo.reset()
    try:
        run(torch.compile(program, backend="eager", fullgraph=True), [Twin()(sample)])
    except Exception:
        return True
    return False


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' / '.join(lines[:3])}"[:400]


def _attempt(case: Case, call: Any, batch: list[Sample], *, fullgraph: bool) -> list[Verdict]:
    program = PROGRAMS[case.setting](call)
    quantised = case.setting == "between"
    reference = Reference(program, batch, quantised=quantised)
    scale = LossScale.dynamic()
    plans: list[Any] = []
    options = {
        "level": case.level,
        "dtype": case.low,
        "emit": "eager",
        "strict": True,
        "loss_scale": scale,
        "_listener": plans.append,
    }
    torch._dynamo.reset()
    compiled = torch.compile(
        program, backend=mpcompile_backend, options=options, fullgraph=fullgraph
    )
    while True:
        ours = run(compiled, [Twin(quantised=quantised)(s) for s in batch])
        if not _overflowed(ours, reference.narrow) or scale.value <= scale.min_scale:
            break
        scale.settle(True)
    low = any(n.precision == "LOW" for plan in plans for n in plan.nodes)
    return compare(ours, reference, low=low)


def _overflowed(ours: list[Result], theirs: list[Result]) -> bool:
    return any(
        a is not None and b is not None and bool((b.isfinite() & ~a.isfinite()).any())
        for mine, wanted in zip(ours, theirs, strict=True)
        for a, b in zip(mine.gradients, wanted.gradients, strict=True)
    )
