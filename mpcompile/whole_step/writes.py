"""Which memory operators write to while they run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..torch_inside.graphs import schema
from ..torch_inside.names import TorchDispatchMode
from ..torch_inside.tensors import storage_of


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
        declared = schema(func).arguments
        given = {**{a.name: x for a, x in zip(declared, args, strict=False)}, **kwargs}
        for argument in declared:
            if argument.is_write and argument.name in given:
                value = given[argument.name]
                for one in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(one, torch.Tensor):
                        self._memory.add(storage_of(one))
        return func(*args, **kwargs)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return storage_of(tensor) in self._memory
