"""Where a node stands in the program: its grad mode, autocast region and activation checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from ..ir import Region, is_opaque
from ..ir.targets import AUTOCAST, ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD_ENABLED
from .surroundings import Around


@dataclass(frozen=True)
class ReplayState:
    """The place in the program that the replay has reached, bodies included.

    Attributes:
        devices: those whose autocast regions count.
        autocasts: (device type, dtype, enabled) of the enclosing regions, outermost first.
        checkpoints: the enclosing activation checkpoints, outermost first.
        stored: the low dtype, if parameters of the program are stored in it.
    """

    devices: frozenset[str]
    autocasts: list[tuple[str, torch.dtype | None, bool]]
    checkpoints: tuple[Region, ...] = ()
    stored: torch.dtype | None = None

    @property
    def named(self) -> torch.dtype | None:
        """The dtype that the program has, and names, where the capture has FP32; None: FP32."""
        autocast = self.autocast()
        return self.stored if autocast is None else autocast[1]

    def autocast(self) -> tuple[str, torch.dtype | None] | None:
        """Device type and dtype of the autocast in force here."""
        relevant = [region for region in self.autocasts if region[0] in self.devices]
        device, dtype, enabled = relevant[-1] if relevant else ("", None, False)
        return (device, dtype) if enabled else None


def record_modes(graph: fx.Graph, around: Around) -> None:
    """Write each node's grad mode and autocast region into its meta; drop the autocast nodes."""
    grad = True
    stack = [around.region]
    program = [n for n in graph.nodes if not is_opaque(n) or n.target not in AUTOCAST]
    for node in program:
        if node.target is SET_GRAD_ENABLED:
            grad = bool(node.args[0])
        elif node.target is ENTER_AUTOCAST:
            device, dtype, enabled, _cache = node.args
            stack.append((bool(enabled), dtype) if device in around.devices else stack[-1])
        elif node.target is EXIT_AUTOCAST:
            stack.pop()
        node.meta["mp_grad"] = grad
        node.meta["mp_autocast"] = stack[-1]
    for node in reversed(program):
        if node.target in AUTOCAST:
            graph.erase_node(node)
