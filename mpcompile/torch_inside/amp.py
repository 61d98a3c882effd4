"""Autocast and GradScaler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .private_names import Part, attribute, private

if TYPE_CHECKING:
    import torch
    from torch._C import _DisableAutocast as autocast_off
    from torch._C import _is_any_autocast_enabled as autocast_is_on
    from torch.amp.autocast_mode import _enter_autocast as enter_autocast
    from torch.amp.autocast_mode import _exit_autocast as exit_autocast
else:
    # `torch.autocast(device_type, enabled=False)` turns off one device type's, and takes longer.
    autocast_off = private(
        "torch._C:_DisableAutocast", "turns off autocast on all devices", Part.COMPILE
    )
    autocast_is_on = private(
        "torch._C:_is_any_autocast_enabled", "tells of the caller's autocast", Part.COMPILE
    )
    enter_autocast = private(
        "torch.amp.autocast_mode:_enter_autocast", "begins autocast in Dynamo's graph", Part.COMPILE
    )
    exit_autocast = private(
        "torch.amp.autocast_mode:_exit_autocast", "ends autocast in Dynamo's graph", Part.COMPILE
    )

__all__ = [
    "autocast_is_on",
    "autocast_off",
    "enter_autocast",
    "exit_autocast",
    "is_enabled",
]


def is_enabled(autocast: torch.autocast) -> bool:
    """Whether it turns autocast on where it is entered: not with `enabled=False`."""
    return autocast._enabled


attribute("torch:autocast._enabled", "tells autocast from its absence", Part.COMPILE)
attribute("torch._C:_DisableAutocast()", "turns off autocast on all devices", Part.COMPILE)
