"""The vocabulary of a generated optimizer step: its inputs (`Slot`), its settings, passes' notes.

The graph of a step has no outputs. Its inputs are the tensors it reads and writes, each named by a
`Slot`; its effect is the set of its `copy_` nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import fx

from .scale import ScaleRule


@dataclass(frozen=True)
class Slot:
    """One input of the graph of a step.

    Attributes:
        kind: "param", "grad" or "copy", of the parameter `index` (where `CopyLayout.leads`, "param"
            is its master, and "copy" the parameter itself); "absent": whether it has no gradient in
            this step (`StepConfig.optional`); "grads", a vector of the gradients of the group
            `index` (`StepConfig.gathered`); "state", of the parameter `index` at `key`; "lr", of
            the group `index`; "scale", of the loss scale `index` at `key`; "result", what the step
            reports at `key`.
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
class Ranks:
    """The processes that must take a step alike, because each holds a part of its gradients.

    Attributes:
        groups: names of torch's process groups: a sum over one after the other is one over all.
        device: the kind of device whose tensors these groups exchange.
    """

    groups: tuple[str, ...]
    device: str


@dataclass(frozen=True)
class StepConfig:
    """The settings of one step, as its passes see them.

    Attributes:
        gradients: one for each parameter of the step.
        copies: for each parameter the layout of its low copy, or None.
        checked: whether a gradient that is not finite skips the step.
        scales: the loss scales that the gradients depend on.
        max_grad_norm: clip the global 2-norm of the gradients to this, or None.
        foreach: write lists of tensors as one multi-tensor operator (CUDA), not one by one.
        ranks: the processes that each hold a part of the gradients, or None: this one has all.
        gathered: groups of alike gradients (by index), each with an element, that lie one behind
            the other in memory.
        optional: whether parameters may have no gradient in a step, and are left as they are then.
            Each has zeros for a gradient there, and the input "absent" says so.
    """

    gradients: tuple[Gradient, ...]
    copies: tuple[CopyLayout | None, ...]
    checked: bool = True
    scales: tuple[ScaleRule, ...] = ()
    max_grad_norm: float | None = None
    foreach: bool = False
    ranks: Ranks | None = None
    gathered: tuple[tuple[int, ...], ...] = ()
    optional: bool = False


T = TypeVar("T")


class _Note(Generic[T]):
    """A field of `StepNotes`, set by the pass `maker`; reading it earlier is an error."""

    def __init__(self, maker: str) -> None:
        self.maker = maker

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, notes: object, owner: type | None = None) -> T:
        if self.name not in vars(notes):
            raise RuntimeError(
                f"nothing has noted {self.name!r} for this step: {self.maker} makes it, and must "
                "run before the passes that read it"
            )
        found: T = vars(notes)[self.name]
        return found

    def __set__(self, notes: object, value: T) -> None:
        vars(notes)[self.name] = value


class StepNotes:
    """What the passes over one step leave for later passes: nodes of the step's graph.

    Each field is set by one pass. Reading a field that isn't set yet raises RuntimeError, which
    names that pass.

    Attributes:
        start: the first operator of the traced step; nodes that prepare gradients go before it.
            Made by widen_gradients; read by all passes that add such nodes.
        gradients: for each parameter, its gradient in the parameter's dtype. Made by
            widen_gradients; read by clip_gradients.
        norms: 0-d, for each parameter, a norm of its gradient as stored: inf or nan exactly if an
            element of it is. The 2-norm where gradients are clipped, else the largest magnitude.
            Gradients that are gathered have one norm, that of all of their group.
            Empty if the step is neither checked nor clipped. Made by measure_gradients; read by
            find_overflows, clip_gradients, and where the step is cut into pieces.
        total: 0-d: the 2-norm of all gradients. Made by measure_gradients, if gradients
            are clipped; agree_on_ranks makes it that of all ranks; read by clip_gradients.
        overflows: 0-d bool, for each loss scale: whether a gradient that depends on it is not
            finite. Made by find_overflows, if the step is checked; agree_on_ranks makes it that of
            all ranks; read by check_gradients and move_scale.
        agreement: the nodes that exchange numbers with other ranks. Empty if there are none. Made
            by agree_on_ranks; read where the step is cut into pieces.
        skip: 0-d bool: whether the step must change nothing. Made by check_gradients, if the step
            is checked; read by predicate_writes.
    """

    start: _Note[fx.Node] = _Note("widen_gradients")
    gradients: _Note[list[fx.Node]] = _Note("widen_gradients")
    norms: _Note[list[fx.Node]] = _Note("measure_gradients")
    total: _Note[fx.Node] = _Note("measure_gradients")
    overflows: _Note[list[fx.Node]] = _Note("find_overflows")
    agreement: _Note[list[fx.Node]] = _Note("agree_on_ranks")
    skip: _Note[fx.Node] = _Note("check_gradients")
