"""Find a fitting start for the loss scale: the first backward is run again at lower scales, until
no gradient overflows.

GradScaler starts at 2**16 and skips steps until the scale has come down to where the model's
gradients fit FP16. Here the first backward runs at 2**19; if it overflows, forward and backward are
run again at half of that, and so on, each time with the same random numbers and inputs. The scale
kept is an eighth of the one that fits, 2**16 at most: gradients of the next steps may be a few
times as large. The gradient itself is exact at any power of two, so the first step is as good as a
later one.

    first forward     compiled(x, scale=2**19)            kept until its backward
    its backward      2**19: inf; 2**18: inf; 2**17: finite     -> the gradient; the scale is 2**14

All this happens only while `scale.fitting`; afterwards the compiled function is called directly.
The search waits for the device and runs one or a few extra steps, during a compilation of seconds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.autograd.function import once_differentiable

from .. import ir
from ..devices.generators import RandomState, unchanged
from ..ir.fakes import duplicate
from ..ir.inputs import GraphInputs
from ..ir.scale import INIT_SCALE
from .loss_scale import LossScale
from .overflows import any_nonfinite
from .retained_graph import is_kept
from .second_backward import notice

HEADROOM = 8.0

Function = Callable[..., Any]
Saved = Callable[[], Sequence[Any]]  # the call's inputs; raises if they were written to since


def fitting(compiled: Function, scale: LossScale, inputs: GraphInputs) -> Function:
    """Wrap `compiled` for the backend: the same, plus the backward passes that find the scale.

    Args:
        compiled: the graph as emitted.
        scale: the loss scale of the graph.
        inputs: which of the graph's inputs is what. The gradients of O2's working copies leave
            multiplied by the scale, so all backward passes of a step must use one scale.
    """

    def call(*args: Any) -> Any:
        if not scale.fitting or not torch.is_grad_enabled():
            return compiled(*args)
        trial = _Trial(compiled, scale, inputs, args)
        bases = _Fitted.apply(trial, *args)  # type: ignore[no-untyped-call]
        notice(bases)
        return trial.shown(bases)

    return call


def can_run_again(gm: fx.GraphModule) -> bool:
    """Whether a call of the graph may be repeated on copies of the tensors that it writes to.

    Not if autograd tracks such a write; if inputs share memory, which copies would not; or if a
    result shares memory with an input.
    """
    # A working copy was captured as its parameter, but has memory of its own.
    inputs = [n for n in gm.graph.find_nodes(op="placeholder") if ir.copy_of(n) is None]
    memory = [at for node in inputs if (at := ir.storage(node)) is not None]
    tracked = any(map(ir.is_write_back, gm.graph.nodes))
    shown = not set(memory).isdisjoint(gm.meta["mp_output_memory"])
    return len(set(memory)) == len(memory) and not tracked and not shown


class _Trial:
    """One call of the compiled function, which can be repeated at another scale."""

    def __init__(
        self, compiled: Function, scale: LossScale, inputs: GraphInputs, args: Sequence[Any]
    ) -> None:
        self.compiled, self.scale, self.inputs = compiled, scale, inputs
        values, self.used, _ = inputs.scaling_apart(args)
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        self.devices = {x.device for x in tensors}
        self.random = RandomState(self.devices)
        # Inputs that the graph may write to (buffers), as they were before.
        self.before = {
            i: duplicate(x)
            for i, x in enumerate(values)
            if isinstance(x, torch.Tensor) and not x.requires_grad
        }
        self.top = min(INIT_SCALE, scale.max_scale) * HEADROOM
        self.at = self.top
        self.results: Any = None

    def forward(self, args: Sequence[Any]) -> list[torch.Tensor]:
        """Call the function on leaves of its own. Returns the bases of its results: each result is
        a base, or a view of one.
        """
        values, _, found = self.inputs.scaling_apart(args)
        with torch.enable_grad():
            # Others are passed as they are: the program may give a buffer new memory (`x.data = y`).
            self.own = [x.detach().requires_grad_() if _is_tracked(x) else x for x in values]
            scale = torch.full_like(self.used, self.at)
            self.found = torch.zeros_like(found, requires_grad=True)
            self.results = self.compiled(*self.own, scale, self.found)
        tensors = [x for x in self.results if isinstance(x, torch.Tensor)]
        self.bases = list({id(base): base for base in map(_base, tensors)}.values())
        return self.bases

    def shown(self, bases: Sequence[torch.Tensor]) -> list[Any]:
        """The results, rebuilt as views of these bases: the caller may write to one result and read
        another.
        """
        known = {id(own): base for own, base in zip(self.bases, bases, strict=True)}
        return [_like(x, known[id(_base(x))]) if isinstance(x, torch.Tensor) else x
                for x in self.results]  # fmt: skip

    def again(self, saved: Saved, at: float) -> None:
        """Repeat the call at another scale."""
        given = [
            duplicate(self.before[i]) if i in self.before else x for i, x in enumerate(saved())
        ]
        self.at = at
        with unchanged(self.devices):
            self.random.restore()
            self.forward(given)

    def backward(self, grads: Iterable[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The gradients of all inputs but the scale; the last is the count of overflows."""
        pairs = [
            (result, grad)
            for result, grad in zip(self.bases, grads, strict=True)
            if grad is not None and result.requires_grad
        ]
        leaves = [x for x in self.own if _is_tracked(x)]
        found = torch.autograd.grad(
            [result for result, _ in pairs],
            [*leaves, self.found],
            [grad for _, grad in pairs],
            allow_unused=True,
            retain_graph=is_kept(),  # what is compiled in this backward is compiled for that
        )
        self.results, self.bases = None, []  # autograd has freed their graph
        by_leaf = iter(found)
        return [next(by_leaf) if _is_tracked(x) else None for x in self.own] + [found[-1]]

    def fits(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Whether none of them overflowed; waits for the device."""
        return not bool(any_nonfinite([g for g in gradients[:-1] if g is not None]))

    def find(self, saved: Saved, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The gradients at the first scale, going down, at which they fit."""
        scale = self.scale
        # Gradients of this step may be stored at this scale: by another graph or a failed search.
        copied = bool(self.inputs.copies)
        stored = copied and (scale.search.found or scale.search.was_in_vain(self.used))
        fixed = stored or not scale.fitting
        if fixed:
            self.top = float(self.used)
        if self.results is None or fixed:
            self.again(saved, self.top)
        # No scale helps if the results or incoming gradients themselves are not finite.
        hopeless = bool(any_nonfinite([g for g in grads if g is not None])) or bool(
            any_nonfinite([x.detach() for x in self.results if _is_float(x)])
        )
        gradients = self.backward(grads)
        while not (fits := self.fits(gradients)) and not fixed and not hopeless:
            if self.at * 0.5 < scale.min_scale:
                break
            self.again(saved, self.at * 0.5)
            gradients = self.backward(grads)
        if fits and not fixed:
            self._keep(gradients)
        elif not (fits or fixed):
            scale.search_failed(self.used, hopeless=hopeless)
            if hopeless:  # so that finite gradients are finite, as without a search
                self.again(saved, float(self.used))
                return self.backward(grads)
            self._multiply(gradients, float(self.used))
        return gradients

    def _keep(self, gradients: list[torch.Tensor | None]) -> None:
        scale = self.scale
        value = min(INIT_SCALE, max(self.at / HEADROOM, scale.min_scale))
        if scale.search.found:
            value = min(value, scale.value)
        scale.fit(value)
        self.used.fill_(value)
        self._multiply(gradients, value)

    def _multiply(self, gradients: list[torch.Tensor | None], scale: float) -> None:
        """Multiply O2's gradients by `scale`, in place of the scale that was tried."""
        for i in self.inputs.copies:
            gradient = gradients[i]
            if gradient is not None:
                gradients[i] = gradient * (scale / self.at)


class _Fitted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trial: _Trial, *args: Any) -> Any:
        bases = trial.forward(args)
        ctx.trial = trial
        # Buffers may change before the backward; the trial keeps their old values.
        ctx.places = [i for i, x in enumerate(args) if _is_tracked(x)]
        values, *scaling = trial.inputs.scaling_apart(args)
        ctx.others = [None if isinstance(x, torch.Tensor) else x for x in values] + scaling
        ctx.save_for_backward(*(args[i] for i in ctx.places))
        ctx.set_materialize_grads(False)
        own = [base.detach() for base in bases]
        constant = [new for new, base in zip(own, bases, strict=True) if not base.requires_grad]
        ctx.mark_non_differentiable(*constant)
        return tuple(own)

    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        @functools.cache  # a checkpoint unpacks a saved tensor only once
        def saved() -> Sequence[Any]:
            args = list(ctx.others)
            for i, x in zip(ctx.places, ctx.saved_tensors, strict=True):
                args[i] = x
            return args

        gradients = ctx.trial.find(saved, grads)
        return (None, *gradients[:-1], None, gradients[-1])


def _base(result: torch.Tensor) -> torch.Tensor:
    """The tensor that autograd takes a result for a view of; the result itself if it is no view."""
    base = result._base if result.requires_grad else None
    return result if base is None else base


def _like(result: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """The same view of another base."""
    if _base(result) is result:
        return base
    return base.as_strided(result.size(), result.stride(), result.storage_offset())


def _is_tracked(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
