"""The parameters that take part in a step, what it is compiled for, and the inputs of its graph."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.optim import Optimizer

from ..errors import MPCompileError
from ..ir.fakes import like
from ..ir.scale import ScaleRule
from ..ir.step_config import CopyLayout, Gradient, Slot
from ..ranks.shards import Connected, layout_of, local, place_gradient
from ..ranks.zero import partition_of
from ..scaling import copies, parameters
from ..scaling.copies import WorkingCopy
from ..scaling.loss_scale import LossScale
from ..scaling.parameters import parameters_of
from ..torch_inside.names import ConstantSource, FakeTensorMode
from .masters import entries_of, updated_by


@dataclass(frozen=True)
class StepConfig:
    """The settings of one step, as its graphs are made for them.

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


class Member(NamedTuple):
    """A parameter that takes part in a step.

    Attributes:
        group: the index of its param group.
        param: the parameter; of a DTensor, the step sees the local tensor.
        updated: whether this step updates it. Else its gradient is checked and measured only, and
            another rank updates it (ZeRO).
    """

    group: int
    param: torch.Tensor
    updated: bool = True


Setting = tuple[int, str]  # (index of the param group, name)


def members_of(optimizer: Optimizer, *, sharded: bool) -> list[Member]:
    """The parameters that have a gradient.

    Args:
        sharded: whether some parameters may be DTensors. Their gradients are then placed like them.

    Raises:
        MPCompileError: a gradient is sparse, or lies on other ranks than its parameter.
    """
    own = set(map(id, parameters_of(partition_of(optimizer))))  # of ZeRO, those of this rank
    members: list[Member] = []
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            grad = param.grad
            if grad is None or param.numel() == 0:
                continue
            if sharded:
                place_gradient(param)
                grad = local(param.grad)
            if grad.layout is not torch.strided:
                raise MPCompileError(
                    f"MPOptimizer: a gradient of shape {tuple(param.shape)} is sparse; make it "
                    "dense (nn.Embedding(sparse=False)), or use the plain torch.optim optimizer"
                )
            members.append(Member(index, param, id(param) in own))
    return members


@dataclass(frozen=True)
class StepKey:
    """What a step is compiled for: which parameters have a gradient, and how it is stored.

    Attributes:
        facts: what keys are compared by; all else follows from it.
        scales: the loss scales of the members' models.
        connected: the ranks that each hold a part of these parameters, or None.
        gradients, copies, strides: one entry for each member; the strides are those of its gradient
            as this rank holds it.
    """

    facts: tuple[Any, ...]
    members: tuple[Member, ...] = field(compare=False)
    scales: tuple[LossScale, ...] = field(compare=False)
    gradients: tuple[Gradient, ...] = field(compare=False)
    copies: tuple[WorkingCopy | None, ...] = field(compare=False)
    strides: tuple[tuple[int, ...], ...] = field(compare=False)
    connected: Connected | None = field(compare=False)

    @classmethod
    def of(
        cls,
        members: Sequence[Member],
        own: LossScale | None,
        connected: Connected | None = None,
        *,
        arriving: Sequence[Stored] = (),
    ) -> StepKey:
        """The key of a step over these members, which have gradients or will be given those that
        are `arriving`; `own` scales parameters of no scaled model.
        """
        params = [member.param for member in members]
        others = (own,) if own is not None else ()
        known = [tuple(parameters.scales_of(p)) or others for p in params]
        scales = tuple(dict.fromkeys(itertools.chain.from_iterable(known)))
        stored = arriving or [*map(Stored.of, params)]
        layouts = [layout_of(p) if connected and connected.countable else None for p in params]
        gradients = tuple(
            Gradient(how.dtype, tuple(map(scales.index, some)), layout.replicas if layout else 1)
            for how, some, layout in zip(stored, known, layouts, strict=True)
        )
        held = tuple(next(iter(copies.copies_of(p).values()), None) for p in params)
        strides = tuple(how.strides for how in stored)
        who = tuple((id(m.param), m.group, m.updated) for m in members)
        scaled = tuple(tuple(map(id, some)) for some in known)
        rules = tuple((id(scale), scale.rule) for scale in scales)
        facts = (who, gradients, scaled, tuple(map(id, held)), strides, rules, connected)
        return cls(facts, tuple(members), scales, gradients, held, strides, connected)

    @property
    def checked(self) -> bool:
        """Whether a gradient that is not finite skips the step."""
        return any(scale.active for scale in self.scales)

    @cached_property
    def is_wide(self) -> bool:
        """Whether some gradient is FP64; the factor by which all are clipped is FP64 then."""
        return any(gradient.dtype is torch.float64 for gradient in self.gradients)


class Stored(NamedTuple):
    """How a gradient is stored: its dtype and its strides."""

    dtype: torch.dtype
    strides: tuple[int, ...]

    @classmethod
    def of(cls, param: torch.Tensor) -> Stored:
        """How the gradient of a parameter, which has one, is stored."""
        grad = local(param.grad)  # type: ignore[arg-type]
        return cls(grad.dtype, grad.stride())


class Inputs:
    """The inputs of a step over the parameters that have a gradient.

    Args:
        varying: settings whose floats are inputs.
        strides: those of the gradients.

    Attributes:
        values: by slot, the value of each input: a FakeTensor or, for a float of a setting, a
            symbol.
        symbols: the slot of each symbolic number -> its symbol.
        shape_env: collects the assumptions about the symbols.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        members: Sequence[Member],
        varying: Iterable[Setting],
        strides: Sequence[Sequence[int]],
    ) -> None:
        self.values: dict[Slot, Any] = {}
        self.symbols: dict[Slot, sympy.Symbol] = {}
        self.shape_env = ShapeEnv()
        groups = optimizer.param_groups
        with FakeTensorMode(shape_env=self.shape_env):
            # Each fake has its own memory: `from_tensor` would share memory between fakes of one
            # tensor.
            for i, member in enumerate(members):
                param, updated = member.param, member.updated
                held = local(updated_by(optimizer, param) if updated else param)
                if updated:
                    self.values[Slot("param", i)] = like(held)
                # The gradient as the optimizer will see it: in the dtype that is updated, with its
                # own strides.
                self.values[Slot("grad", i)] = like(held, strides=strides[i])
                for key, value in entries_of(optimizer, param).items():
                    if updated and isinstance(value, torch.Tensor):
                        self.values[Slot("state", i, str(key))] = like(local(value))
            for index in sorted({m.group for m in members if m.updated}):
                if has_lr(groups[index]):
                    lr = torch.zeros((), dtype=torch.float64, device=members[0].param.device)
                    self.values[Slot("lr", index)] = lr
        for slot, number in setting_floats(groups, varying).items():
            source = ConstantSource(str(slot))
            symbol = self.symbols[slot] = self.shape_env.create_unspecified_symbol(
                number, source=source, dynamic_dim=DimDynamic.DYNAMIC
            )
            made = self.shape_env.create_symfloatnode(symbol, hint=number, source=source)
            self.values[slot] = made


def has_lr(group: Mapping[str, Any]) -> bool:
    """Whether a param group's learning rate is a number, which makes it an input of the graph."""
    lr = group.get("lr")
    return isinstance(lr, (int, float, torch.Tensor)) and not isinstance(lr, bool)


def setting_floats(
    groups: Sequence[Mapping[str, Any]], varying: Iterable[Setting]
) -> dict[Slot, float]:
    """The floats in these settings, by the slot that each has as an input of the graph."""
    found: dict[Slot, float] = {}
    for group, key in varying:
        value = groups[group][key]
        parts = {f"{key}.{i}": v for i, v in enumerate(value)} if is_list(value) else {key: value}
        found |= {Slot("setting", group, k): v for k, v in parts.items() if isinstance(v, float)}
    return found


def is_list(value: Any) -> bool:
    """Whether a setting holds several values, as Adam's `betas` does."""
    return isinstance(value, (tuple, list))
