"""One operator of torch's op_db through the compiler, forward and backward.

The settings:

* `alone`: the operator by itself.
* `between`: each FP32 operand first passes through a LOW identity (`prelu` with slope 1), and so
  does each FP32 result. FOLLOW operators, which stay in FP32 by themselves, then run in the low
  dtype. The samples are rounded to FP16 first, for FP32 and FP64 as well.
* `inplace`: the same with the in-place variant, which writes an intermediate value.

The road is the user's: `torch.compile` with our backend, emit="eager", strict=True. Several samples
share one graph (their subgraphs touch nowhere), because Dynamo's cost is per graph; where anything
is wrong with a batch, its samples are run again one by one. Where Dynamo by itself can't make one
graph of a sample, the sample is run with graph breaks, as a user would get it, and counted apart.

Loss scaling is on, from 2**16 as ever. Incoming gradients are standard normal, so at that scale
FP16 overflows for many operators: as in a training loop the scale backs off (`settle`), and the
step is run again, until the gradients are finite wherever eager FP32's are.
"""

import contextlib
import dataclasses
import functools
import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from op_db_judge import SEED, TINY16, U16, Reference, Result, Status, Verdict, compare
from torch.nn import functional as F
from torch.testing._internal import common_methods_invocations as invocations
from torch.utils import _pytree as pytree

from mpcompile.compiler.backend import compile_graph
from mpcompile.errors import MPCompileWarning
from mpcompile.scaling.loss_scale import LossScale
from mpcompile.settings import Settings

BATCH = 16
WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


@dataclass(frozen=True)
class Case:
    """One operator in one setting at one level; `first`: only that many samples, 0 for all."""

    name: str
    setting: str = "alone"
    level: str = "O1"
    first: int = 0
    times: float = 1.0  # what the samples' FP32 numbers are multiplied by

    def __str__(self) -> str:
        times = "" if self.times == 1 else f"-{self.times:g}"
        return f"{self.name}-{self.setting}-{self.level}{times}"


def check(case: Case) -> list[Verdict]:
    """The verdict on each sample of a case, in op_db's order."""
    op = OPS[case.name]
    inplace = case.setting == "inplace"
    samples = samples_of(op, inplace=inplace, first=case.first, times=case.times)
    verdicts: list[Verdict] = []
    with _quiet():
        for start in range(0, len(samples), BATCH):
            verdicts += _check_batch(case, samples[start : start + BATCH])
    return [dataclasses.replace(v, index=i) for i, v in enumerate(verdicts)]


# -- operators and samples ------------------------------------------------------------------------


# op_db seeds some random operators inside the call, which Dynamo can't trace; we seed outside.
invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)


def _name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


OPS = {_name(op): op for op in invocations.op_db if torch.float32 in op.supported_dtypes("cpu")}

# What these return is whatever stood in memory: only its dtype and shape can be compared.
UNINITIALISED = {"new_empty", "new_empty_strided"}
UNINITIALISED |= {"empty", "empty_like", "empty_permuted", "empty_strided"}


@dataclass(frozen=True)
class Sample:
    """A call's arguments; `process` makes comparable what is unique only up to a phase."""

    input: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    process: Callable[[Any], Any]

    @property
    def call(self) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        return self.input, self.args, self.kwargs


def samples_of(op: Any, *, inplace: bool = False, first: int = 0, times: float = 1) -> list[Sample]:
    """The FP32 samples, the same in every run."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd)
        fitting = (s for s in made if not (inplace and s.broadcasts_input))
        found = list(itertools.islice(fitting, first or None))
    blank = op.name in UNINITIALISED
    return [
        Sample(*_times(s, times), torch.zeros_like if blank else s.output_process_fn_grad)
        for s in found
    ]


def _times(sample: Any, times: float) -> Any:
    def scaled(value: Any) -> Any:
        if times == 1 or not _is_float(value):
            return value
        return (value.detach() * times).requires_grad_(value.requires_grad)

    return pytree.tree_map(scaled, (sample.input, sample.args, sample.kwargs))


@dataclass(frozen=True)
class Twin:
    """How a sample is copied: wider, rounded to FP16, with its data moved by a rounding."""

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
    """Each element moved as far as rounding it to FP16 may move it, and up to twice as far."""
    if value.is_complex():
        return torch.view_as_complex(_nudge(torch.view_as_real(value), generator))
    step = torch.rand(value.shape, generator=generator) * 4 - 2
    moved = value + step * (U16 * value.abs() + TINY16)
    return torch.where(value.isfinite(), moved, value)


# -- programs -------------------------------------------------------------------------------------

Program = Callable[[Sequence[tuple[Any, ...]]], list[Any]]


def program_of(case: Case) -> Program:
    """What is compiled: the calls of a batch, one after the other."""
    op = OPS[case.name]
    call = op.inplace_variant if case.setting == "inplace" else op.op
    return alone(call) if case.setting == "alone" else between(call)


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
            if isinstance(result, (tuple, list)):  # a named tuple too
                result = list(result)
            results.append(_identity(result))
        return results

    return program


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


# -- one run --------------------------------------------------------------------------------------


def run(program: Program, batch: Sequence[Sample], draw: int | None = None) -> list[Result]:
    """Forward and backward of a batch; incoming gradients are drawn alike in every run."""
    torch.manual_seed(SEED)
    operands = [_tensors(s.call) for s in batch]
    outputs = program([s.call for s in batch])
    results = []
    heads: list[torch.Tensor] = []
    for sample, own, output in zip(batch, operands, outputs, strict=True):
        leaves = [_dense(v) for v in pytree.tree_leaves(_processed(sample, output))]
        heads += [v for v in leaves if isinstance(v, torch.Tensor) and v.requires_grad]
        results.append(Result([_frozen(v) for v in leaves], [], []))
        raw = _tensors(output)
        results[-1].tracked = [v.requires_grad for v in raw]
        results[-1].shared = {
            (i, j) for i, o in enumerate(raw) for j, x in enumerate(own) if _same_memory(o, x)
        }
    if heads:
        torch.autograd.backward(heads, _incoming(heads, draw))
    for result, own in zip(results, operands, strict=True):
        result.gradients = [_dense(x.grad) for x in own]
        result.operands = [_dense(_frozen(x)) for x in own]
    return results


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [v for v in pytree.tree_leaves(tree) if isinstance(v, torch.Tensor)]


def _processed(sample: Sample, output: Any) -> Any:
    tracked = any(v.requires_grad for v in _tensors(output))
    return sample.process(output) if tracked or sample.process is torch.zeros_like else output


def _dense(value: Any) -> Any:
    sparse = isinstance(value, torch.Tensor) and value.layout is not torch.strided
    return value.to_dense() if sparse else value


def _frozen(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


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
        if draw is not None:
            gradient = _nudge(gradient, nudges)
        made.append(gradient)
    return made


# -- through the compiler -------------------------------------------------------------------------


def _check_batch(case: Case, batch: list[Sample]) -> list[Verdict]:
    try:
        verdicts = _attempt(case, batch, fullgraph=True)
        if all(v.status.passes for v in verdicts):
            return verdicts
    except Exception:  # whatever it was, one of the samples alone will show it
        pass
    return [_check_one(case, sample) for sample in batch]


def _check_one(case: Case, sample: Sample) -> Verdict:
    try:
        _reference(case, [sample])
    except Exception as error:
        return Verdict(Status.SKIP, _summary(error))
    try:
        return _attempt(case, [sample], fullgraph=True)[0]
    except Exception as error:
        reason = _summary(error)
        if not _fails_without_us(case, sample):
            return Verdict(Status.CRASH, reason)
    try:
        (verdict,) = _attempt(case, [sample], fullgraph=False)
    except Exception as error:
        return Verdict(Status.CRASH, f"after a graph break: {_summary(error)}")
    return verdict if verdict.status is Status.WRONG else Verdict(Status.BREAK, reason)


def _fails_without_us(case: Case, sample: Sample) -> bool:
    """Whether Dynamo by itself can't make one graph of the program, or makes one that fails."""
    torch._dynamo.reset()
    try:
        run(torch.compile(program_of(case), backend="eager", fullgraph=True), [Twin()(sample)])
    except Exception:
        return True
    return False


def _attempt(case: Case, batch: list[Sample], *, fullgraph: bool) -> list[Verdict]:
    reference = _reference(case, batch)
    scale = LossScale.dynamic()
    plans: list[Any] = []
    options = {
        "level": case.level,
        "dtype": torch.float16,
        "emit": "eager",
        "strict": True,
        "loss_scale": scale,
    }
    backend = functools.partial(compile_graph, settings=Settings.parse(options), plans=plans)
    torch._dynamo.reset()
    compiled = torch.compile(program_of(case), backend=backend, fullgraph=fullgraph)
    twin = Twin(quantised=case.setting != "alone")
    while True:
        ours = run(compiled, [twin(s) for s in batch])
        if not _overflowed(ours, reference.narrow) or scale.value <= scale.min_scale:
            break
        scale.settle(True)
    low = any(node.precision == "LOW" for plan in plans for node in plan.nodes)
    return compare(ours, reference, low=low)


def _reference(case: Case, batch: list[Sample]) -> Reference:
    program = program_of(case)
    quantised = case.setting != "alone"

    def eager(wide: bool = False, draw: int | None = None) -> list[Result]:
        twin = Twin(wide=wide, quantised=quantised, draw=draw)
        return run(program, [twin(s) for s in batch], draw)

    return Reference(eager)


def _overflowed(ours: list[Result], theirs: list[Result]) -> bool:
    return any(
        a is not None and b is not None and bool((b.isfinite() & ~a.isfinite()).any())
        for mine, wanted in zip(ours, theirs, strict=True)
        for a, b in zip(mine.gradients, wanted.gradients, strict=True)
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The operators' own warnings are not ours to answer for; a fallback of ours is. That samples
    overflow, one after the other, is none.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", MPCompileWarning)
        warnings.filterwarnings("ignore", ".*optimizer steps in a row were skipped")
        yield


def _summary(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' / '.join(lines[:3])}"[:400]
