"""The operator that casts many tensors at once.

    cast_all(tensors, dtype) -> tensors         each in memory of its own, laid out as it was

On a GPU that is one kernel (`torch._foreach_copy_`), where each cast by itself would be one. As an
operator of our own it tells Inductor that its operands must lie as the graph says.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..torch_inside.tensors import copy_all

_LIBRARY = torch.library.Library("mpcompile", "FRAGMENT")
_LIBRARY.define(
    "cast_all(Tensor[] tensors, ScalarType dtype) -> Tensor[]",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


def _cast_all(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    made = _fake_cast_all(tensors, dtype)
    copy_all(made, list(tensors))
    return made


def _fake_cast_all(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.empty_like(t, dtype=dtype) for t in tensors]


_LIBRARY.impl("cast_all", _cast_all, "CompositeExplicitAutograd")
torch.library.register_fake("mpcompile::cast_all", _fake_cast_all, lib=_LIBRARY)
