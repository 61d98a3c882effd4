"""Find the start of the loss scale: a first backward that overflows is run again at lower scales,
until no gradient does.

Forward and backward are run again at half the scale, and so on, each time with the same random
numbers and inputs. The gradient is exact at any power of two, so a step that was searched for is as
good as another. Of the first scale that fits, an eighth is kept (design note 10).

    first forward     compiled(x, scale=2**19)            kept until its backward
    its backward      2**19: inf; 2**18: inf; 2**17: finite     -> the gradient; the scale is 2**14

Once for each graph, while the start is searched, the gradients are compared with those at a lower
scale. A gradient that leaves a graph does not depend on the scale at which it was made. This is
asked of numbers: it shares nothing with the proof (`ir/units.py`), which asks the graph.

A backward whose gradients are all zero, or finite at no scale, finds nothing: the next one does.

All this happens only while `scale.fitting`; otherwise the compiled function is called directly. A
search waits for the device.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .. import ir
from ..devices.registry import RandomState
from ..errors import MPCompileError
from ..ir.fakes import duplicate
from ..ir.inputs import GraphInputs
from ..ir.second_backward import notice
from ..operators.library import differentiable_once
from ..torch_inside.names import keeps_graph
from ..torch_inside.tensors import base_of, version, whole
from .loss_scale import LossScale
from .messages import Seen
from .overflows import any_nonfinite
from .parameters import is_trained

# How far the two scales lie apart. A gradient of FP16's smallest numbers may double at a lower
# scale, by rounding; not grow by this.
FACTOR = 16.0

_NEAR = 0.01  # relative, of norms: rounding makes no more of a factor

_numbers = itertools.count()
Function = Callable[..., Any]
Saved = Sequence[Any]  # the call's inputs
Grads = list[torch.Tensor | None]


def fitting(compiled: Function, scale: LossScale, inputs: GraphInputs) -> Function:
    """Wrap `compiled` for the backend: the same, plus the backward passes that find the scale.

    Args:
        compiled: the graph as emitted.
        scale: the loss scale of the graph.
        inputs: which of the graph's inputs is what.
    """
    graph = _Graph(compiled, scale, inputs)

    def call(*args: Any) -> Any:
        if not scale.fitting or not torch.is_grad_enabled():
            return compiled(*args)
        trial = _Trial(graph, args)
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


@dataclass
class _Graph:
    """What `fitting` wraps, and whether its gradients were compared at two scales."""

    compiled: Function
    scale: LossScale
    inputs: GraphInputs
    compared: bool = False


class _Trial:
    """One call of the compiled function, which can be repeated at another scale."""

    def __init__(self, graph: _Graph, args: Sequence[Any]) -> None:
        self.graph, self.scale, self.inputs = graph, graph.scale, graph.inputs
        values, self.used, _ = self.inputs.scaling_apart(args)
        self.random = RandomState(x.device for x in args if isinstance(x, torch.Tensor))
        # As they were before: what may change, buffers, and parameters that the graph writes.
        self.before = {
            i: duplicate(x.detach())
            for i, x in enumerate(values)
            if isinstance(x, torch.Tensor) and (not x.requires_grad or i in self.inputs.written)
        }
        self.at = self.scale.search.top
        self.results: Any = None
        self.number = next(_numbers)

    def forward(self, args: Sequence[Any]) -> list[torch.Tensor]:
        """Call the function on leaves of its own. Returns the bases of its results: each result is
        a base, or a view of one.
        """
        values, _, found = self.inputs.scaling_apart(args)
        with torch.enable_grad():
            # Others are passed as they are: the program may give them new memory (`x.data = y`).
            self.own = [x.detach().requires_grad_() if is_trained(x) else x for x in values]
            scale = torch.full_like(self.used, self.at)
            self.found = torch.zeros_like(found, requires_grad=True)
            self.results = self.graph.compiled(*self.own, scale, self.found)
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
        given = [
            duplicate(self.before[i]).requires_grad_(is_trained(x)) if i in self.before else x
            for i, x in enumerate(saved)
        ]
        self.at = at
        with self.random.again():
            self.forward(given)

    def backward(self, grads: Iterable[torch.Tensor | None]) -> Grads:
        """The gradients of all inputs but the scale; the last is the count of overflows."""
        pairs = [
            (result, grad)
            for result, grad in zip(self.bases, grads, strict=True)
            if grad is not None and result.requires_grad
        ]
        leaves = [x for x in self.own if is_trained(x)]
        with _overflows_are_expected():
            found = torch.autograd.grad(
                [result for result, _ in pairs],
                [*leaves, self.found],
                [grad for _, grad in pairs],
                allow_unused=True,
                retain_graph=keeps_graph(),  # what is compiled in this backward is compiled for it
            )
        self.results, self.bases = None, []  # autograd has freed their graph
        by_leaf = iter(found)
        return [next(by_leaf) if is_trained(x) else None for x in self.own] + [found[-1]]

    def fits(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Whether none of them overflowed; waits for the device."""
        return not bool(any_nonfinite([whole(g) for g in gradients[:-1] if g is not None]))

    def find(self, saved: Saved, grads: Sequence[torch.Tensor | None], *, written: bool) -> Grads:
        """The gradients at the first scale, going down, at which they fit. If an input was written
        since the forward, no other scale is tried: this backward may not need that input.
        """
        if self.results is None:  # not the first backward over this forward
            if written:
                raise RuntimeError("an input of a graph was modified by an inplace operation")
            self.again(saved, self.scale.search.top)
        results = [x.detach() for x in self.results if isinstance(x, torch.Tensor)]
        gradients = self.backward(grads)
        fit = self.fits(gradients)
        if written and not fit:
            self.scale.search.give_up()
        elif not fit:
            received = [whole(g) for g in grads if g is not None]
            given = [self.before.get(i, x) for i, x in enumerate(saved)]
            call = Seen.of(self.inputs.names, given, results, received)
            if call.hopeless:
                self.scale.said.hopeless(self.number, call)
            gradients, fit = self._lower(saved, grads, gradients, once=call.hopeless)
        if fit and any(map(_has_numbers, gradients[:-1])):
            if not (self.graph.compared or written):
                self._compare(saved, grads, gradients)
            self.scale.search.keep(self.at)
        self.used.fill_(self.at)
        return gradients

    def _lower(
        self, saved: Saved, grads: Sequence[torch.Tensor | None], gradients: Grads, *, once: bool
    ) -> tuple[Grads, bool]:
        """The gradients at lower scales, until they fit, or at the lowest; and whether they do.

        Args:
            once: at no scale will they fit: as without a search, so that what is finite of them is.
        """
        scale = self.scale
        if once and self.at > scale.value:
            self.again(saved, scale.value)
            gradients = self.backward(grads)
        while not once and self.at * 0.5 >= scale.min_scale:
            self.again(saved, self.at * 0.5)
            gradients = self.backward(grads)
            if self.fits(gradients):
                return gradients, True
        scale.search.give_up()
        return gradients, False

    def _compare(
        self, saved: Saved, grads: Sequence[torch.Tensor | None], gradients: Grads
    ) -> None:
        """Compare the gradients with those at a lower scale. Raises MPCompileError."""
        at = self.at
        if at / FACTOR < self.scale.min_scale:
            return
        self.again(saved, at / FACTOR)
        check_two_scales(gradients[:-1], self.backward(grads)[:-1], self.inputs.copies)
        self.at, self.graph.compared = at, True


def _overflows_are_expected() -> contextlib.AbstractContextManager[None]:
    """In anomaly mode: a NaN of the trial's own is none of the user's. One at any scale leaves the
    trial, and autograd finds it there.
    """
    if not torch.is_anomaly_enabled():
        return contextlib.nullcontext()
    return torch.autograd.set_detect_anomaly(True, check_nan=False)  # it restores what was set


class _Fitted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trial: _Trial, *args: Any) -> Any:
        bases = trial.forward(args)
        ctx.trial = trial
        # Buffers may change before the backward; the trial keeps their old values. All else stays
        # for another backward over this forward, as autograd would not let it.
        ctx.args = [x if is_trained(x) or not isinstance(x, torch.Tensor) else None for x in args]
        ctx.versions = [version(x) if is_trained(x) else None for x in args]
        ctx.set_materialize_grads(False)
        own = [base.detach() for base in bases]
        constant = [new for new, base in zip(own, bases, strict=True) if not base.requires_grad]
        ctx.mark_non_differentiable(*constant)
        return tuple(own)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        versions = [version(x) if is_trained(x) else None for x in ctx.args]
        gradients = ctx.trial.find(ctx.args, grads, written=versions != ctx.versions)
        return (None, *gradients[:-1], None, gradients[-1])


def _base(result: torch.Tensor) -> torch.Tensor:
    """The tensor that autograd takes a result for a view of; the result itself if it is no view."""
    base = base_of(result) if result.requires_grad else None
    return result if base is None else base


def _like(result: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    if _base(result) is result:
        return base
    return base.as_strided(result.size(), result.stride(), result.storage_offset())


def _has_numbers(gradient: torch.Tensor | None) -> bool:
    """Whether some of a gradient is not zero; waits for the device."""
    if gradient is None:
        return False
    return bool((gradient.coalesce().values() if gradient.is_sparse else whole(gradient)).any())


def check_two_scales(
    higher: Sequence[torch.Tensor | None],
    lower: Sequence[torch.Tensor | None],
    scaled: Collection[int],
) -> None:
    """Raise MPCompileError if a gradient follows the loss scale, or its inverse. Waits for the
    device.

    Args:
        higher, lower: the gradients of a graph's inputs at two scales, the first of which is FACTOR
            times the second.
        scaled: the inputs (by number) whose gradient is to leave multiplied by the scale.
    """
    for i, (one, other) in enumerate(zip(higher, lower, strict=True)):
        if one is None or other is None or one.is_sparse:
            continue
        wanted = FACTOR if i in scaled else 1.0
        one, other = _real(whole(one)) / wanted, _real(whole(other))
        if _is_multiple(one, other, FACTOR) or _is_multiple(other, one, FACTOR):
            raise MPCompileError(
                f"the gradient of input {i} of a compiled graph depends on the loss scale. This is "
                "a bug of mpcompile, and the gradient is wrong; until it is mended, compile this "
                'model with loss_scale="none", or in BF16'
            )


def _real(gradient: torch.Tensor) -> torch.Tensor:
    """In FP32; of complex numbers, both parts."""
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient.resolve_conj())
    return gradient.float()


def _is_multiple(one: torch.Tensor, other: torch.Tensor, factor: float) -> bool:
    """Whether `one` is `factor` times `other`, and neither is zero, inf or NaN."""
    size = torch.linalg.vector_norm(one)
    off = torch.linalg.vector_norm(one - factor * other)
    near, known = torch.stack([off <= _NEAR * size, (size > 0) & size.isfinite()]).tolist()
    return bool(near and known)
