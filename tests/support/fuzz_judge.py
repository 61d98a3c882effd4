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

import contextlib
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from fuzz_programs import BATCH, Program
from fuzz_runs import UNIT, Compiled, Discarded, Noise, Observed, in_fp32, in_fp64

import mpcompile

FACTOR, FLOOR = 4.0, 4 * UNIT
BLUNT = 0.3  # of a value's norm: a tolerance beyond it would let a factor of 0.7 pass
FP16_ROOM = 2.0**12  # a sixteenth of FP16's range, for what sums add to what is seen in FP64
RUNS = 2


class Wrong(AssertionError):
    """What the compiled program did that the program does not."""


class Dead(Wrong):
    """A gradient is exactly zero where FP64's is not. That torch alone loses it excuses nothing."""


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


def _crashes(program: Program) -> bool:
    """Whether one of several views (of `chunk`, of `unbind`) is returned, and its detach() as well:
    AOTAutograd of torch 2.13 replays a view on the wrong base then, which may end the process.
    """
    several = {
        name
        for line in program.lines
        if len(names := line.text.partition(" = ")[0].split(", ")) > 1
        for name in names
    }
    return any(f"{name}.detach()" in program.returned for name in several & {*program.returned})


def reference(program: Program, seed: int, batch: int = BATCH) -> Reference:
    """Run the program without us; Discarded if it can't be, or makes no sense."""
    if _crashes(program):
        raise Discarded("AOTAutograd crashes, without us too")
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
        strict = name.startswith("gradient") or not program.has_holes
        if strict and not bool(torch.isfinite(wanted.double()).all()):
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
        norm = float(exact.nan_to_num(0.0).norm())
        distances = [_distance(n.values[name], exact) for n in wanted.noisy]
        noise = max(math.inf if math.isnan(d) else d for d in distances)
        tolerance = FACTOR * noise + FLOOR * norm
        verdict.judged += 1
        if tolerance > BLUNT * norm and norm:
            verdict.blunt += 1
        if name.startswith("gradient") and not bool(mine.any()) and noise < norm / 2:
            # FP16 underflow would show in the noise, which is as large as the smallest numbers.
            raise Dead(f"{name}: exactly zero; its norm is {norm:.3g} (noise {noise:.3g})")
        mine, exact = _both_finite(mine, exact)
        error = float((mine - exact).norm())
        if not error <= tolerance:
            ratio = float((mine * exact).sum()) / norm**2 if norm else math.inf
            raise Wrong(
                f"{name}: off by {error:.3g}, {error / norm if norm else math.inf:.3g} of its norm;"
                f" allowed {tolerance:.3g} (noise {noise:.3g}); about {ratio:.6g} times the truth\n"
                f"got {mine.flatten()[:8].tolist()}\nnot {exact.flatten()[:8].tolist()}"
            )


def _distance(value: torch.Tensor | None, exact: torch.Tensor) -> float:
    if value is None:
        return math.inf
    value, exact = _both_finite(value.double(), exact)
    return float((value - exact).norm())


def _both_finite(value: torch.Tensor, exact: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Without the places where both are NaN, as the data may be."""
    both = value.isnan() & exact.isnan()
    return value.masked_fill(both, 0.0), exact.masked_fill(both, 0.0)


def judge(program: Program, setting: Setting) -> Verdict:
    """Compile a program and compare everything; raises Wrong, or Discarded."""
    try:
        return attempt(program, setting, 0)
    except Discarded:
        raise
    except Exception as error:
        failure = error
    if not isinstance(failure, Dead):
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
    if setting.second is None and program.backwards != "one":  # the scale is found by the first
        wanted.append((BATCH, reference(program, seed + 10)))
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
            function, dtype=torch.float16, level=setting.level, emit=setting.emit, loss_scale=scale
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
