"""Which memory operators write to while they run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Writes(TorchDispatchMode):
    """Notes the memory that is written within this context, through views and `.data` as well.

    `tensor in writes`: whether the memory of a tensor was written. Read from the operators'
    schemas: batch norm says nothing there of its running statistics.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = func._schema.arguments
        given = {**{a.name: x for a, x in zip(schema, args, strict=False)}, **kwargs}
        for argument in schema:
            if argument.is_write and argument.name in given:
                value = given[argument.name]
                for one in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(one, torch.Tensor):
                        self._memory.add(_memory(one))
        return func(*args, **kwargs)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return _memory(tensor) in self._memory


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
