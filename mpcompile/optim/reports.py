"""What an optimizer reports: of its steps, values on the device, and what is read without waiting;
and the memory that it holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from ..ir.step_config import Slot
from ..scaling.copies import copies_of
from ..scaling.parameters import parameters_of
from .masters import MASTER, is_low

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

    def slots(self, device: torch.device) -> dict[Slot, torch.Tensor]:
        """The tensors, by their slots in a step's graph; made on that device if need be."""
        for name, dtype in _DTYPES.items():
            if name not in self._tensors:
                self._tensors[name] = torch.zeros((), dtype=dtype, device=device)
        return {Slot("result", key=name): tensor for name, tensor in self._tensors.items()}


def held_by(
    optimizer: Optimizer, state: Mapping[torch.Tensor, Mapping[str, Any]]
) -> dict[str, float]:
    """Average bytes held for each element of a parameter of an optimizer, by kind.

    Args:
        state: that of the parameters.
    """
    params = parameters_of(optimizer)
    low = [p for p in params if is_low(p)]
    entries = [(k, v) for p in params for k, v in state.get(p, {}).items()]
    tensors = [(k, v) for k, v in entries if isinstance(v, torch.Tensor)]
    masters = [v for k, v in tensors if k == MASTER]
    copies = [c.stored for p in params for c in copies_of(p).values()]
    kinds = {
        "masters": [*(p for p in params if not is_low(p)), *masters],
        "copies": [*low, *copies],
        "gradients": [p.grad for p in params if p.grad is not None],
        "state": [v for k, v in tensors if k != MASTER],
    }
    elements = sum(p.numel() for p in params)
    return {
        kind: sum(t.numel() * t.element_size() for t in held) / elements
        for kind, held in kinds.items()
    }
