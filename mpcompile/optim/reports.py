"""What the steps of an optimizer report: values on the device, and what is read without waiting."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..ir.step import Slot
from ..scaling.loss_scale import LossScale

_DTYPES = {"skipped": torch.bool, "norm": torch.float32}


class Results:
    """The 0-d tensors that all steps of one optimizer write: whether the last step was "skipped"
    (bool), and the global "norm" of its gradients before clipping (FP32).
    """

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}

    def read(self, name: str, before: Any) -> torch.Tensor:
        """The value reported last; the number `before` if no step has run. It is a copy: the next
        step writes to the tensor itself, and whoever collects the values of all steps keeps each.
        """
        return self._tensors[name].clone() if name in self._tensors else torch.tensor(before)

    def write(self, name: str, value: torch.Tensor) -> None:
        self._tensor(name, value.device).copy_(value)

    def slots(self, device: torch.device) -> dict[Slot, torch.Tensor]:
        """The tensors, by their slots in a step's graph; made on that device if need be."""
        return {Slot("result", key=name): self._tensor(name, device) for name in _DTYPES}

    def _tensor(self, name: str, device: torch.device) -> torch.Tensor:
        if name not in self._tensors:
            self._tensors[name] = torch.zeros((), dtype=_DTYPES[name], device=device)
        return self._tensors[name]


class Notices:
    """Tells loss scales of each generated step, once it has run."""

    def __init__(self) -> None:
        self._scales: tuple[LossScale, ...] = ()

    def follow(self, scales: Iterable[LossScale]) -> None:
        """A generated step has run over the gradients of these scales."""
        self._scales = tuple(scales)

    def look(self) -> None:
        for scale in self._scales:
            scale.stepped()
        self._scales = ()
