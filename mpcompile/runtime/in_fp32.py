"""A watched call once more, in FP32, forward and backward.

It runs when the step that was skipped is over: the parameters have not changed, and the call's own
activations are gone. It takes the inputs and random numbers of the call, and the gradients that
entered its results.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from ..devices.generators import RandomState, unchanged
from ..observe.record import Record
from ..observe.watch import Watch, passed
from ..scaling.not_finite import Seen

__all__ = ["InFP32"]


class InFP32:
    """What the FP32 run of one call needs.

    Args:
        captured: the captured graph.
        given: its inputs, with copies of those that the call writes to.
        tracked: of each input, whether autograd tracks it.
        random: the random state before the call.
    """

    def __init__(
        self,
        captured: fx.GraphModule,
        given: Sequence[Any],
        tracked: Iterable[bool],
        random: RandomState,
    ) -> None:
        self._captured, self._random = captured, random
        # Leaves of its own: no gradient and no hook of the caller's is touched.
        self._inputs = [
            x.detach().requires_grad_(need) if isinstance(x, torch.Tensor) else x
            for x, need in zip(given, tracked, strict=True)
        ]
        self._received: dict[int, torch.Tensor] = {}  # by the number of the result
        self._results: list[torch.Tensor] = []

    def seen(self) -> Seen:
        """What was not finite of the call."""
        names = [n.name for n in self._captured.graph.find_nodes(op="placeholder")]
        return Seen.of(names, self._inputs, self._results, self._received.values())

    def watch(self, results: Sequence[Any]) -> None:
        """Note the gradients that will enter these results of the call."""
        tensors = [(i, x) for i, x in enumerate(results) if isinstance(x, torch.Tensor)]
        self._results = [x.detach() for _, x in tensors]
        first = {id(x): (i, x) for i, x in reversed(tensors)}  # one may be returned twice
        for i, result in first.values():
            if result.requires_grad and result.grad_fn is not None:
                result.register_hook(functools.partial(self._entered, i))

    # Where a whole training step is compiled, Dynamo would trace what runs in its backward.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _entered(self, number: int, gradient: torch.Tensor | None) -> None:
        if gradient is not None:  # autograd's zero, in torch 2.11
            known, new = self._received.get(number), gradient.detach()
            self._received[number] = new if known is None else known + new

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def run(self) -> Record | None:
        """What the run recorded; the values alone where its backward failed, and None where not
        even the forward was possible.
        """
        record = Record()
        tensors = [x for x in self._inputs if isinstance(x, torch.Tensor)]
        try:
            if any(x.numel() and not x.untyped_storage().size() for x in tensors):
                return None  # FSDP frees a parameter between uses
            with unchanged({x.device for x in tensors}), torch.enable_grad():
                self._random.restore()
                results = Watch(self._captured, record).run(*map(passed, self._inputs))
                into = [(results[i], grad) for i, grad in self._received.items()]
                into = [(x, grad.to(x.dtype)) for x, grad in into if x.requires_grad]
                if into:
                    torch.autograd.backward([x for x, _ in into], [grad for _, grad in into])
        except Exception:  # memory ran out, perhaps; what is known already has its use
            return Record(values=record.values) if record.values else None
        return record
