"""Warn, once, of a training whose loss or gradients stop being finite where no loss scale counts
that: in BF16, in FP32 and at O0.

    a compiled graph that is trained    the scalars that it returns (losses); now and then a weight
    a step of a torch optimizer         gradients: all of them in its steps 1, 2, 4, 8, 16, ...;
                                        between these, one parameter's after another's
    a whole training step               the scalars that it returns, now and then a weight, and
                                        whether it was skipped

Most steps are not looked at: NaN spreads. A weight that is NaN makes the next loss NaN, and that
one makes every gradient so, which a look at little in every fourth step finds. What is looked at is
a number or a flag on the device, and is read once it has arrived (`scaling/async_read.py`). Nothing
waits, but for finding a name once something is wrong.

A single bad batch is no news: the step behind it is looked at, too, and must be bad as well.
Tensors of several elements are no losses: minus infinity in them is how attention and logits are
masked. A graph that multiplies by a loss scale is left to that one, which skips steps and speaks
by itself.
"""

from __future__ import annotations

import functools
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ..capture.provenance import Names
from ..devices.registry import capabilities
from ..errors import MPCompileWarning
from ..ranks import fsdp
from ..scaling import hooks, optimizers, parameters
from ..scaling.async_read import Later, Looks
from ..scaling.overflows import any_nonfinite
from ..torch_inside.fakes import FakeTensor
from ..torch_inside.tensors import is_functorch_wrapped_tensor, sparse_values

__all__ = ["StepWatch", "watching"]

EVERY = 4  # calls
WEIGHTS = 16  # calls: a look at a weight reads all of it
_DIAGNOSE = "mpcompile.diagnose(model, inputs, loss_fn=...) names the operator that makes it"

Function = Callable[..., Any]
Number = int | float | bool


class _Told:
    """What was said in this process.

    Attributes:
        count: how many warnings.
        about: the parameters of the trainings that were warned of.
    """

    def __init__(self) -> None:
        self.count, self.about = 0, WeakIdKeyDictionary()


_told = _Told()


class Watch:
    """What one place that sees a training knows of it.

    Several places may see the same training. The first one that is sure speaks; another one does if
    it has seen something finite since: then it sees another training, or one that was mended.

    Args:
        what: what is counted: "training call".
        params: the parameters that are trained, as far as they are known.
    """

    def __init__(self, what: str, params: Iterable[torch.Tensor]) -> None:
        self._what, self._calls, self._over = what, 0, False
        self._looks = Looks()
        # What has not arrived yet: the call, the numbers, and what says which of them are bad.
        self._later: tuple[int, Later, Callable[[Sequence[Number]], str]] | None = None
        self._fine = 0  # the last call that was finite
        self._bad: tuple[int, str] | None = None  # the first one since that was not, and what
        known = any(param in _told.about for param in params)
        self._told = -1 if known else _told.count  # the warnings when something was finite last

    def comes(self) -> bool:
        """Count a call. Returns whether anything is to be done in it."""
        if self._over:
            return False
        self._calls += 1
        return self._later is not None or self._is_due or self._calls % EVERY == 0

    @property
    def _is_due(self) -> bool:
        """Whether this call may take time: rarer and rarer; or whether a second look is due."""
        return self._bad is not None or self._calls & (self._calls - 1) == 0

    def _look(self, values: Sequence[torch.Tensor], bad: Callable[[Sequence[Number]], str]) -> None:
        """Look at 0-d values of one device: numbers, and flags that should be False.

        Args:
            bad: says what is wrong, from the numbers that were read.
        """
        if values and self._later is None and all(map(_is_real, values)):
            self._later = self._calls, self._looks.at(*values), bad

    def _heard(self, params: Iterable[torch.Tensor]) -> str | None:
        """Take in what has arrived. Returns what is to be said, once it was bad twice in a row.

        Args:
            params: those that are trained.
        """
        later = self._later
        if later is None or (numbers := later[1].read()) is None:
            return None
        call, _, bad = later
        self._later = None
        if not any(map(_is_bad, numbers)):
            self._fine, self._bad, self._told = call, None, _told.count
            return None
        if self._bad is None:
            self._bad = call, bad(numbers)
            return None
        self._over = True
        for param in params:
            _told.about[param] = True
        if self._told != _told.count:
            return None
        _told.count += 1
        first, what = self._bad
        before = f" ({self._fine} was still finite)" if self._fine else ""
        return f"mpcompile: since {self._what} {first}{before}, {what}"


def _tell(text: str, stacklevel: int) -> None:
    warnings.warn(f"{text}. {_DIAGNOSE}", MPCompileWarning, stacklevel=stacklevel)


def _is_bad(number: Number) -> bool:
    return number if isinstance(number, bool) else not math.isfinite(number)


def _is_real(value: torch.Tensor) -> bool:
    """Whether a value can be read later: not in a transform, a trace, or a recorded CUDA graph."""
    if isinstance(value, FakeTensor) or value.is_meta or is_functorch_wrapped_tensor(value):
        return False
    return not capabilities(value.device).is_recording()


# -- what is compiled ------------------------------------------------------------------------------


def watching(compiled: Function, examples: Sequence[Any], names: Names) -> Function:
    """Look at the calls of a graph without a loss scale, if it is trained.

    Args:
        examples: the inputs that it was compiled with.
        names: the names of the model's parameters.
    """
    trained = [i for i, x in enumerate(examples) if isinstance(x, torch.Tensor) and x.requires_grad]
    if not torch.is_grad_enabled() or not trained:
        return compiled
    leaves = [i for i in trained if examples[i].is_leaf]
    params = [examples[i] for i in leaves]
    _reach(params, names)
    watch = StepWatch("training call", params)

    def run(*args: Any) -> Any:
        results = compiled(*args)
        if watch.comes():
            losses = [x for x in results if isinstance(x, torch.Tensor) and x.requires_grad]
            watch.see(losses, [args[i] for i in leaves])
        return results

    return run


class StepWatch(Watch):
    """Looks at the calls of something compiled that is trained: see `Watch`."""

    _turn = 0  # which weight is looked at

    def see(
        self, results: Sequence[Any], weights: Sequence[torch.Tensor],
        skipped: Sequence[torch.Tensor] = (),
    ) -> None:  # fmt: skip
        """Look at a call in which `comes` says so.

        Args:
            results: what it returned. Floating scalars among them are taken for losses.
            weights: what it trains.
            skipped: 0-d bools: whether its optimizers' steps were skipped.
        """
        self._hear(weights)
        if self._over:
            return
        known = [(x.detach(), "a loss that is returned is {}") for x in results if _is_scalar(x)]
        values = [(x.float() if x.element_size() < 4 else x, text) for x, text in known]
        if weights and self._calls % WEIGHTS == 0:
            self._turn += 1
        if weights and (self._calls % WEIGHTS == 0 or (self._bad is not None and self._turn)):
            weight = weights[self._turn % len(weights)]
            text = f"{_names([weight])} is NaN"
            values.append((weight.detach().isnan().any(), text))
        gradients = "gradients are not finite, and MPOptimizer skips each step"
        values += [(flag, gradients) for flag in skipped]
        alike = [(x, text) for x, text in values if x.device == values[0][0].device]
        texts = [text for _, text in alike]

        def bad(numbers: Sequence[Number]) -> str:
            wrong = zip(numbers, texts, strict=True)
            return next(text.format(number) for number, text in wrong if _is_bad(number))

        self._look([x for x, _ in alike], bad)
        self._hear(weights)

    def _hear(self, weights: Sequence[torch.Tensor]) -> None:
        if (text := self._heard(weights)) is not None:
            _tell(text, stacklevel=5)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() == 0


# -- optimizers ------------------------------------------------------------------------------------

# By `id`: trained parameters of graphs without a loss scale, and the names in their models.
_reached: dict[int, tuple[weakref.ref[torch.Tensor], Names]] = {}
_watches: weakref.WeakKeyDictionary[Optimizer, _OptimizerWatch] = weakref.WeakKeyDictionary()


def _reach(params: Sequence[torch.Tensor], names: Names) -> None:
    """A graph without a loss scale was compiled with these parameters."""
    hooks.look_before_steps(_before_step)
    for param in [*params, *(shard.parameter for shard in fsdp.shards_of(params))]:
        gone = functools.partial(_forget, id(param), _reached)
        _reached[id(param)] = weakref.ref(param, gone), names


def _forget(key: int, known: dict[int, Any], gone: weakref.ref[torch.Tensor]) -> None:
    if key in known and known[key][0] is gone:
        del known[key]


def _is_reached(param: torch.Tensor) -> bool:
    known = _reached.get(id(param))
    return known is not None and known[0]() is param


def _before_step(optimizer: Optimizer) -> None:
    if not _reached:
        return
    if (watch := _watches.get(optimizer)) is None:
        watch = _watches[optimizer] = _OptimizerWatch(optimizer)
    if watch.comes():
        watch.see(optimizer)


class _OptimizerWatch(Watch):
    """Looks at the gradients that an optimizer is about to use: see `Watch`."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(f"{type(optimizer).__name__}'s step", _held(optimizer))
        self._turn = 0

    def see(self, optimizer: Optimizer) -> None:
        """Look at a step in which `comes` says so."""
        held = _held(optimizer)
        if not any(map(_is_reached, held)) or any(map(parameters.scales_of, held)):
            return  # it isn't ours, or a loss scale judges its gradients
        self._hear(optimizer, held)
        gradients = [p.grad for p in held if p.grad is not None]
        if not gradients or self._over:
            return
        if self._is_due:
            gradients = [g for g in gradients if g.device == gradients[0].device]
        else:
            self._turn += 1
            gradients = [gradients[self._turn % len(gradients)]]
        if isinstance(gradients[0], FakeTensor):
            return
        self._look([_not_finite(gradients)], lambda _: _named(held, optimizer))
        self._hear(optimizer, held)

    def _hear(self, optimizer: Optimizer, held: Sequence[torch.Tensor]) -> None:
        if (text := self._heard(held)) is not None:
            _tell(text, stacklevel=8)  # where the user calls `step`


def _held(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _not_finite(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    # To bring together what a sparse gradient holds of one place would wait for the device.
    return any_nonfinite([sparse_values(g) if g.is_sparse else g for g in gradients])


def _named(held: Sequence[torch.Tensor], optimizer: Optimizer) -> str:
    """Which gradients are not finite now, and what comes of it; waits for the device."""
    known = [p for p in held if p.grad is not None]
    wrong = [p for p in known if bool(_not_finite([p.grad]))]  # type: ignore[list-item]
    skips = optimizers.state_of(optimizer).skips_by_itself
    then = "each step is skipped" if skips else "the weights become NaN"
    if len(wrong) in (0, len(known)) and len(known) > 1:
        return f"the gradients of all parameters are not finite: {then}"
    return f"the gradient of {_names(wrong)} is not finite: {then}"


def _names(params: Sequence[torch.Tensor]) -> str:
    """The first ones of some parameters, by their names where they are known."""
    names: dict[int, str] = {}
    for find in {_reached[id(p)][1] for p in params if _is_reached(p)}:
        names.update(find())
    words = [names.get(id(p), f"a parameter of shape {tuple(p.shape)}") for p in params[:3]]
    more = f" and {len(params) - 3} more" if len(params) > 3 else ""
    return ", ".join(words) + more
