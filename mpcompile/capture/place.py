"""Where a node stands in the program: its grad mode, autocast region and activation checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..ir import Region, is_opaque
from ..ir.targets import AUTOCAST, ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD_ENABLED
from .regions import region_around


@dataclass(frozen=True)
class Place:
    """The place in the program that the replay has reached, bodies included.

    Attributes:
        devices: device types of the graph's inputs, and the one it is planned for; autocast regions
            of others don't matter.
        autocasts: (device type, dtype, enabled) of the enclosing regions, outermost first.
        checkpoints: the enclosing activation checkpoints, outermost first.
    """

    devices: frozenset[str]
    autocasts: list[tuple[str, torch.dtype | None, bool]]
    checkpoints: tuple[Region, ...] = ()

    @classmethod
    def of(cls, inputs: Sequence[Any], planned_for: str | None) -> Place:
        types = {x.device.type for x in inputs if isinstance(x, torch.Tensor)}
        devices = frozenset(types | ({planned_for} if planned_for else set()))
        ambient: list[tuple[str, torch.dtype | None, bool]] = [
            (device, torch.get_autocast_dtype(device), True)
            for device in sorted(devices)
            if torch.is_autocast_enabled(device)
        ]
        return cls(devices, ambient)

    def autocast(self) -> tuple[str, torch.dtype | None] | None:
        """Device type and dtype of the autocast in force here."""
        relevant = [region for region in self.autocasts if region[0] in self.devices]
        device, dtype, enabled = relevant[-1] if relevant else ("", None, False)
        return (device, dtype) if enabled else None


def record_modes(graph: fx.Graph, devices: frozenset[str]) -> None:
    """Write each node's grad mode and autocast region into its meta; drop the autocast nodes."""
    grad = True
    stack = [region_around(devices)]
    program = [n for n in graph.nodes if not is_opaque(n) or n.target not in AUTOCAST]
    for node in program:
        if node.target is SET_GRAD_ENABLED:
            grad = bool(node.args[0])
        elif node.target is ENTER_AUTOCAST:
            device, dtype, enabled, _cache = node.args
            stack.append((bool(enabled), dtype) if device in devices else stack[-1])
        elif node.target is EXIT_AUTOCAST:
            stack.pop()
        node.meta["mp_grad"] = grad
        node.meta["mp_autocast"] = stack[-1]
    for node in reversed(program):
        if node.target in AUTOCAST:
            graph.erase_node(node)
