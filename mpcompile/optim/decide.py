"""What a step decides before it updates anything, on the device.

    norms of gradients      inf or NaN exactly if an element is
    overflow, total         of each loss scale, whether a gradient isn't finite; the norm of all
    the same of all ranks   one sum of a few numbers, where ranks share the parameters
    skipped                 whether any overflowed
    factor                  by which gradients are clipped, as `torch.nn.utils.clip_grad_norm_` does
    scale, good_steps, ...  the loss scales move, by `ir.scale.settled`

A loss scale overflows as well if a graph that uses it has counted an overflow in its "flag": in a
gradient that another optimizer holds. If several optimizers share a model, the first one to step
moves its scale ("first"); if its step is good, so does the first one that overflows later.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from .. import ir
from ..capture.compile_log import Dump, trace_step
from ..devices.registry import capabilities
from ..ir.fakes import like
from ..ir.scale import STATE_DTYPES, ScaleState, settled
from ..ir.step_config import FACTOR, NORM, SKIPPED, Slot
from ..torch_inside.names import FakeTensorMode, norm_of_each
from .compiled import Emit, Program
from .members import StepConfig

_Values: TypeAlias = Mapping[Slot, torch.Tensor]
_Stage: TypeAlias = Callable[[StepConfig, _Values], dict[Slot, torch.Tensor]]
_TOTAL = Slot("total")
_SMALL = 1 << 12  # elements: a larger copy takes longer than what it saves


def norms_of(
    gradients: Sequence[torch.Tensor], config: StepConfig, joined: Collection[int] = ()
) -> dict[Slot, torch.Tensor]:
    """Norms of all gradients as a decision takes them, a vector for each of `StepConfig.alike`. Of
    those in `joined` (by number) of one kind there is one: a copy of all takes less time than a
    call for each.
    """
    found: dict[Slot, torch.Tensor] = {}
    for i, some in enumerate(config.alike.values()):
        taken = [gradients[k] for k in some if k not in joined]
        if small := [gradients[k] for k in some if k in joined]:
            taken.append(torch.cat(small))
        found[Slot("norms", i)] = torch.stack(_norms(taken, config))
    return found


def _norms(gradients: list[torch.Tensor], config: StepConfig) -> list[torch.Tensor]:
    """2-norms if gradients are clipped, else what is fastest: largest magnitudes, on a CPU sums.
    One that is beyond the dtype's range counts as an overflow.
    """
    clipped, dtype = config.clipped, config.norm_dtype
    if capabilities(gradients[0].device).multi_tensor:
        # Of no elements there is no largest one, but a 2-norm: 0.
        order = 2.0 if clipped or not all(g.numel() for g in gradients) else math.inf
        return [*norm_of_each(gradients, order, dtype)]
    if get_proxy_mode():  # it becomes a part of a graph
        order = 2.0 if clipped else math.inf
        return [torch.linalg.vector_norm(g, order, dtype=dtype) for g in gradients]
    if clipped:
        return [*norm_of_each(gradients, 2.0, dtype)]
    # BF16, whose range is FP32's, is summed up in FP32 in any case. Asked for an FP32 result, torch
    # would first make an FP32 copy on a CPU (2.13), which takes 20 times as long.
    return [
        g.sum().to(dtype) if g.dtype is torch.bfloat16 else g.sum(dtype=dtype) for g in gradients
    ]


def decided(config: StepConfig, values: _Values) -> dict[Slot, torch.Tensor]:
    """What is decided: skipped, the factor, the norm, and the new state of each loss scale.

    Args:
        values: of the inputs: vectors of norms, and "flag", "first" and the state of each scale.
    """
    known = dict(values)
    for stage, _ in _STAGES:
        known.update(stage(config, known))
    return {slot: known[slot] for slot in written_by_decision(config)}


def graph_of_decision(config: StepConfig, inputs: _Values) -> fx.GraphModule:
    """The same as a graph of a step, which writes what is decided to its inputs.

    Args:
        inputs: a tensor like each of them. A vector may have any length.
    """

    def decide(values: _Values) -> None:
        known = dict(values)
        for stage, why in _STAGES:
            with ir.because(why):
                known.update(stage(config, known))
        with ir.because("what is decided"):
            for slot in written_by_decision(config):
                if known[slot] is not values[slot]:
                    values[slot].copy_(known[slot])

    with FakeTensorMode():
        fakes = {slot: like(value) for slot, value in inputs.items()}
    return ir.traced(decide, fakes)


class Decision:
    """The decision of one step, bound to its tensors.

    Args:
        held: those that it reads and writes in every step.
        fresh: tensors like those that are new in each step, besides norms.
        emit: how it runs. Where ranks decide together, operator by operator.
        dump: directory for its graph, or None.
        shapes: of the gradients.
        listed: the graph takes norms one by one: where a kernel more costs more than to compile it
            for each number of gradients.

    Attributes:
        is_needed: whether the step decides anything.
    """

    def __init__(
        self,
        config: StepConfig,
        held: _Values,
        fresh: _Values,
        emit: Emit,
        dump: Path | None = None,
        *,
        shapes: Sequence[torch.Size],
        listed: bool = False,
    ) -> None:
        self._config, self._listed = config, listed
        self._joined = {k for k, s in enumerate(shapes) if len(s) == 1 and s[0] <= _SMALL}
        self.is_needed = config.checked or config.clipped
        self._held = {slot: held[slot] for slot in written_by_decision(config)}
        self._program: Program | None = None
        by_inductor = emit.how == "inductor" and config.ranks is None
        if self.is_needed and (by_inductor or dump is not None):
            number = held[FACTOR]
            single = {Slot("norm", k): number for k in range(len(config.gradients))}
            vectors = {Slot("norms", i): number[None] for i in range(len(config.alike))}
            norms = single if listed else vectors
            gm = graph_of_decision(config, {**norms, **fresh, **self._held})
            trace_step(gm)
            if dump is not None:
                Dump(dump, "decision").stage("decided", gm, 0.0)
            if by_inductor:
                self._program = Program.of(gm, emit)

    def norms(self, gradients: Sequence[torch.Tensor]) -> dict[Slot, torch.Tensor]:
        """Those of the gradients of all parameters."""
        if self._listed:
            norms = _norms([*gradients], self._config)
            return {Slot("norm", k): norm for k, norm in enumerate(norms)}
        return norms_of(gradients, self._config, self._joined)

    def run(self, fresh: _Values) -> None:
        """Decide, and write what is decided to the tensors that are held.

        Args:
            fresh: vectors of norms; "flag" and "first" of each loss scale.
        """
        known = {**self._held, **fresh}
        if self._program is not None:
            self._program.run([known[slot] for slot in self._program.slots])
            return
        for slot, value in decided(self._config, known).items():
            self._held[slot].copy_(value)


def written_by_decision(config: StepConfig) -> list[Slot]:
    """What a step with these settings decides."""
    scales = range(len(config.scales)) if config.checked else ()
    return [
        *([SKIPPED] if config.checked else []),
        *([FACTOR, NORM] if config.clipped else []),
        *(Slot("scale", k, field) for k in scales for field in STATE_DTYPES),
    ]


def _join(config: StepConfig, known: _Values) -> dict[Slot, torch.Tensor]:
    if Slot("norm", 0) not in known:
        return {}
    return {
        Slot("norms", i): torch.stack([known[Slot("norm", k)] for k in some])
        for i, some in enumerate(config.alike.values())
    }


def _look(config: StepConfig, known: _Values) -> dict[Slot, torch.Tensor]:
    found: dict[Slot, torch.Tensor] = {}
    for k in range(len(config.scales)) if config.checked else ():
        overflow = known[Slot("scale", k, "flag")] > 0
        for i, (scales, _) in enumerate(config.alike):
            if k in scales:
                finite = known[Slot("norms", i)].isfinite().all()
                overflow = overflow.logical_or(finite.logical_not())
        found[Slot("overflow", k)] = overflow
    return found


def _measure(config: StepConfig, known: _Values) -> dict[Slot, torch.Tensor]:
    if not config.clipped:
        return {}
    # Where several ranks hold a gradient whole, each takes its share of the square.
    shares = [
        known[Slot("norms", i)] * replicas**-0.5 if replicas != 1 else known[Slot("norms", i)]
        for i, (_, replicas) in enumerate(config.alike)
    ]
    return {_TOTAL: torch.linalg.vector_norm(torch.cat(shares))}


def _agree(config: StepConfig, known: _Values) -> dict[Slot, torch.Tensor]:
    own = [slot for slot in known if slot.kind in ("overflow", "total")]
    if config.ranks is None or not own:
        return {}
    # FP64 holds the square of every FP32 norm.
    wide = [known[slot].to(torch.float64) for slot in own]
    wide = [w * w if slot == _TOTAL else w for slot, w in zip(own, wide, strict=True)]
    sums = config.ranks.sum(torch.stack(wide))
    return {
        slot: s.sqrt().to(known[slot].dtype) if slot == _TOTAL else s > 0
        for slot, s in zip(own, sums.unbind(), strict=True)
    }


def _skip(config: StepConfig, known: _Values) -> dict[Slot, torch.Tensor]:
    if not config.checked:
        return {}
    overflows = (known[Slot("overflow", k)] for k in range(len(config.scales)))
    return {SKIPPED: functools.reduce(torch.logical_or, overflows)}


def _clip(config: StepConfig, known: _Values) -> dict[Slot, torch.Tensor]:
    if config.max_grad_norm is None:
        return {}
    total = known[_TOTAL]
    factor = (config.max_grad_norm / (total + 1e-6)).clamp(max=1.0)
    return {FACTOR: factor, NORM: total.to(torch.float32)}


def _move(config: StepConfig, known: _Values) -> dict[Slot, torch.Tensor]:
    found: dict[Slot, torch.Tensor] = {}
    for k, rule in enumerate(config.scales) if config.checked else ():
        at = {field: Slot("scale", k, field) for field in STATE_DTYPES}
        state = ScaleState(**{field: known[slot] for field, slot in at.items()})  # type: ignore[arg-type]  # tensors for numbers
        new = settled(rule, state, known[Slot("overflow", k)], known[Slot("scale", k, "first")])
        found |= {slot: getattr(new, field) for field, slot in at.items()}
    return found


_STAGES: tuple[tuple[_Stage, str], ...] = (
    (_join, "norms of one kind"),
    (_look, "a gradient that is not finite skips the step"),
    (_measure, "the norm of all gradients"),
    (_agree, "all ranks decide alike"),
    (_skip, "an overflow of any scale skips the step"),
    (_clip, "the global norm is clipped"),
    (_move, "the loss scale moves"),
)
