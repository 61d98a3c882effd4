"""The tensors that a whole step takes besides the inputs that Dynamo passes."""

from __future__ import annotations

import torch


class ExtraInputs:
    """Tensors that live between the steps: optimizer state, working copies, loss scales, settings.

    Attributes:
        tensors: in the order in which the step takes them.
        fresh: the numbers of those that are replaced in each step; all others stay where they are.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.fresh: set[int] = set()
        self._numbers: dict[int, int] = {}

    def add(self, tensor: torch.Tensor) -> int:
        """The number of a tensor that stays; each is held once."""
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = self._append(tensor)
        return self._numbers[id(tensor)]

    def add_fresh(self, tensor: torch.Tensor) -> int:
        """The number of a tensor like this one that each step replaces."""
        number = self._append(tensor)
        self.fresh.add(number)
        return number

    def _append(self, tensor: torch.Tensor) -> int:
        self.tensors.append(tensor)
        return len(self.tensors) - 1
