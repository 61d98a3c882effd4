"""The vocabulary of a generated optimizer step: its inputs (`Slot`) and its settings.

A graph of a step has no outputs. Its inputs are the tensors it reads and writes, each named by a
`Slot`; its effect is the set of its `copy_` nodes. There are two kinds: one decides (whether to
skip, by what to clip, how the loss scale moves), the others update parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ..ranks.shards import Connected
from .scale import ScaleRule


@dataclass(frozen=True)
class Slot:
    """One input of the graph of a step.

    Attributes:
        kind: "param", "grad" or "copy", of the parameter `index` (where `CopyLayout.leads`, "param"
            is its master, and "copy" the parameter itself); "state", of the parameter `index` at
            `key`; "lr" or "setting", of the param group `index`; "norm", that of the gradient
            `index`, or "norms", a vector of those of one kind (`StepConfig.alike`); "scale", of the
            loss scale `index` at `key`; "number", a 0-d tensor that one graph leaves for another;
            "result", what the step reports at `key`; "factor", by which gradients are clipped.
        index: which parameter (in the order of the step), group or loss scale.
        key: which entry.
    """

    kind: str
    index: int = 0
    key: str = ""

    def __str__(self) -> str:
        number = "" if self.kind in ("result", "factor") else str(self.index)
        return "_".join(part for part in (self.kind + number, self.key) if part)


SKIPPED = Slot("result", key="skipped")  # 0-d bool: the step changes nothing
NORM = Slot("result", key="norm")  # 0-d FP32: of all gradients, before clipping
FACTOR = Slot("factor")  # 0-d, in the dtype of the norm


@dataclass(frozen=True)
class Gradient:
    """How the gradient of one parameter is stored when the step reads it.

    Attributes:
        dtype: of `p.grad`.
        scales: the loss scales (by index) of the graphs that make it.
        replicas: on how many of the ranks that agree each of its elements lies.
    """

    dtype: torch.dtype
    scales: tuple[int, ...] = ()
    replicas: int = 1


@dataclass(frozen=True)
class CopyLayout:
    """How a low copy of a master lies in memory.

    Attributes:
        dtype, strides: those of the copy; it may be a part of what is stored padded.
        leads: whether it is what the model and its users know, and may write: it is the parameter,
            and the optimizer alone knows the master.
    """

    dtype: torch.dtype
    strides: tuple[int, ...]
    leads: bool = False


@dataclass(frozen=True)
class StepConfig:
    """The settings of one step, as its passes see them.

    Attributes:
        gradients: one for each parameter of the step.
        copies: for each parameter the layout of its low copy, or None.
        checked: whether a gradient that is not finite skips the step.
        scales: the loss scales that the gradients depend on.
        max_grad_norm: clip the global 2-norm of the gradients to this, or None.
        ranks: the processes that must take a step alike, because each holds a part of its
            gradients, or None: this one has all.
    """

    gradients: tuple[Gradient, ...]
    copies: tuple[CopyLayout | None, ...]
    checked: bool = True
    scales: tuple[ScaleRule, ...] = ()
    max_grad_norm: float | None = None
    ranks: Connected | None = None

    @property
    def clipped(self) -> bool:
        return self.max_grad_norm is not None

    @cached_property
    def alike(self) -> Mapping[tuple[tuple[int, ...], int], Sequence[int]]:
        """(of which loss scales, on how many ranks) -> the gradients (by index) of this kind."""
        found: dict[tuple[tuple[int, ...], int], list[int]] = {}
        for i, gradient in enumerate(self.gradients):
            found.setdefault((gradient.scales, gradient.replicas), []).append(i)
        return found

    @cached_property
    def norm_dtype(self) -> torch.dtype:
        """That of norms: FP32, or FP64 if some gradient is, because of its range."""
        wide = any(g.dtype is torch.float64 for g in self.gradients)
        return torch.float64 if wide else torch.float32
