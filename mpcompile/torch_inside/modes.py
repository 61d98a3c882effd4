"""Modes of the dispatcher, and what runs without them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .private_names import Part, private

if TYPE_CHECKING:
    from torch._C import DisableTorchFunction as torch_functions_off
    from torch._C import _AutoDispatchBelowAutograd as below_autograd
    from torch._C import _get_tracing_state as torchscript_trace
    from torch.utils._python_dispatch import (
        TorchDispatchMode,
        is_traceable_wrapper_subclass,
    )
    from torch.utils._python_dispatch import _disable_current_modes as modes_off
    from torch.utils._python_dispatch import _get_current_dispatch_mode as current_mode
else:
    torch_functions_off = private(
        "torch._C:DisableTorchFunction", "hides a tensor from the tracer", Part.COMPILE
    )
    below_autograd = private(
        "torch._C:_AutoDispatchBelowAutograd", "runs an RNN below autograd", Part.RECURRENT
    )
    torchscript_trace = private(
        "torch._C:_get_tracing_state", "tells of TorchScript's tracer", Part.COMPILE
    )
    _DISPATCH = "torch.utils._python_dispatch"
    TorchDispatchMode = private(f"{_DISPATCH}:TorchDispatchMode", "sees operators", Part.COMPILE)
    is_traceable_wrapper_subclass = private(
        f"{_DISPATCH}:is_traceable_wrapper_subclass", "tells a subclass of tensors", Part.COMPILE
    )
    modes_off = private(f"{_DISPATCH}:_disable_current_modes", "traces a step", Part.OPTIMIZER)
    current_mode = private(
        f"{_DISPATCH}:_get_current_dispatch_mode", "finds the innermost mode", Part.COMPILE
    )

__all__ = [
    "TorchDispatchMode",
    "below_autograd",
    "current_mode",
    "is_traceable_wrapper_subclass",
    "modes_off",
    "torch_functions_off",
    "torchscript_trace",
]
