"""The vocabulary of a generated optimizer step: what its inputs are, and how it is to be rewritten.

The graph of a step has no outputs. Its inputs are the tensors it reads and writes, each named by a
`Slot`; what it does is the set of its `copy_` nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .scale import ScaleRule


@dataclass(frozen=True)
class Slot:
    """One input of the graph of a step.

    Attributes:
        kind: "param", "grad" or "copy", of the parameter `index`; "state", of the parameter
            `index` at `key`; "lr", of the group `index`; "scale", of the loss scale `index` at
            `key`; "result", what the step reports at `key`.
        index: which parameter (in the order of the step), group or loss scale.
        key: which entry.
    """

    kind: str
    index: int = 0
    key: str = ""

    def __str__(self) -> str:
        number = "" if self.kind == "result" else str(self.index)
        return "_".join(part for part in (self.kind + number, self.key) if part)


@dataclass(frozen=True)
class Gradient:
    """How the gradient of one parameter arrives.

    Attributes:
        dtype: as stored in `p.grad`.
        scales: the loss scales (by index) of the graphs that make it.
        scaled_by: the one it is stored multiplied by, or None: it is true to size.
    """

    dtype: torch.dtype
    scales: tuple[int, ...] = ()
    scaled_by: int | None = None


@dataclass(frozen=True)
class CopyLayout:
    """How a working copy lies in memory: its dtype, and its strides where it is stored padded."""

    dtype: torch.dtype
    strides: tuple[int, ...]


@dataclass(frozen=True)
class StepConfig:
    """One step's settings, as every pass over its graph sees them.

    Attributes:
        gradients: one for each parameter of the step.
        copies: for each parameter the layout of its working copy, or None.
        checked: whether a gradient that is not finite skips the step.
        scales: the loss scales that the gradients depend on.
        max_grad_norm: clip the global 2-norm of the true gradients to this, or None.
        foreach: write lists of tensors as one multi-tensor operator (CUDA), not one by one.
    """

    gradients: tuple[Gradient, ...]
    copies: tuple[CopyLayout | None, ...]
    checked: bool = True
    scales: tuple[ScaleRule, ...] = ()
    max_grad_norm: float | None = None
    foreach: bool = False
