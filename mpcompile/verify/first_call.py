"""The first call of a compiled graph with real data: run it, run what was meant, compare.

`Verifier.inner` stands where Inductor compiles one graph: a forward, a backward, an inference. What
Inductor returns gets a `FirstCall` in the place of its code; once that is verified the code is put
back, and later calls cost nothing more.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..devices.registry import capabilities, is_real
from ..errors import MPCompileError, in_one_line
from ..ir import copied
from ..ir.dtypes import HALF
from ..torch_inside.inductor import donated_inputs
from ..torch_inside.names import (
    TracingContext,
    aot_settings,
    autocast_off,
    compile_fx,
    compile_inner,
)
from .case import CURES, Case, Cure, Function
from .draws import state_of
from .reference import why_not, written_numbers
from .trial import Found, Trial
from .verdicts import Verdicts, Verify, key_of

_SHARE, _LEAST = 0.07, 0.5
"""What comparing may take in the first call: of the time in which Inductor compiled, and in
seconds. What is left then is compared in the next call. All in all, with copies of what the call
writes and the end of the last operator, it is to be 8% at most (`benchmarks/verified.py`).
"""

_CALLS = 4
"""Calls at most in which is looked again at what proved nothing: constants, a gradient of zeros."""


def compile_verified(
    gm: fx.GraphModule, inputs: Sequence[Any], patches: dict[str, Any] | None, asked: Verify
) -> Any:
    """Compile a graph as `compile_fx` does.

    Args:
        gm, inputs: as `compile_fx` takes them.
        patches: settings of Inductor's.
        asked: what is to be verified; takes what is found, now and later.

    Returns:
        What Inductor returns.
    """
    if not asked.when:
        return compile_fx(gm, inputs, config_patches=patches)
    verdicts = Verdicts.of(key_of(gm, inputs, patches), asked)
    asked.found.append(verdicts)
    if verdicts.complete:
        return compile_fx(gm, inputs, config_patches=patches)
    verifier = Verifier(verdicts, patches)
    if not any(verdict.cure for verdict in verdicts.known.values()):
        compiled = compile_fx(gm, inputs, inner_compile=verifier.inner, config_patches=patches)
        if verifier.compiles:
            return compiled
    # AOTAutograd's cache holds code that nobody has looked at, or that is known to be wrong.
    with aot_settings(enable_autograd_cache=False):
        return compile_fx(gm, inputs, inner_compile=verifier.inner, config_patches=patches)


class Verifier:
    """Verifies what one call of Inductor compiles.

    Attributes:
        compiles: how many graphs Inductor was asked for; none where a cache had them.

    Args:
        verdicts: takes what is found.
        patches: the settings of Inductor's for this call.
    """

    def __init__(self, verdicts: Verdicts, patches: Mapping[str, Any] | None) -> None:
        self.verdicts, self._patches = verdicts, dict(patches or {})
        self.compiles = 0

    def inner(self, gm: fx.GraphModule, fakes: Sequence[Any], **kwargs: Any) -> Any:
        """Compile one graph, as Inductor's own `compile_fx_inner`."""
        self.compiles += 1
        name = "graph" if kwargs.get("is_inference") else "forward"
        name = "backward" if kwargs.get("is_backward") else name
        context = TracingContext.try_get()
        donated = donated_inputs(context) if name == "backward" else ()
        case = Case(name, copied(gm), fakes, dict(kwargs), self._patches, context, donated)
        start = time.perf_counter()
        compiled = compile_inner(gm, fakes, **kwargs)
        seconds = max(_LEAST, _SHARE * (time.perf_counter() - start))
        if not hasattr(compiled, "current_callable"):  # nothing is in it to compile
            return compiled
        self.verdicts.expect(name)
        compiled.current_callable = FirstCall(compiled, case, self.verdicts, seconds)
        return compiled


class FirstCall:
    """Stands in the place of a compiled graph's code until it is verified."""

    def __init__(self, compiled: Any, case: Case, verdicts: Verdicts, seconds: float) -> None:
        self._owner, self._case, self._verdicts = weakref.ref(compiled), case, verdicts
        self._run: Function = compiled.current_callable
        self._calls, self._seconds = 0, seconds
        self._open: Collection[int] | None = None
        self._done = False
        self._lock = threading.Lock()

    def __call__(self, inputs: list[Any]) -> Any:
        real = (is_real(x) for x in inputs if isinstance(x, torch.Tensor))
        if self._done or not all(real) or not self._lock.acquire(blocking=False):
            return self._run(inputs)
        try:
            self._calls += 1
            with torch.no_grad(), autocast_off():
                return self._verified(inputs)
        finally:
            self._lock.release()

    def _verified(self, inputs: list[Any]) -> Any:
        graph, verdicts = self._case.gm.graph, self._verdicts
        if (why := why_not(graph)) is not None:
            return self._unverified(inputs, why)
        targets = [inputs[number] for number in written_numbers(graph)]
        changed = {*written_numbers(graph), *self._case.donated}
        before = [_kept(x) if number in changed else x for number, x in enumerate(inputs)]
        trial = Trial(self._case.gm, before, state_of(graph, inputs), _slow(inputs))
        outputs = list(self._run(inputs))
        try:
            part = trial.part_that_fits()
            only = part if self._open is None else self._open
            found = trial.compare([*outputs, *targets], only, self._seconds)
        except torch.OutOfMemoryError:
            return self._unverified(inputs, "there is too little memory", outputs)
        except Exception as error:  # an operator that can't be run again is no error of the user's
            if verdicts.asked.always:
                raise
            return self._unverified(inputs, in_one_line(error), outputs)
        if found.wrong:
            return self._cured(trial, found, outputs, targets)
        verdicts.right(self._case.name, found, len(trial.nodes) if part is not None else None)
        self._open = None if verdicts.asked.always else found.vacuous | found.late
        if self._calls >= _CALLS or not self._open:
            self._finish()
        return outputs

    def _cured(
        self, trial: Trial, found: Found, outputs: list[Any], targets: Sequence[Any]
    ) -> list[Any]:
        """Return and write what is right, and find a way to compile that."""
        case, verdicts = self._case, self._verdicts
        right = trial.uncompiled()
        count = len(outputs)
        for into, value in zip(targets, right[count:], strict=True):
            into.copy_(value)
        cure = None
        for cure in verdicts.in_order(CURES):
            function = self._right_function(cure, trial)
            if function is not None:
                self._run = _laying_out(function, outputs)
                break
        nodes = [trial.nodes[number] for number in found.wrong]
        verdicts.wrong(case, nodes, list(found.wrong.values()), cure, found.verified)
        self._finish()
        return _laid_out(right[:count], outputs)

    def _right_function(self, cure: Cure, trial: Trial) -> Function | None:
        """What a cure makes of the graph, if it is right on the inputs of this call."""
        try:
            function = cure.function(self._case)
            if cure.settings is None:
                return function
            inputs = [_kept(value) for value in trial.inputs]
            written = [inputs[number] for number in written_numbers(trial.gm.graph)]
            results = [*function(list(inputs)), *written]
            return None if trial.compare(results, range(len(results))).wrong else function
        except MPCompileError:
            raise
        except Exception:  # a cure that doesn't compile is none
            return None

    def _unverified(
        self, inputs: list[Any], why: str, outputs: list[Any] | None = None
    ) -> list[Any]:
        self._verdicts.left(self._case.name, why)
        self._finish()
        return self._run(inputs) if outputs is None else outputs

    def _finish(self) -> None:
        """Put the code in the place of this, and let go of everything else."""
        if self._done or self._verdicts.asked.always:
            return
        self._done = True
        owner = self._owner()
        if owner is not None and owner.current_callable is self:
            owner.current_callable = self._run
        self._verdicts.finish(self._case.name)
        del self._case, self._verdicts, self._open


def _laying_out(function: Function, like: Sequence[Any]) -> Function:
    """The function with results in the strides of others, where they have their shapes."""
    metas = [v.to("meta") if isinstance(v, torch.Tensor) else v for v in like]

    def run(inputs: list[Any]) -> Any:
        return _laid_out(function(inputs), metas)

    return run


def _slow(inputs: Sequence[Any]) -> frozenset[torch.dtype]:
    """The low dtypes that the inputs' device multiplies slowly."""
    device = next((x.device for x in inputs if isinstance(x, torch.Tensor)), None)
    if device is None or capabilities(device).asynchronous:
        return frozenset()
    return frozenset(dtype for dtype in HALF if not capabilities(device).has_units(dtype))


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _laid_out(values: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    """Values with the strides of others, as what reads them was compiled for."""

    def strided(value: Any, other: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
            return value
        if value.stride() == other.stride() or value.shape != other.shape:
            return value
        made = torch.empty_strided(
            other.shape, other.stride(), dtype=value.dtype, device=value.device
        )
        return made.copy_(value)

    return [strided(value, other) for value, other in zip(values, like, strict=True)]
