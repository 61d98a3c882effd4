"""What a program of fuzz_lines.py must do once compiled, and whether it does.

The truth is the program in FP64 eager. How far off mixed precision may be is measured: the program
runs in FP64 with noise as large as the roundings of a program all in FP16, on every operand and on
each result of each operator, forward and backward, and what comes out is compared with the truth.
(Running it in FP16 outright would say less: half the operators have no such kernel on a CPU, an
explicit cast would hide, and one run is one draw.) Four times the largest of these errors is
allowed, plus a floor of a few roundings, norm-wise for each tensor by itself. The errors looked for
are factors: a gradient 1024 or 65536 times too small, doubled, or not there.

Where noise alone makes a value unrecognisable (`BLUNT`), the comparison says nothing and is counted
as such. A rounding may flip what is discontinuous (relu at 0, a mask, amax), now and then beyond
what the noise has shown: so a program is only wrong if it is so on three draws of its inputs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import fuzz_programs
import torch
from fuzz_programs import BATCH, Program, draw_inputs
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import mpcompile

UNIT = 2.0**-11  # FP16: half the distance between 1 and the next number
SUBNORMAL = 2.0**-25  # and below its normal numbers
FACTOR, FLOOR = 4.0, 4 * UNIT
BLUNT = 0.3  # of a value's norm: a tolerance beyond it would let a factor of 0.7 pass
FP16_ROOM = 2.0**12  # a sixteenth of FP16's range, for what sums add to what is seen in FP64
RUNS = 2


class Wrong(AssertionError):
    """What the compiled program did that the program does not."""


class Discarded(Exception):
    """The program itself is at fault, or torch."""


@dataclass(frozen=True)
class Setting:
    """How the program is compiled.

    Attributes:
        scale: the loss scale, or "dynamic"; lowered where FP16 would overflow.
        second: the batch of a second call, or None.
    """

    level: str = "O1"
    emit: str = "eager"
    scale: float | str = 1024.0
    second: int | None = None


@dataclass
class Verdict:
    """What came of one program.

    Attributes:
        fallbacks: the reason of each graph that was left in FP32.
        judged, blunt: how many floating-point values were compared, and how many of them in vain.
    """

    fallbacks: list[str] = field(default_factory=list)
    graphs: int = 0
    judged: int = 0
    blunt: int = 0


@dataclass
class Observed:
    """All that one run of a program shows to its caller, by name."""

    facts: dict[str, Any]
    values: dict[str, torch.Tensor | None]


# -- running --------------------------------------------------------------------------------------


class Noise(TorchDispatchMode):
    """Disturbs every new or written floating-point value by `amount` roundings, and watches sizes.

    Zeros stay: a mask or a padding is no less exact in FP16.
    """

    def __init__(self, amount: float, seed: int = 0, scale: float = 1.0) -> None:
        super().__init__()
        self.amount, self.scale = amount, scale
        self.generator = torch.Generator().manual_seed(seed)
        self.backward = False
        self.largest = {False: 0.0, True: 0.0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        schema = func._schema
        flat = results if isinstance(results, (tuple, list)) else (results,)
        for result, returned in zip(flat, schema.returns, strict=False):
            if returned.alias_info is None or returned.alias_info.is_write:
                for value in result if isinstance(result, (tuple, list)) else (result,):
                    self.disturb(value)
        return results

    def disturb(self, value: Any) -> None:
        if not isinstance(value, torch.Tensor) or value.dtype is not torch.float64:
            return
        if value.numel():
            largest = float(value.abs().amax())
            self.largest[self.backward] = max(self.largest[self.backward], largest)
        if self.amount and 0 not in value.stride():
            draw = torch.rand(value.shape, generator=self.generator, dtype=torch.float64) * 2 - 1
            least = SUBNORMAL / (self.scale if self.backward else 1.0)
            size = value.abs() * UNIT + least * (value != 0)
            value.add_(draw * size, alpha=self.amount)


class _Owner(nn.Module):
    """Hands a function the parameters and buffers that it takes last or first."""

    def __init__(self, function: Any, program: Program, leaves: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.names = [i.name for i in program.inputs]
        self.own = set()
        for item, value in zip(program.inputs, leaves, strict=True):
            if item.kind == "parameter":
                self.register_parameter(item.name, value)  # type: ignore[arg-type]
                self.own.add(item.name)
            elif item.kind == "buffer":
                self.register_buffer(item.name, value)
                self.own.add(item.name)

    def forward(self, **given: Any) -> Any:
        return self.function(*[getattr(self, n) if n in self.own else given[n] for n in self.names])


def _overlaps(x: torch.Tensor) -> bool:
    """Whether two elements have one place."""
    places = torch.arange(x.untyped_storage().nbytes() // x.element_size())
    return places.as_strided(x.size(), x.stride(), x.storage_offset()).unique().numel() < x.numel()


def _call(
    run: Callable[..., Any],
    program: Program,
    arguments: list[torch.Tensor],
    leaves: list[torch.Tensor],
    backward: Callable[[], Any] = lambda: None,
) -> Observed:
    """Call a program, then differentiate what it returns and what it wrote."""
    was_leaf = [a.is_leaf for a in arguments]
    output = run(*arguments)
    flat, structure = pytree.tree_flatten(output)
    tensors = [x for x in flat if isinstance(x, torch.Tensor)]
    facts: dict[str, Any] = {"structure": str(structure)}
    for k, x in enumerate(flat):
        facts[f"result {k}"] = (
            (x.dtype, tuple(x.shape), x.requires_grad) if isinstance(x, torch.Tensor) else x
        )
        if isinstance(x, torch.Tensor):
            facts[f"result {k} is an argument"] = [
                item.name
                for item, a in zip(program.inputs, arguments, strict=True)
                if a is x and item.name in program.returned
            ]
            facts[f"result {k} is the same as"] = [j for j, a in enumerate(flat) if a is x]
    for item, x in zip(program.inputs, arguments, strict=True):
        facts[f"{item.name} after"] = (x.dtype, tuple(x.shape), x.requires_grad)
    if program.doubled is not None and tensors:
        written = tensors[program.doubled % len(tensors)]
        if _overlaps(written):
            raise Discarded("the caller writes to elements that share memory, which is undefined")
        with torch.enable_grad():
            written.mul_(2)
    values: dict[str, torch.Tensor | None] = {}
    for k, x in enumerate(flat):
        if isinstance(x, torch.Tensor):
            values[f"result {k}"] = x.detach().clone()
    roots = [x for x in tensors if x.requires_grad]
    for item, x, leaf in zip(program.inputs, arguments, was_leaf, strict=True):
        values[f"{item.name} after"] = x.detach().clone()
        if x.requires_grad and not (leaf and item.trained):
            roots.append(x)
    loss = [_weighted(x, k) for k, x in enumerate(roots) if x.is_floating_point()]
    backward()
    if loss:
        torch.autograd.backward(loss)
    for item, leaf in zip(program.inputs, leaves, strict=True):
        if item.trained:
            values[f"gradient of {item.name}"] = leaf.grad
    return Observed(facts, values)


def _weighted(x: torch.Tensor, k: int) -> torch.Tensor:
    """A scalar whose gradient differs at every element."""
    weights = torch.linspace(-1.0, 1.5 + 0.3 * k, x.numel(), dtype=torch.float64).view(x.shape)
    return (x * weights.to(x.dtype)).sum() / max(x.numel(), 1)


def in_fp64(
    program: Program, seed: int, batch: int = BATCH, noise: Noise | None = None
) -> Observed:
    noise = noise or Noise(0.0)
    torch.set_default_dtype(torch.float64)
    try:
        function = program.function(wide=True)
        arguments, leaves = draw_inputs(program, seed, batch, torch.float64)
        for leaf in leaves:
            noise.disturb(leaf.detach())
        if any(i.kind == "inner" for i in program.inputs):
            arguments = [
                leaf * 1.0 if i.kind == "inner" else leaf
                for i, leaf in zip(program.inputs, leaves, strict=True)
            ]
        with noise:

            def begin() -> None:
                noise.backward = True

            return _call(function, program, arguments, leaves, begin)
    finally:
        torch.set_default_dtype(torch.float32)


def in_fp32(program: Program, seed: int, batch: int = BATCH) -> Observed:
    arguments, leaves = draw_inputs(program, seed, batch)
    return _call(program.function(), program, arguments, leaves)


class Compiled:
    """A program compiled once, for several calls. A module's parameters stay its own."""

    def __init__(self, program: Program, compiler: Callable[[Any], Any], seed: int) -> None:
        self.program = program
        function = program.function(compiled=True)
        self.owner: _Owner | None = None
        if program.module:
            leaves = draw_inputs(program, seed)[1]
            leaves = [
                nn.Parameter(x.detach()) if i.kind == "parameter" else x
                for i, x in zip(program.inputs, leaves, strict=True)
            ]
            self.owner = _Owner(function, program, leaves)
            self.run = compiler(self.owner)
        else:
            self.run = compiler(function)

    def __call__(self, seed: int, batch: int = BATCH) -> Observed:
        arguments, leaves = draw_inputs(self.program, seed, batch)
        if self.owner is None:
            return _call(self.run, self.program, arguments, leaves)
        with torch.no_grad():
            for k, item in enumerate(self.program.inputs):
                if item.name in self.owner.own:
                    held: torch.Tensor = getattr(self.owner, item.name)
                    if item.kind == "buffer" and held.requires_grad:
                        # Written with what has a history: the next call gets a fresh one.
                        held = arguments[k]
                        setattr(self.owner, item.name, held)
                    else:
                        held.copy_(arguments[k])
                    held.grad = None
                    arguments[k] = leaves[k] = held

        def run(*given: Any) -> Any:
            assert self.owner is not None
            names = [i.name for i in self.program.inputs]
            pairs = dict(zip(names, given, strict=True))
            return self.run(**{n: v for n, v in pairs.items() if n not in self.owner.own})

        return _call(run, self.program, arguments, leaves)


# -- judging --------------------------------------------------------------------------------------


@dataclass
class Reference:
    """What must come out, and how far off it may be.

    Attributes:
        forward, backward: the largest number met on the way.
    """

    plain: Observed
    exact: Observed
    noisy: list[Observed]
    forward: float
    backward: float


def reference(program: Program, seed: int, batch: int = BATCH) -> Reference:
    """Run the program without us; Discarded if it can't be, or makes no sense."""
    try:
        plain = in_fp32(program, seed, batch)
        watch = Noise(0.0)
        exact = in_fp64(program, seed, batch, watch)
    except Exception as error:
        raise Discarded(f"eager: {type(error).__name__}") from error
    forward, backward = watch.largest[False], watch.largest[True]
    if forward > FP16_ROOM or not math.isfinite(backward):
        raise Discarded("out of range")
    if structure(plain) != structure(exact):
        raise Discarded("FP64 differs in structure")
    for name, wanted in exact.values.items():
        mine = plain.values[name]
        if wanted is None or mine is None:
            if wanted is not mine:
                raise Discarded("FP64 differs in gradients")
            continue
        if not bool(torch.isfinite(wanted.double()).all()):
            raise Discarded("not finite")
    scale = 1024.0
    noisy = [in_fp64(program, seed, batch, Noise(2.0, k + 1, scale)) for k in range(RUNS)]
    return Reference(plain, exact, noisy, forward, backward)


def structure(observed: Observed) -> dict[str, Any]:
    """The facts, whatever the dtypes."""

    def wide(fact: Any) -> Any:
        if isinstance(fact, tuple) and fact and isinstance(fact[0], torch.dtype):
            return (fact[0].is_floating_point, *fact[1:])
        return fact

    return {name: wide(fact) for name, fact in observed.facts.items() if "same as" not in name}


def compare(ours: Observed, wanted: Reference, verdict: Verdict) -> None:
    """Raise Wrong at the first difference."""
    for name, fact in wanted.plain.facts.items():
        if ours.facts.get(name) != fact:
            raise Wrong(f"{name}: {ours.facts.get(name)} instead of {fact}")
    for name, exact in wanted.exact.values.items():
        mine = ours.values[name]
        if exact is None and mine is not None and not mine.any():
            continue  # AOTAutograd gives zeros where no gradient comes by
        if (mine is None) != (exact is None):
            raise Wrong(f"{name}: {'missing' if mine is None else 'there, but should not be'}")
        if mine is None or exact is None:
            continue
        mine, exact = mine.double(), exact.double()
        norm = float(exact.norm())
        noise = max(_distance(n.values[name], exact) for n in wanted.noisy)
        tolerance = FACTOR * noise + FLOOR * norm
        verdict.judged += 1
        if tolerance > BLUNT * norm and norm:
            verdict.blunt += 1
        error = float((mine - exact).norm())
        if not error <= tolerance:
            ratio = float((mine * exact).sum()) / norm**2 if norm else math.inf
            raise Wrong(
                f"{name}: off by {error:.3g}, {error / norm if norm else math.inf:.3g} of its norm;"
                f" allowed {tolerance:.3g} (noise {noise:.3g}); about {ratio:.6g} times the truth\n"
                f"got {mine.flatten()[:8].tolist()}\nnot {exact.flatten()[:8].tolist()}"
            )


def _distance(value: torch.Tensor | None, exact: torch.Tensor) -> float:
    return float((value.double() - exact).norm()) if value is not None else math.inf


def judge(program: Program, setting: Setting) -> Verdict:
    """Compile a program and compare everything; raises Wrong, or Discarded."""
    try:
        return attempt(program, setting, 0)
    except Discarded:
        raise
    except Exception as error:
        failure = error
    _check_torch(program, setting)
    for seed in (1, 2):
        try:
            attempt(program, setting, seed)
        except Discarded:
            continue
        except Exception:
            continue
        if isinstance(failure, Wrong):
            raise Discarded("a flip: right on other inputs")
    if isinstance(failure, Wrong):
        raise failure
    raise Wrong(f"{type(failure).__name__}: {failure}"[:1500]) from failure


def attempt(program: Program, setting: Setting, seed: int = 0) -> Verdict:
    """One draw of the inputs, compiled from nothing; raises whatever goes wrong."""
    wanted = [(BATCH, reference(program, seed))]
    if setting.second is not None:
        # Sizes may be written down in the program: then there is no second call.
        with contextlib.suppress(Discarded):
            wanted.append((setting.second, reference(program, seed + 10, setting.second)))
    largest = max(w.backward for _, w in wanted)
    # What one would get from a scale that backs off.
    scale = setting.scale
    if scale == "dynamic" and largest * 65536 > FP16_ROOM:
        scale = 1024.0
    while isinstance(scale, float) and largest * scale > FP16_ROOM and scale > 1:
        scale /= 2
    if isinstance(scale, float) and scale <= 1:
        raise Discarded("gradients out of range")
    verdict = Verdict()

    def compiler(function: Any) -> Any:
        return mpcompile.mpcompile(
            function,
            dtype=torch.float16,
            level=setting.level,
            emit=setting.emit,
            loss_scale=scale,
        )

    torch._dynamo.reset()
    with _warnings(verdict):
        compiled = Compiled(program, compiler, seed)
        for k, (batch, expected) in enumerate(wanted):
            compare(compiled(seed + 10 * k, batch), expected, verdict)
        verdict.graphs = len(mpcompile.compiled_plans(compiled.run))
    return verdict


def _check_torch(program: Program, setting: Setting) -> None:
    """Discarded if torch.compile by itself refuses the program or gets it wrong."""
    backend = setting.emit
    torch._dynamo.reset()
    try:
        with _warnings(Verdict()):
            compiled = Compiled(program, lambda f: _plainly(f, backend), 0)
            compare(compiled(0), reference(program, 0), Verdict())
            if setting.second is not None:
                with contextlib.suppress(Discarded):
                    expected = reference(program, 10, setting.second)
                    compare(compiled(10, setting.second), expected, Verdict())
    except Discarded:
        raise
    except Exception as error:
        raise Discarded(f"torch.compile, too: {type(error).__name__}") from error
    finally:
        torch._dynamo.reset()


def _plainly(function: Any, backend: str) -> Any:
    return torch.compile(function, backend=backend)


@contextlib.contextmanager
def _warnings(verdict: Verdict) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        if issubclass(warning.category, mpcompile.MPCompileWarning):
            verdict.fallbacks.append(str(warning.message))


# -- making failures smaller ----------------------------------------------------------------------


def smaller(program: Program, setting: Setting) -> tuple[Program, Setting, str]:
    """The same failure with as few lines and as plain a setting as can be."""

    def fails(candidate: Program, how: Setting) -> str:
        try:
            judge(candidate, how)
        except Wrong as error:
            return str(error)
        except Exception:
            return ""
        return ""

    message = fails(program, setting)
    if not message:
        raise Discarded("it does not fail any more")
    progress = True
    while progress:
        progress = False
        for candidate in map(fuzz_programs.pruned, fuzz_programs.reductions(program)):
            if found := fails(candidate, setting):
                program, message, progress = candidate, found, True
                break
    for simpler in (
        dataclasses.replace(setting, second=None),
        dataclasses.replace(setting, second=None, scale=1024.0),
        dataclasses.replace(setting, second=None, scale=1024.0, level="O1"),
        dataclasses.replace(setting, second=None, scale=1024.0, level="O1", emit="eager"),
    ):
        if found := fails(program, simpler):
            setting, message = simpler, found
    return program, setting, message
