"""Observed ranges become pins: `policy = calibrate(model, batches, loss_fn)`.

A copy of the model runs in FP32, forward and backward, on each batch. What the low dtype could not
hold, with a margin, is kept in FP32. The weights stay as they are: calibrate again after the model
has changed much.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from typing_extensions import Unpack

from ..errors import MPCompileError, kind_of
from ..ir.dtypes import HALF
from ..observe.fault import GraphRuns, dtype_of
from ..observe.record import Record
from ..rules.policy import Policy
from ..runtime.records import studied
from ..settings import Options
from .check_arguments import check_loss_fn, check_trained
from .diagnose import loss_of, sides_of
from .sides import Run

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
    given: Any = margin  # a number of NumPy's, too
    if not (isinstance(given, numbers.Real) and float(given) >= 1):
        raise MPCompileError(f"margin={margin!r}: give a number from 1")
    sides, _ = sides_of(model, options, "pin")
    seen: list[dict[str, tuple[float, str]]] = []
    for batch in batches:
        if loss_fn is None:
            _check_call(model, batch)

        def step(forward: Callable[..., Any], batch: Any = batch) -> torch.Tensor:
            return (loss_fn or _loss)(forward, batch)

        seen.append(_largest(sides.run("fp32", step=step), float(margin)))
    if not seen:
        raise MPCompileError("batches is empty: give some of what the model is trained on")
    return sides.settings.policy.with_pins(_pins(seen))


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


def _pins(seen: Sequence[Mapping[str, tuple[float, str]]]) -> dict[str, str]:
    """The nodes to pin, each with the reason; of each batch what `_largest` found."""
    pins = {}
    for name, hits in Counter(name for batch in seen for name in batch).items():
        amax, what = max((one[name] for one in seen if name in one), key=lambda found: found[0])
        pins[name] = f"{what} up to {amax:.2g} in {hits} of {len(seen)} batches"
    return pins


def _largest(run: Run, margin: float) -> dict[str, tuple[float, str]]:
    """By operator that a low dtype would break: the largest number there, and which it is."""
    found: dict[str, tuple[float, str]] = {}
    for graph, record in run.calls:
        case = GraphRuns(graph.rewritten.graph, graph.plan, low=Record(), full=record)
        for n in filter(case.is_program, case.graph.nodes):
            large = list(case.too_large(n, margin))
            # No loss scale below 1 is counted on: the other gradients need one above.
            steep = case.gradient_amax(n.name)
            if dtype_of(n) in HALF and torch.finfo(dtype_of(n)).max / margin < steep < math.inf:
                large.append(("gradient of the result", steep))
            for what, amax in large:
                if n.name not in found or amax > found[n.name][0]:
                    found[n.name] = amax, what
    return found
