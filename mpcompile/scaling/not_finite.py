"""What was not finite before any gradient was: then no loss scale helps, and users should look at
their data or their loss.

Each graph of a step is looked at, in the order of the forward. The first that got NaN or made it
tells: NaN that it got came with the data; if the results of all graphs are finite, and the gradient
that came back is not, then that is the loss's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .overflows import any_nonfinite


@dataclass(frozen=True)
class Seen:
    """One call of a graph in a step whose gradients are not finite.

    Attributes:
        inputs: the names of its inputs that hold NaN or infinity.
        parameters: whether all of these are parameters.
        results, received: whether a result of it, or a gradient that it received, is not finite.
    """

    inputs: tuple[str, ...]
    parameters: bool
    results: bool
    received: bool

    @classmethod
    def of(
        cls, names: Sequence[str], inputs: Sequence[Any], results: Sequence[Any],
        received: Sequence[torch.Tensor],
    ) -> Seen:  # fmt: skip
        """Look at the tensors of a call; waits for the device.

        Args:
            names: of the inputs that the caller passed, which come first.
        """
        bad = [(n, x) for n, x in zip(names, inputs, strict=False) if is_bad(x)]
        return cls(
            tuple(name for name, _ in bad),
            all(x.is_leaf and x.requires_grad for _, x in bad),
            bool(any_nonfinite([x.detach() for x in results if _is_float(x)])),
            bool(any_nonfinite(received)),
        )

    @property
    def hopeless(self) -> bool:
        """Whether this graph's gradients are finite at no scale."""
        return self.results or self.received


def outside(calls: Sequence[Seen]) -> str | None:
    """What is not finite, if the graphs did not make it, and where to look.

    Args:
        calls: the graphs of one step, in the order of the forward.
    """
    for call in calls:
        if call.inputs:
            what, where = ", ".join(call.inputs), "look at the data"
            if call.parameters:
                where = "look at what wrote to these parameters"
            return f"what the model was called with holds NaN or infinity ({what}): {where}"
        if call.results:
            return None
    if calls and calls[-1].received:
        return (
            "the model's results are finite, and the gradient that comes back from the loss is "
            "not: look at the targets and at the loss"
        )
    return None


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def is_bad(value: Any) -> bool:
    """Whether an input is not finite. Minus infinity is: it masks out."""
    if not _is_float(value):
        return False
    value = value.detach()
    dense = value.coalesce().values() if value.is_sparse else value
    return bool((dense.isnan() | dense.isposinf()).any())
