"""What a training knows of one graph: the facts that it is planned by, and the loss scale, the
optimizers and the working copies that stand behind them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .. import ir
from ..capture.pipeline import Planned
from ..capture.surroundings import around_now
from ..devices.registry import capabilities
from ..ir.dtypes import half_of, is_trained_fp16, refuse_fp16
from ..planner.target import device_of, target_of
from ..rules.policy import Level
from ..scaling import copies, kept_copies, parameters
from ..scaling.loss_scale import LossScale
from ..scaling.parameters import is_leaf
from ..settings import Settings
from .plan_graph import Facts


@dataclass(frozen=True)
class Training:
    """What a training knows of a graph.

    Attributes:
        facts: what the graph is planned by.
        scale: the loss scale that its gradients may be multiplied by, or None.
        owned: the parameters of an MPOptimizer of which the graph may read copies
            (`reads_copies`): input number -> that optimizer.
        kept: the inputs that are weights of which copies are kept, since nothing trains them now.
        examples: the caller's inputs that the graph is compiled with.
    """

    facts: Facts
    scale: LossScale | None
    owned: Mapping[int, Any]
    kept: Collection[int]
    examples: Sequence[Any]

    def scale_in(self, planned: Planned) -> LossScale | None:
        """The loss scale that the rewritten graph takes, or None."""
        return self.scale if planned.inputs.scaled else None

    def reader_for(self, planned: Planned) -> copies.Reader | kept_copies.KeptCopies | None:
        """What gives the rewritten graph its copies of weights; None where it reads none."""
        if not planned.inputs.copies:
            return None
        shapes, target = _shapes_of_copies(planned), self.facts.target
        if not self.kept:
            return copies.Reader(target.low, self.scale_in(planned), shapes)
        kept = [i in self.kept for i in planned.inputs.copies.values()]
        return kept_copies.KeptCopies(target.low, target.device, shapes, kept)

    def read_in_full(self, planned: Planned) -> list[int]:
        """The inputs that are an optimizer's parameters, and that the graph reads in FP32."""
        copied, examples = planned.inputs.copies, self.examples
        return [i for i in self.owned if i not in copied and is_leaf(examples[i])]

    def copies_for(self, planned: Planned) -> Iterator[tuple[torch.Tensor, copies.WorkingCopy]]:
        """The parameters that the rewritten graph reads as copies, in the order of its inputs, each
        with its copy, which is made if need be.
        """
        shapes = _shapes_of_copies(planned)
        for of, shape in zip(planned.inputs.copies.values(), shapes, strict=True):
            made_by = kept_copies.copy_of if of in self.kept else copies.copy_of
            yield self.examples[of], made_by(self.examples[of], self.facts.target.low, shape)


def _shapes_of_copies(planned: Planned) -> list[tuple[int, ...]]:
    inputs = planned.graph.graph.find_nodes(op="placeholder")
    return [tuple(ir.value(inputs[k]).shape) for k in planned.inputs.copies]


def training_of(gm: fx.GraphModule, examples: Sequence[Any], settings: Settings) -> Training:
    """What a training knows of a graph before it is planned.

    Args:
        gm: Dynamo's graph.
        examples: the caller's inputs.
        settings: the user's.

    Raises:
        CannotRewrite: see `device_of` and `around_now`.
        MPCompileError: an FP16 parameter is trained.
    """
    target = target_of(device_of(examples), settings.dtype or half_of(examples))
    refused = settings.level in (Level.O1, Level.O2) and torch.is_grad_enabled()
    for trained in filter(is_trained_fp16, examples if refused else ()):
        refuse_fp16("a module", f"a parameter of shape {tuple(trained.shape)}")
    scale = scale_for(examples, target.low, settings)
    owned = owned_in(examples) if reads_copies(settings.level, target.device) else {}
    kept = [i for i, x in enumerate(examples) if kept_copies.is_kept(x)]
    shapes = stored_shapes(owned, examples, target.low)
    shapes |= {i: kept_copies.stored_shape(examples[i], target.low) for i in kept}
    facts = Facts(
        target,
        around_now(gm, examples, target.device.type, settings.names()),
        scaled=scale is not None,
        copied=shapes,
        pinned=scale.repairs.pins if scale is not None else {},
    )
    return Training(facts, scale, owned, kept, examples)


def reads_copies(level: Level, device: torch.device) -> bool:
    """Whether a graph reads the low copies of weights that an MPOptimizer's step writes. At O1 not
    where weight gradients leave their products in FP32, as the gradient of a low copy can't.
    """
    rounds = level is Level.O1 and not capabilities(device).products_leave_in_fp32()
    return rounds or level is Level.O2


def fp32_parameters(inputs: Sequence[Any]) -> dict[int, torch.nn.Parameter]:
    """The inputs (by number) that may be read as copies in a low dtype."""
    known = {i: x for i, x in enumerate(inputs) if isinstance(x, torch.nn.Parameter)}
    return {i: x for i, x in known.items() if x.dtype is torch.float32}


def stored_shapes(of: Iterable[int], examples: Sequence[Any], low: torch.dtype) -> dict[int, Any]:
    """Inputs that may be read as copies -> the shape in which the copy is stored; None: not yet."""
    return {i: copies.stored_shape(examples[i], low) for i in of}


def owned_in(examples: Sequence[Any]) -> dict[int, Any]:
    """The inputs that an MPOptimizer keeps copies of, by number: that optimizer."""
    owners = {i: parameters.owner_of(x) for i, x in fp32_parameters(examples).items()}
    return {i: owner for i, owner in owners.items() if owner is not None}


def scale_for(examples: Sequence[Any], low: torch.dtype, settings: Settings) -> LossScale | None:
    """The scale that a graph multiplies by: the user's, its parameters' own, or a new one."""
    if not torch.is_grad_enabled():
        return None
    trained = list(filter(parameters.is_trained, examples))
    given = parameters.given_scale(trained)
    if given is not None and (settings.loss_scale is None or settings.loss_scale.yields):
        return given if given.active else None
    if not trained or (low is torch.bfloat16 and not settings.scale_any_dtype):
        return None
    if settings.loss_scale is not None:
        return settings.loss_scale if settings.loss_scale.active else None
    return parameters.scale_of(trained) or LossScale.default()
