"""What a graph is planned for: facts about a device, from the device itself or a data sheet.

    target = target_of(torch.device("cuda"), None)              # the GPU at hand, dtype="auto"
    target = target_of(AbsentGPU(gpu("t4")), torch.float16)     # one that isn't there

A plan depends on no other facts of the device, nor on where tensors lie while the plan is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import profile
from ..devices.capabilities import Capabilities
from ..devices.registry import capabilities, is_supported
from ..errors import CannotRewrite
from ..ir.text import Place
from ..rules import kernels
from ..rules.policy import Target


def target_of(of: torch.device | Capabilities, dtype: torch.dtype | None) -> Target:
    """The target for a device.

    Args:
        of: a device of this machine; or the capabilities of one that need not exist, which is not
            asked itself, and is assumed to have all kernels.
        dtype: what the user asked for; None: "auto".

    Raises:
        MPCompileError: the device type is not supported; `MPCOMPILE_PROFILE` is not a profile.
    """
    asked, absent = (of, True) if isinstance(of, Capabilities) else (capabilities(of), False)
    low = dtype or asked.auto
    return Target(
        device=asked.device,
        low=low,
        # The profile decides which products gain. Whoever names a dtype gets it, also a slow one:
        # FP16 on a CPU, say, to see what it does to the numbers.
        profile=profile.load(of) if dtype is None else None,
        promised=dtype is not None or asked.has_units(low),
        cores=asked.matrix_units(),
        has_kernel=lambda node: absent or kernels.has_kernel(node, low, asked.device),
    )


def place_of(inputs: Sequence[Any]) -> torch.device:
    """The device of a graph's parameters; without parameters, that of its first tensor."""
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    parameters = [x for x in tensors if isinstance(x, torch.nn.Parameter)]
    return (parameters or tensors)[0].device if tensors else torch.device("cpu")


def device_of(inputs: Sequence[Any]) -> torch.device:
    """The device to plan a graph for. Raises CannotRewrite if mpcompile doesn't support it."""
    device = place_of(inputs)
    if not is_supported(device):
        raise CannotRewrite(f"device {device.type!r} is not supported")
    return device


MOST = 8  # repairs of one training


@dataclass
class Repairs:
    """The operators that are pinned, and the events that led to it.

    Attributes:
        events: one sentence for each repair, in order.
        pins: the operators -> the reason; replaced by each repair.
    """

    events: list[str] = field(default_factory=list)
    pins: Mapping[Place, str] = field(default_factory=dict)

    @property
    def used_up(self) -> bool:
        return len(self.events) >= MOST

    def add(self, event: str, pins: Mapping[Place, str]) -> None:
        """Pin operators, each with its reason; takes effect where a graph is compiled."""
        self.events.append(event)
        self.pins = {**self.pins, **pins, **self.pins}
