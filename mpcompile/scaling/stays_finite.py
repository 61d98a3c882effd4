"""Warn, once, of a training whose loss or gradients stop being finite where no loss scale counts
that: in BF16, in FP32 and at O0.

    a compiled graph that is trained    the scalars that it returns (losses), and one weight
    a step of a torch optimizer         gradients: all of them in its steps 1, 2, 4, 8, 16, ...;
                                        else of one parameter, in turn
    a whole training step               the scalars that it returns, one weight, and whether it was
                                        skipped

That little is enough, since NaN spreads: a weight that is NaN makes the next loss NaN, and that one
makes every gradient so. What is looked at is a number on the device, and is read once it has
arrived (`AsyncRead`). Nothing waits, but for finding a name once something is wrong. A
look is taken when it costs less than a thousandth of the time since the last one: in each step of a
tenth of a second, in fewer of shorter ones.

A single bad batch is no news: the step after it is looked at, too, and must be bad as well.
Tensors of several elements are no losses: minus infinity in them is how attention and logits are
masked. A graph that multiplies by a loss scale is left to that one, which skips steps and speaks
by itself.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch.optim import Optimizer

from ..devices.registry import AsyncRead, is_real
from ..errors import warn
from ..ranks import fsdp
from ..ranks.shards import local
from ..torch_inside.modules import Names
from ..torch_inside.names import FakeTensor
from ..torch_inside.tensors import sparse_values
from . import hooks, parameters

PAUSE = 1000  # times as long as a look took: so long none is taken
_DIAGNOSE = "mpcompile.diagnose(model, inputs, loss_fn=...) names the operator that makes it"
_LOSS = "a loss that is returned is {}"
_SKIPPED = "gradients are not finite, and MPOptimizer skips each step"

Function = Callable[..., Any]
Number = int | float | bool
_Look = tuple[Sequence[torch.Tensor], Callable[[Sequence[Number]], str], bool]
"""0-d values of one device: numbers, and flags that should be False; what says what is wrong, from
the numbers that were read; and whether others may be bad though these are not."""
_NOTHING: _Look = (), lambda _: "", False


class FiniteCheck:
    """What one place that sees a training knows of it.

    Several places may see the same training. The first one that is sure speaks; another one does if
    it has seen something finite since: then it sees another training, or one that was mended.

    Args:
        what: what is counted: "training call".
        params: the parameters that are trained, as far as they are known.

    Attributes:
        warnings: how many were given in this process.
    """

    warnings = 0
    _turn = 0  # which weight or gradient is looked at

    def __init__(self, what: str, params: Iterable[torch.Tensor]) -> None:
        self._what, self._calls, self._over = what, 0, False
        self._next = 1  # the next call in which something is to be done
        self._took = math.inf  # seconds, of a look
        self._last = 0, perf_counter()  # the call and the end of the last one
        # What has not arrived yet: the call, the numbers, what says which are bad, `is_part`.
        self._later: tuple[int, AsyncRead, Callable[[Sequence[Number]], str], bool] | None = None
        self._fine = 0  # the last call that was finite
        self._bad: tuple[int, str] | None = None  # the first one since that was not, and what
        known = any(parameters.state_of(param).was_told for param in params)
        # The warnings when something was finite last.
        self._told = -1 if known else FiniteCheck.warnings

    def comes(self) -> bool:
        """Count a call. Returns whether something is to be done in it."""
        self._calls += 1
        return self._calls >= self._next

    def see_call(
        self, results: Sequence[Any], weights: Sequence[torch.Tensor],
        skipped: Sequence[torch.Tensor] = (),
    ) -> None:  # fmt: skip
        """Look at a call of something compiled, in which `comes` says so.

        Args:
            results: what it returned. Floating scalars among them are taken for losses.
            weights: what it trains.
            skipped: 0-d bools: whether its optimizers' steps were skipped.
        """

        def look() -> _Look:
            losses = [x.detach() for x in results if _is_scalar(x)]
            values = [(x.float() if x.element_size() < 4 else x, _LOSS) for x in losses]
            if weights:
                self._turn += self._bad is None
                weight = weights[self._turn % len(weights)]
                value = torch.Tensor.detach(weight)  # no access that a copy of it need know of
                values.append((_sum([value]).isnan(), f"{_names([weight])} is NaN"))
            values += [(flag, _SKIPPED) for flag in skipped]
            alike = [(x, text) for x, text in values if x.device == values[0][0].device]

            def bad(numbers: Sequence[Number]) -> str:
                wrong = zip(numbers, alike, strict=True)
                return next(text.format(number) for number, (_, text) in wrong if _is_bad(number))

            return [x for x, _ in alike], bad, False

        self._see(weights, look)

    def see_step(self, optimizer: Optimizer) -> None:
        """Look at the gradients that an optimizer is about to use, where `comes` says so."""
        held = parameters.parameters_of(optimizer)

        def look() -> _Look:
            ours = any(parameters.state_of(p).names for p in held)
            gradients = [p.grad for p in held if ours and p.grad is not None]
            # A loss scale judges its gradients itself.
            if not gradients or any(map(parameters.scales_of, held)):
                return _NOTHING
            if isinstance(gradients[0], FakeTensor):
                return _NOTHING
            # Whether this look may take time: rarer and rarer; or must be sure.
            sees_all = self._bad is not None or self._calls & (self._calls - 1) == 0
            if sees_all:
                gradients = [g for g in gradients if g.device == gradients[0].device]
            else:
                self._turn += 1
                gradients = [gradients[self._turn % len(gradients)]]
            values = [_sum(gradients)]
            if self._bad is None and parameters.of_optimizer(optimizer).skips_by_itself:
                skipped = getattr(optimizer, "skipped", None)  # of the step before
                if skipped is not None and skipped.device == values[0].device:
                    values.append(skipped)
            return values, lambda _: _named(held, optimizer), not sees_all

        self._see(held, look)

    def _see(self, params: Sequence[torch.Tensor], look: Callable[[], _Look]) -> None:
        """Do what is to be done in a call: take in what has arrived, have `look` look, and plan the
        next look. `params` are trained.
        """
        began = perf_counter()
        self._hear(params)
        if not self._over:
            values, bad, is_part = look()
            if values and self._later is None and all(map(is_real, values)):
                self._later = self._calls, AsyncRead(*values), bad, is_part
            self._hear(params)
        now, number = perf_counter(), self._calls
        # Not this one alone, which something else on the machine may have held up.
        self._took = min(now - began, 2 * self._took)
        # Seconds that a call takes. (Two threads may be in the same one.)
        step = max(now - self._last[1], 1e-9) / max(number - self._last[0], 1)
        self._last = number, now
        if self._over:
            self._next = sys.maxsize
        elif self._bad is not None or self._later is not None:
            self._next = number + 1
        else:
            pause = max(1, int(min(PAUSE * self._took / step, sys.maxsize)))
            self._next = min(1 << number.bit_length(), number + pause)

    def _hear(self, params: Iterable[torch.Tensor]) -> None:
        """Take in what has arrived, and warn once it was bad twice in a row."""
        later = self._later
        if later is None or (numbers := later[1].read()) is None:
            return
        call, _, bad, is_part = later
        self._later = None
        if not any(map(_is_bad, numbers)):
            self._fine, self._bad = call, None
            self._told = self._told if is_part else FiniteCheck.warnings
            return
        if self._bad is None:
            self._bad = call, bad(numbers)
            return
        self._over = True
        for param in params:
            parameters.note(param, was_told=True)
        if self._told != FiniteCheck.warnings:
            return
        FiniteCheck.warnings += 1
        first, what = self._bad
        before = f" ({self._fine} was still finite)" if self._fine else ""
        warn(f"mpcompile: since {self._what} {first}{before}, {what}. {_DIAGNOSE}")


def _is_bad(number: Number) -> bool:
    return number if isinstance(number, bool) else not math.isfinite(number)


# -- what is compiled ------------------------------------------------------------------------------


def watching(compiled: Function, examples: Sequence[Any], names: Names) -> Function:
    """Look at the calls of a graph without a loss scale, if it is trained.

    Args:
        examples: the inputs that it was compiled with.
        names: the names of the model's parameters.
    """
    trained = [i for i, x in enumerate(examples) if parameters.is_trained(x)]
    if not torch.is_grad_enabled() or not trained:
        return compiled
    leaves = [i for i in trained if examples[i].is_leaf]
    params = [examples[i] for i in leaves]
    hooks.look_before_steps(_before_step)
    for param in [*params, *(shard.parameter for shard in fsdp.shards_of(params))]:
        parameters.note(param, names=names)
    watch = FiniteCheck("training call", params)

    def run(*args: Any) -> Any:
        results = compiled(*args)
        if watch.comes():
            losses = list(filter(parameters.is_trained, results))
            watch.see_call(losses, [args[i] for i in leaves])
        return results

    return run


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() == 0


# -- optimizers ------------------------------------------------------------------------------------


def _before_step(optimizer: Optimizer) -> None:
    state = parameters.of_optimizer(optimizer)
    if (watch := state.watch) is None:
        held = parameters.parameters_of(optimizer)
        watch = state.watch = FiniteCheck(f"{type(optimizer).__name__}'s step", held)
    if watch.comes():
        watch.see_step(optimizer)


def _sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of what this rank holds of some tensors of one device: 0-d, finite if they are.

    Of all that tells so, a sum takes the least time: a largest magnitude takes 20 times as long on
    a CPU. (Only numbers near the end of FP32's range make one infinite that are finite.)
    """
    sums = [_dense(x).sum(dtype=torch.float32) for x in tensors]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    own = local(tensor)
    # To bring together what a sparse gradient holds of one place would wait for the device.
    own = sparse_values(own) if own.is_sparse else own
    return torch.view_as_real(own) if own.is_complex() else own


def _named(held: Sequence[torch.Tensor], optimizer: Optimizer) -> str:
    """Which gradients are not finite now, and what comes of it; waits for the device."""
    known = [p for p in held if p.grad is not None]
    wrong = [p for p in known if p.grad is not None and not bool(_sum([p.grad]).isfinite())]
    skips = parameters.of_optimizer(optimizer).skips_by_itself
    then = "each step is skipped" if skips else "the weights become NaN"
    if len(wrong) in (0, len(known)) and len(known) > 1:
        return f"the gradients of all parameters are not finite: {then}"
    return f"the gradient of {_names(wrong)} is not finite: {then}"


def _names(params: Sequence[torch.Tensor]) -> str:
    """The first ones of some parameters, by their names where they are known."""
    names: dict[int, str] = {}
    for find in filter(None, {parameters.state_of(p).names for p in params}):
        names.update(find())
    words = [names.get(id(p), f"a parameter of shape {tuple(p.shape)}") for p in params[:3]]
    more = f" and {len(params) - 3} more" if len(params) > 3 else ""
    return ", ".join(words) + more
