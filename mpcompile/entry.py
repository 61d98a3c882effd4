"""What torch loads for `torch.compile(model, backend="mpcompile")`, once and before it compiles."""

from __future__ import annotations

from .backend import mpcompile_backend
from .emit.accumulation import accumulate_in_fp32
from .emit.frozen import see_what_trains
from .state import hooks

__all__ = ["mpcompile_backend"]

accumulate_in_fp32()
see_what_trains()
hooks.register()
