"""The parameters that take part in a step."""

from __future__ import annotations

import itertools
import operator

import torch
from torch.optim import Optimizer

from ..errors import MPCompileError
from ..ranks.shards import local, place_gradient
from ..ranks.zero import is_zero, partition_of
from .alike import DTYPE_AND_LAYOUT, STRIDE, Alike
from .inputs import Member


def members_of(optimizer: Optimizer, *, sharded: bool) -> list[Member]:
    """The parameters that have a gradient.

    Args:
        sharded: whether some parameters may be DTensors. Their gradients are then placed like them.

    Raises:
        MPCompileError: a gradient is sparse, or lies on other ranks than its parameter.
    """
    own = _own(optimizer)
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
            members.append(Member(index, param, own is None or id(param) in own))
    return members


def all_members_of(optimizer: Optimizer, *, sharded: bool) -> list[Member]:
    """The same, and those that may get a gradient."""
    present = {id(m.param): m for m in members_of(optimizer, sharded=sharded)}
    own = _own(optimizer)
    return [
        present.get(id(param)) or Member(index, param, own is None or id(param) in own)
        for index, group in enumerate(optimizer.param_groups)
        for param in group["params"]
        if id(param) in present
        or (param.grad is None and param.requires_grad and param.numel() > 0)
    ]


def _own(optimizer: Optimizer) -> set[int] | None:
    """The parameters (by `id`) that this process updates; None: all."""
    if not is_zero(optimizer):
        return None
    return {id(p) for group in partition_of(optimizer).param_groups for p in group["params"]}


def pattern_of(optimizer: Optimizer, *, sharded: bool) -> Pattern | Members:
    """What tells a step of this optimizer from others, as it is now."""
    if sharded or is_zero(optimizer):
        return Members(optimizer, sharded=sharded)
    return Pattern(optimizer)


class Members:
    """The parameters that have a gradient, and how it is stored."""

    def __init__(self, optimizer: Optimizer, *, sharded: bool) -> None:
        self._sharded = sharded
        self._facts = self._now(optimizer)

    def _now(self, optimizer: Optimizer) -> list[object]:
        facts: list[object] = []
        for member in members_of(optimizer, sharded=self._sharded):
            grad = local(member.param.grad)  # type: ignore[arg-type]  # members have gradients
            facts.append(
                (member.group, id(member.param), member.updated, grad.dtype, grad.stride())
            )
        return facts

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether all of it is unchanged."""
        return self._now(optimizer) == self._facts


class Pattern:
    """The same where parameters are whole and all of them are updated.

    Each step asks this of every parameter. So it is a few calls over all of them, and no loop.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        groups = optimizer.param_groups
        self._params = [p for group in groups for p in group["params"]]
        self._lengths = [len(group["params"]) for group in groups]
        self._sizes = [*map(_SIZE, self._params)]
        grads = [*map(_GRAD, self._params)]
        self._missing = [grad is None for grad in grads]
        self._taking_part = [
            not none and size > 0 for none, size in zip(self._missing, self._sizes, strict=True)
        ]
        found = [*itertools.compress(grads, self._taking_part)]
        # A sparse gradient, whose layout is another, has no strides.
        self._stored = Alike(found, DTYPE_AND_LAYOUT, STRIDE)

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether all of it is unchanged."""
        lists = [group["params"] for group in optimizer.param_groups]
        params = [*itertools.chain.from_iterable(lists)]
        grads = [*map(_GRAD, params)]
        if (
            [*map(len, lists)] != self._lengths
            or not all(map(operator.is_, params, self._params))
            or [*map(operator.is_, grads, itertools.repeat(None))] != self._missing
            or [*map(_SIZE, params)] != self._sizes
        ):
            return False
        return self._stored.holds([*itertools.compress(grads, self._taking_part)])


_GRAD = operator.attrgetter("grad")
_SIZE = torch.Tensor.numel
