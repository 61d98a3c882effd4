"""Observed ranges become pins: `policy = calibrate(model, batches, loss_fn)`.

A copy of the model runs in FP32, forward and backward, on each batch. What the low dtype could not
hold, with a margin, is kept in FP32. The weights stay as they are: calibrate again after the model
has changed much.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from typing_extensions import Unpack

from .. import ir
from ..errors import MPCompileError, kind_of
from ..ir.dtypes import HALF
from ..observe.record import Numbers
from ..observe.watch import source_of_value
from ..plans.pipeline import Planned
from ..rules.policy import Policy
from ..runtime.records import studied
from ..settings import Options
from .check_arguments import check_loss_fn, check_trained
from .diagnose import loss_of, sides_of
from .sides import Run, RunKind

__all__ = ["calibrate"]

_EXAMPLE = "lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])"

Step = Callable[[Callable[..., Any], Any], torch.Tensor]


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: Step | None = None,
    *,
    margin: float = 4.0,
    **options: Unpack[Options],
) -> Policy:
    """Pin to FP32 what leaves the range of the low dtype on these batches, or comes near its end.

    Nothing happens to the model, its gradients, its buffers, or the random state.

    Args:
        model: an nn.Module with FP32 parameters; if `mpcompile()` compiled it, its options hold.
        batches: what the model is trained on, a few batches of it.
        loss_fn: called with the model and a batch; calls the model and returns the loss, as
            `lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])`. Default: the batch
            is the model's argument, a tuple of its arguments or a dict of its keywords, and the
            loss is the result's `loss`, the result if it is one number, or the mean of all results.
        margin: a value that is this many times as large must still fit.
        **options: those of `mpcompile()`. The policy among them is kept, and added to.

    Returns:
        The policy, for `mpcompile(model, policy=...)`. `policy.save("pins.toml")` writes it, with
        what was observed as comments. In BF16, whose range is FP32's, nothing is pinned.

    Raises:
        MPCompileError: a bad argument, no batch, a model that mpcompile refuses or that can't be
            copied, or a loss_fn that returns no loss.
    """
    model = studied(model, "calibrate")
    check_trained(model, "calibrate")
    check_loss_fn(loss_fn, "model, batch", _EXAMPLE)
    if isinstance(batches, torch.Tensor) or not isinstance(batches, Iterable):
        raise MPCompileError(
            f"batches={kind_of(batches)}: give several, such as a DataLoader or a list, [batch]"
        )
    if not margin >= 1:
        raise MPCompileError(f"margin={margin!r}: give a number from 1")
    sides, _ = sides_of(model, options, "pin")
    seen = _Seen(float(margin))
    for batch in batches:
        if loss_fn is None:
            _check_call(model, batch)
        step = functools.partial(_step, loss_fn, batch)
        seen.add(sides.run(RunKind.FULL, step=step))
    if not seen.batches:
        raise MPCompileError("batches is empty: give some of what the model is trained on")
    return sides.settings.policy.with_pins(seen.pins())


def _step(loss_fn: Step | None, batch: Any, forward: Callable[..., Any]) -> torch.Tensor:
    return (loss_fn or _loss)(forward, batch)


def _loss(forward: Callable[..., Any], batch: Any) -> torch.Tensor:
    args, kwargs = _arguments(batch)
    return loss_of(forward(*args, **kwargs))


def _arguments(batch: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """What a model is called with, by default, for a batch."""
    if isinstance(batch, Mapping):
        return (), batch
    return (batch if isinstance(batch, (tuple, list)) else (batch,)), {}


def _check_call(model: nn.Module, batch: Any) -> None:
    """Raise if the batch is not just the model's arguments: it may hold the targets, too."""
    args, kwargs = _arguments(batch)
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise MPCompileError(
            f"{type(model).__name__} can't be called with a batch: {error}. If a batch holds the "
            f"targets, too, give loss_fn, as `{_EXAMPLE}`"
        ) from None


class _Seen:
    """The ranges seen so far.

    Attributes:
        batches: how many.
    """

    def __init__(self, margin: float) -> None:
        self.margin, self.batches = margin, 0
        self._largest: dict[str, float] = defaultdict(float)  # by node, of what doesn't fit
        self._what: dict[str, str] = {}
        self._hits: Counter[str] = Counter()

    def add(self, run: Run) -> None:
        self.batches += 1
        found = set()
        for graph, record in run.calls:
            for name, what, amax in self._out_of_range(graph, record.values, record.gradients):
                found.add(name)
                if amax > self._largest[name]:
                    self._largest[name], self._what[name] = amax, what
        self._hits.update(found)

    def pins(self) -> dict[str, str]:
        return {
            name: f"{self._what[name]} up to {amax:.2g} in {self._hits[name]} of {self.batches} "
            "batches"
            for name, amax in self._largest.items()
        }

    def _out_of_range(
        self, graph: Planned, values: Mapping[str, Numbers], gradients: Mapping[str, Numbers]
    ) -> Iterator[tuple[str, str, float]]:
        """(node, which number, its magnitude) for each operator that a low dtype would break."""
        lines = {line.name: line for line in graph.plan.nodes}
        for n in graph.rewritten.graph.nodes:
            if n.name not in lines or lines[n.name].is_added:
                continue
            for place in (n, *n.all_input_nodes):
                if _dtype(place) not in HALF:
                    continue
                end = torch.finfo(_dtype(place)).max / self.margin
                source = source_of_value(place).name
                what = "result" if place is n else f"operand {source}"
                if (amax := values.get(source, Numbers()).amax) > end:
                    yield n.name, what, amax
            # No loss scale below 1 is counted on: the other gradients need one above.
            if _dtype(n) in HALF:
                steep = gradients.get(n.name, Numbers()).amax
                if steep > torch.finfo(_dtype(n)).max / self.margin:
                    yield n.name, "gradient of the result", steep


def _dtype(n: fx.Node) -> torch.dtype:
    value = ir.tensor(n)
    return torch.float32 if value is None else value.dtype
