"""One compiled step: for one pattern of gradients, bound to its tensors."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.optim import Optimizer

from ..devices.registry import capabilities
from ..ir.step import Gradient, ScaleRule, Slot, StepConfig
from ..state import copies, guard
from ..state.loss_scale import LossScale
from ..state.low_gradients import LowGradient, on_one_scale
from . import pipeline
from .program import Emit, Program
from .regions import split
from .trace import Member, Setting, has_lr, raw_step, trace, varying_numbers


@dataclass(frozen=True)
class StepKey:
    """What a step is compiled for: which parameters have a gradient, and how it is stored.

    Attributes:
        facts: compared; everything else follows from it.
        members: the parameters of the step.
        scales: the loss scales of their models.
        gradients, copies: for each member.
    """

    facts: tuple[Any, ...]
    members: tuple[Member, ...] = field(compare=False)
    scales: tuple[LossScale, ...] = field(compare=False)
    gradients: tuple[Gradient, ...] = field(compare=False)
    copies: tuple[copies.WorkingCopy | None, ...] = field(compare=False)

    @classmethod
    def of(cls, members: Sequence[Member], own: LossScale) -> StepKey:
        """The key of a step over these members; `own` is for parameters of no scaled model."""
        scales: list[LossScale] = []
        gradients: list[Gradient] = []
        held: list[copies.WorkingCopy | None] = []
        facts: list[Any] = []

        def number(scale: LossScale) -> int:
            for k, known in enumerate(scales):
                if known is scale:
                    return k
            scales.append(scale)
            return len(scales) - 1

        for member in members:
            grad = member.param.grad
            assert grad is not None
            copy = next(iter(copies.copies_of(member.param).values()), None)
            known = tuple(number(s) for s in guard.scales_of(member.param) or (own,))
            stored = copy.gradient.scale if copy and copy.gradient.is_scaled(grad) else None
            by = number(stored) if stored is not None and stored.active else None
            gradients.append(Gradient(grad.dtype, known, by))
            held.append(copy)
            facts.append(
                (member.group, id(member.param), grad.dtype, grad.stride(), known, by, id(copy))
            )
        return cls(
            (*facts, rules_of(scales)), tuple(members), tuple(scales), tuple(gradients), tuple(held)
        )

    def __hash__(self) -> int:
        return hash(self.facts)


def rules_of(scales: Iterable[LossScale]) -> tuple[Any, ...]:
    """What a step is compiled for, of these scales."""
    return tuple((id(s), _rule(s), s.active) for s in scales)


def _rule(scale: LossScale) -> ScaleRule:
    return ScaleRule(
        dynamic=scale.kind == "dynamic",
        growth_factor=scale.growth_factor,
        backoff_factor=scale.backoff_factor,
        growth_interval=scale.growth_interval,
        hysteresis=scale.hysteresis,
        min_scale=scale.min_scale,
        max_scale=scale.max_scale,
    )


class Step:
    """The compiled step of one optimizer for one key.

    Raises:
        StateAppeared, CannotRewrite: see `trace`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        key: StepKey,
        *,
        checked: bool,
        max_grad_norm: float | None,
        results: dict[str, torch.Tensor],
        emit: Emit,
        dump: Path | None,
        varying: frozenset[Setting] = frozenset(),
    ) -> None:
        self.key = key
        self.varying = varying
        self.device = key.members[0].param.device
        multi_tensor = capabilities(self.device).multi_tensor
        config = StepConfig(
            gradients=key.gradients,
            copies=tuple(c.layout if c is not None else None for c in key.copies),
            checked=checked,
            scales=tuple(_rule(s) for s in key.scales),
            max_grad_norm=max_grad_norm,
            foreach=multi_tensor and not varying,  # lists take no tensors for numbers
        )
        start = time.perf_counter()
        self.traced = traced = trace(
            optimizer, key.members, foreach=config.foreach, varying=varying
        )
        spent = time.perf_counter() - start
        pipeline.run(traced.graph, config, traced_in=spent, dump=dump)
        self.memory = [_memory(m.param) for m in key.members]
        self.states: list[tuple[torch.Tensor, dict[str, Any], tuple[tuple[str, Any], ...]]] = [
            (m.param, entries, tuple(entries.items()))
            for m in key.members
            if (entries := optimizer.state.get(m.param)) is not None
        ]
        self.lrs = {
            g: torch.zeros((), dtype=torch.float64, device=self.device)
            for g in {m.group for m in key.members}
            if has_lr(optimizer.param_groups[g])
        }
        self.lr_values: dict[int, float] = {}
        self.settings = {
            slot: torch.zeros((), dtype=torch.float64, device=self.device)
            for slot in traced.numbers
        }
        self.setting_values = self._numbers(optimizer)
        for slot, number in self.setting_values.items():
            self.settings[slot].fill_(number)
        self.none = torch.zeros((), dtype=torch.int64, device=self.device)
        self.first = [torch.tensor(flag, device=self.device) for flag in (False, True)]
        pieces = split(traced.graph, whole=multi_tensor or emit.how != "inductor")
        self.program = Program(pieces, self._held(optimizer, results), emit)
        given = self.program.given
        self.params = [m.param for m in key.members]
        self.gradients = [
            (node, m)
            for i, m in enumerate(key.members)
            if (node := given.get(Slot("grad", i))) is not None
        ]
        self.copied = [
            (m, copy) for m, copy in zip(key.members, key.copies, strict=True) if copy is not None
        ]

    def _held(self, optimizer: Optimizer, results: dict[str, torch.Tensor]) -> dict[Slot, Any]:
        held: dict[Slot, Any] = {Slot("lr", g): lr for g, lr in self.lrs.items()}
        held |= self.settings
        for i, (member, copy) in enumerate(zip(self.key.members, self.key.copies, strict=True)):
            held[Slot("param", i)] = member.param
            if copy is not None:
                held[Slot("copy", i)] = copy.tensor
            for key, value in optimizer.state.get(member.param, {}).items():
                if isinstance(value, torch.Tensor):
                    held[Slot("state", i, str(key))] = value
        for k, scale in enumerate(self.key.scales):
            for field_, tensor in scale.reside(self.device).items():
                held[Slot("scale", k, _SHORT.get(field_, field_))] = tensor
        for name in _RESULTS:
            held[Slot("result", key=name)] = result_of(results, name, self.device)
        return held

    def _numbers(self, optimizer: Optimizer) -> dict[Slot, float]:
        return varying_numbers(optimizer.param_groups, self.varying)

    def changed_settings(self, optimizer: Optimizer) -> frozenset[Setting]:
        """The settings that were constants of the graph and have another value now."""
        groups = optimizer.param_groups
        reads = self.traced.reads
        return frozenset(s for s, v in reads.items() if not _same(groups[s[0]].get(s[1]), v))

    def still_holds(self, optimizer: Optimizer) -> bool:
        """Whether what the graph was made from is unchanged: settings, and which tensors the state
        consists of (load_state_dict brings new ones), and where the parameters are stored
        (`p.data = ...` moves them).
        """
        attributes, numbers = vars(optimizer), self._numbers(optimizer)
        return (
            not self.changed_settings(optimizer)
            and all(_same(attributes.get(k), v) for k, v in self.traced.attributes.items())
            and numbers.keys() == self.setting_values.keys()
            and (numbers == self.setting_values or self.traced.holds_for(numbers))
            and self._state_holds(optimizer.state)
            and all(
                _memory(m.param) == at for m, at in zip(self.key.members, self.memory, strict=True)
            )
        )

    def _state_holds(self, state: dict[Any, dict[str, Any]]) -> bool:
        # In every step for every tensor, after the gradients have pushed all this out of the cache.
        for param, entries, items in self.states:
            if state.get(param) is not entries:
                return False
            for key, value in items:
                if entries.get(key) is not value and not _same(entries.get(key), value):
                    return False
        return True

    def run(self, optimizer: Optimizer) -> None:
        """Do the step."""
        used = _multiplied_by(self.key)
        env: dict[fx.Node, Any] = {node: member.param.grad for node, member in self.gradients}
        for g, tensor in self.lrs.items():
            lr = optimizer.param_groups[g]["lr"]
            if isinstance(lr, torch.Tensor):
                tensor.copy_(lr)
            elif self.lr_values.get(g) != lr:
                tensor.fill_(lr)
                self.lr_values[g] = lr
        for slot, number in self._numbers(optimizer).items():
            if self.setting_values[slot] != number:
                self.settings[slot].fill_(number)
                self.setting_values[slot] = number
        given = self.program.given
        for k, scale in enumerate(self.key.scales):
            overflows = guard.look(optimizer, scale)
            fresh: dict[str, Any] = {
                "first": self.first[scale.begin_step()],
                "flag": self.none if overflows is None else overflows.to(self.device),
                "used": used.get(k),
            }
            for name, tensor in fresh.items():
                if (node := given.get(Slot("scale", k, name))) is not None:
                    env[node] = tensor
        self.program.run(env)
        torch.autograd.graph.increment_version(self.params)
        for member, copy in self.copied:
            copy.written(member.param)


def _multiplied_by(key: StepKey) -> dict[int, torch.Tensor]:
    """What the gradients that are stored scaled are multiplied by, for each loss scale."""
    by_scale: dict[int, list[tuple[LowGradient, torch.Tensor]]] = {}
    for member, copy, gradient in zip(key.members, key.copies, key.gradients, strict=True):
        if copy is not None and gradient.scaled_by is not None:
            assert member.param.grad is not None
            pair = copy.gradient, member.param.grad
            by_scale.setdefault(gradient.scaled_by, []).append(pair)
    return {k: on_one_scale(pairs) for k, pairs in by_scale.items()}


_RESULTS = {"skipped": torch.bool, "norm": torch.float32}


def result_of(results: dict[str, torch.Tensor], name: str, device: torch.device) -> torch.Tensor:
    """The one tensor that every step of an optimizer reports `name` in."""
    if name not in results:
        results[name] = torch.zeros((), dtype=_RESULTS[name], device=device)
    return results[name]


def _same(a: Any, b: Any) -> bool:
    tensors = isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor)
    return a is b or (not tensors and a == b)


def _memory(param: torch.Tensor) -> tuple[object, ...]:
    return param.data_ptr(), param.dtype, param.stride()


_SHORT = {"skipped_steps": "skipped"}


def initialise_state(optimizer: Optimizer, members: Sequence[Member]) -> None:
    """Make the state that a first step would make, so that the step can be traced without it.

    torch.optim's classes have `_init_group` for it (torch 2.11 to 2.13). SGD's momentum starts as a
    copy of the gradient, which without dampening is what zeros become in one step.
    """
    init = getattr(optimizer, "_init_group", None)
    ours = getattr(init, "__module__", "").startswith("torch.optim.")  # a user's may do anything
    for group in optimizer.param_groups:
        if init is not None and ours:
            lists: list[list[Any]] = [
                [] for _ in range(len(inspect.signature(init).parameters) - 1)
            ]
            asked: dict[str, Any] = {k: group[k] for k in ("capturable", "fused") if k in group}
            for name in asked:
                group[name] = name == "capturable"
            try:
                with _gradients_in_full(group["params"]):
                    init(group, *lists)
            finally:
                group.update(asked)
    if isinstance(optimizer, torch.optim.SGD):
        for member in members:
            group = optimizer.param_groups[member.group]
            if group["momentum"] and not group["dampening"]:
                state = optimizer.state[member.param]
                if state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(member.param).detach()
    move_numbers(optimizer)


@contextlib.contextmanager
def _gradients_in_full(params: Sequence[torch.Tensor]) -> Iterator[None]:
    """Low gradients of O2 stand for the FP32 ones that the step sees: some classes give state the
    dtype of a gradient. The stand-ins are zeros that take no memory.
    """
    low = [p for p in params if p.grad is not None and p.grad.dtype is not p.dtype]
    stored = [(p.grad, p.grad_dtype) for p in low]
    try:
        for param in low:
            _give(param, param.new_zeros((), requires_grad=False).expand(param.shape))
        yield
    finally:
        for param, (grad, dtype) in zip(low, stored, strict=True):
            _give(param, grad, dtype)


def _give(param: torch.Tensor, grad: torch.Tensor | None, dtype: torch.dtype | None = None) -> None:
    """Set a gradient of whatever dtype; `dtype`: what the parameter takes from then on."""
    param.grad = None
    param.grad_dtype = dtype
    param.grad = grad


def move_numbers(optimizer: Optimizer) -> None:
    """Keep step counters where their parameters are: a step must not read across devices."""
    for param, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim == 0 and value.device != param.device:
                state[key] = value.to(param.device)


def eager_step(
    optimizer: Optimizer,
    key: StepKey,
    max_grad_norm: float | None,
    results: dict[str, torch.Tensor],
) -> None:
    """One step as the class does it, after the same checks made on the host."""
    params = [m.param for m in key.members]
    stored = [(p.grad, p.grad_dtype) for p in params]
    used = _multiplied_by(key)
    true: list[torch.Tensor] = []
    for param, gradient in zip(params, key.gradients, strict=True):
        assert param.grad is not None
        grad = param.grad.to(param.dtype)
        if gradient.scaled_by is not None:
            grad = grad / used[gradient.scaled_by]
        true.append(grad)
    norm = torch.nn.utils.get_total_norm(true)
    active = any(scale.active for scale in key.scales)
    skip = False
    for k, scale in enumerate(key.scales):
        own = [t for t, g in zip(true, key.gradients, strict=True) if k in g.scales]
        overflow = not all(bool(t.isfinite().all()) for t in own)
        if active:
            overflows = guard.look(optimizer, scale)
            overflow |= overflows is not None and bool(overflows)
            scale.settle(overflow)
            skip |= overflow
    for name, value in (("skipped", torch.tensor(skip)), ("norm", norm)):
        result_of(results, name, norm.device).copy_(value)
    if skip:
        return
    if max_grad_norm is not None:
        factor = (max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        true = [t * factor for t in true]
    try:
        for param, grad in zip(params, true, strict=True):
            _give(param, grad)
        with torch.no_grad(), torch._C._DisableAutocast():
            raw_step(type(optimizer))(optimizer)
    finally:
        for param, (before, dtype) in zip(params, stored, strict=True):
            _give(param, before, dtype)
