"""The module that torch loads, once, for `torch.compile(model, backend="mpcompile")`."""

from __future__ import annotations

from ..devices.registry import accumulate_in_fp32
from ..scaling import hooks
from .backend import mpcompile_backend as mpcompile_backend

accumulate_in_fp32()
hooks.register()
