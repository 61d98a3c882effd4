"""The entry point of the library: `model = mpcompile(model)`."""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import Unpack

from .backend import mpcompile_backend
from .capture.provenance import names_in
from .capture.rebound import check_torch, gradients_of_rebound
from .errors import MPCompileError, MPCompileWarning, did_you_mean
from .lower.accumulation import accumulate_in_fp32
from .lower.emitter import check_how
from .lower.frozen import see_what_trains
from .lower.tracing_settings import VALUE_SIZES
from .plans.graph_plan import GraphPlan
from .ranks import ddp
from .rules.policy import Level, Policy
from .runtime import uncalled
from .runtime.looking import Looking
from .runtime.module_call import ModuleCall, running
from .runtime.owned_backend import compiled_by
from .runtime.sharded_call import ends_graph
from .runtime.trainer_steps import compile_steps, has_steps
from .scaling import hooks, parameters
from .scaling.loss_scale import LossScale
from .scaling.repairs import Repairs
from .settings import OPTIONS, Options, Settings, check_module, documented
from .torch_inside.health import refuse
from .torch_inside.modules import set_compiled_call, unwrapped
from .torch_inside.reach import Part
from .whole_step.train_step import TrainStep, goes_backward

F = TypeVar("F", bound=Callable[..., Any])  # modules are callable, too


class _Record:
    """What is known about one compiled model or function: `request` are its options as given."""

    def __init__(self, loss_scale: LossScale, request: Mapping[str, Any]) -> None:
        self.loss_scale, self.request = loss_scale, request
        self.plans: list[GraphPlan] = []  # one for each graph compiled so far


_records = WeakIdKeyDictionary()


@overload
def mpcompile(model: F, **options: Unpack[Options]) -> F: ...
@overload
def mpcompile(model: None = None, **options: Unpack[Options]) -> Callable[[F], F]: ...
@documented
def mpcompile(
    model: Any = None,
    *,
    dtype: torch.dtype | str = "auto",
    level: Level | str = "O1",
    policy: Policy | str | os.PathLike[str] | None = None,
    loss_scale: LossScale | str | float | None = "dynamic",
    reduce: str = "auto",
    pad: str = "auto",
    emit: str = "inductor",
    dump: str | Path | None = None,
    fuse_head: bool = False,
    recompute: bool = False,
    disable_passes: Collection[str] = (),
    repair: bool = False,
    strict: bool = False,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    **torch_compile_kwargs: Any,
) -> Any:
    """Train in mixed precision: compile a model, or a function, for FP16 or BF16.

    The training loop stays plain PyTorch: no autocast, no GradScaler. Parameters stay FP32, and
    `p.grad` is FP32 and unscaled, except at O2 with `MPOptimizer`. An optimizer step whose
    gradients overflowed is skipped.

    Args:
        model: an nn.Module with FP32 parameters, or a function. A module is compiled in place and
            returned: its `state_dict()`, attributes and pickles stay as they were. Without this
            argument, a decorator is returned, as by `torch.compile`.
        {options}
        **torch_compile_kwargs: `dynamic`, `fullgraph` and others, passed to `torch.compile`.

    Returns:
        The same module, or the compiled function.

    Raises:
        MPCompileError: a bad argument, a half-precision or non-float model, an unsupported device
            or torch version.
    """
    request = {name: value for name, value in locals().items() if name in OPTIONS}
    settings = Settings.parse(request)
    check_how(settings.emit)
    request["policy"] = settings.policy  # its file is read once, not again for every graph
    _check_torch_compile(torch_compile_kwargs)
    if model is None:
        return functools.partial(mpcompile, **request, **torch_compile_kwargs)
    if isinstance(model, (staticmethod, classmethod)):
        return type(model)(_compiled(model.__func__, settings, request, torch_compile_kwargs))
    if not isinstance(model, nn.Module) and not callable(model):
        raise MPCompileError(f"mpcompile({type(model).__name__}): give an nn.Module or a function")
    return _compiled(model, settings, request, torch_compile_kwargs)


def _compiled(
    model: Any, settings: Settings, request: dict[str, Any], torch_compile_kwargs: dict[str, Any]
) -> Any:
    accumulate_in_fp32()
    see_what_trains()
    hooks.register()
    # Each call gets a scale of its own: Dynamo then keeps the compiled code of two models apart.
    scale = settings.loss_scale or LossScale.default()
    record = _Record(scale, {**request, "loss_scale": scale})
    options = {**record.request, "_listener": record.plans.append}
    looking_for: Callable[[Any], Looking] | None = None
    if settings.level is not Level.O0:
        looking_for = functools.partial(
            Looking, plans=record.plans, dtype=settings.dtype, strict=settings.strict
        )
    if isinstance(model, nn.Module):
        check_module(model, settings)
        first, *others = ddp.called_modules(model)
        options["_names"] = names_in(first)
        compiled_call = functools.partial(
            ModuleCall,
            backend=functools.partial(mpcompile_backend, options=options),
            compile_kwargs=torch_compile_kwargs,
            reads_copies=settings.level is Level.O2,
            check=functools.partial(_check_again, settings),
            called=functools.partial(_after_call, settings, record),
            looking=looking_for,
        )
        for module in (first, *others):
            call = compiled_call(module)
            set_compiled_call(module, call if module is first else ends_graph(call.__call__))
        if has_steps(first):
            compile_steps(first, compiled_call)
        _records[model] = record
        uncalled.expect(first)
        return model
    anew = functools.partial(_compiled, model, settings, request, torch_compile_kwargs)
    compiled = _compiled_function(model, options, torch_compile_kwargs, record, looking_for, anew)
    _records[compiled] = record
    return compiled


def _compiled_function(
    function: Callable[..., Any],
    options: dict[str, Any],
    compile_kwargs: dict[str, Any],
    record: _Record,
    looking_for: Callable[[Any], Looking] | None,
    anew: Callable[[], Any],
) -> Callable[..., Any]:
    """A compiled function: as a whole with its backward and optimizers, where it goes backward."""
    check_torch()

    def in_pieces(one: Callable[..., Any], emit: str | None = None) -> Callable[..., Any]:
        # Between backward and step is code of the user's, who was promised true gradients.
        own = {**options, "_true_gradients": goes_backward(function)}
        own.update({"emit": emit} if emit else {})
        backend = functools.partial(mpcompile_backend, options=own)
        compiled = compiled_by(backend, one, **compile_kwargs)
        looking = looking_for(function) if looking_for is not None and emit is None else None
        return running(
            compiled, one, gradients_of_rebound, looking=looking, allow_rnn=True, **VALUE_SIZES
        )

    if not goes_backward(function):
        return in_pieces(function)
    return TrainStep(function, in_pieces, options, compile_kwargs, record.plans, anew)


def _check_torch_compile(kwargs: Mapping[str, Any]) -> None:
    if "backend" in kwargs:
        raise MPCompileError("mpcompile() is the backend; choose what runs below it with emit=")
    own = ["model", *OPTIONS]
    theirs = inspect.signature(torch.compile).parameters
    for name in kwargs:
        if name not in theirs:
            hint = did_you_mean(name, (*own, *theirs))
            raise MPCompileError(f"unknown option {name!r}{hint}; known: {', '.join(own)}")


def _check_again(settings: Settings, module: nn.Module) -> None:
    """Check the module at its first call and when its dtype has changed: it may have been cast."""
    try:
        check_module(module, settings)
    except MPCompileError as error:
        raise MPCompileError(
            f"{error}. It was cast after mpcompile(): if the trainer does that, as Lightning's "
            "Trainer(precision='16-true'), leave it to mpcompile; to run a model in another dtype, "
            "cast a copy, which is a plain module: copy.deepcopy(model).to(dtype)"
        ) from None


def _after_call(settings: Settings, record: _Record, module: nn.Module) -> bool:
    """Warn of what the first calls of a module reveal; True once nothing is left to check."""
    if not record.plans:
        _warn_nothing_compiled(module)
        return True
    if not torch.is_grad_enabled():  # an evaluation tells nothing about training
        return False
    _warn_of_what_matched_nothing(module, settings, record.plans)
    return True


def _warn_of_what_matched_nothing(
    module: nn.Module, settings: Settings, plans: list[GraphPlan]
) -> None:
    for complaint in matched_nothing(settings, plans):
        text = f"mpcompile: {type(module).__name__}: {complaint}"
        warnings.warn(text, MPCompileWarning, stacklevel=5)


def matched_nothing(settings: Settings, plans: Sequence[GraphPlan]) -> list[str]:
    """The requests (nodes of the policy, `fuse_head`) that applied to no graph of the first
    training forward, as one message each.
    """
    plans = [plan for plan in plans if plan.left is None]
    nodes = [node for plan in plans for node in plan.nodes]
    names = {node.name for node in nodes}
    complaints = [
        f"Policy(nodes=...): no node {name!r}{did_you_mean(name, names)}"
        for name in sorted(settings.policy.nodes.keys() - names)
    ]
    if settings.fuse_head and not any("cross_entropy" in node.op for node in nodes):
        complaints.append(
            "fuse_head=True, but there is no cross_entropy in what was compiled: compute the loss "
            "in the model's forward, or compile the function that computes it"
        )
    return complaints if plans else []


def _warn_nothing_compiled(module: nn.Module) -> None:
    warnings.warn(
        f"mpcompile: no part of {type(module).__name__} was compiled; it ran as plain PyTorch, in "
        "FP32. torch.compile skipped its forward (an unsupported construct at the top of it, or "
        "compilation is disabled); TORCH_LOGS=graph_breaks tells why",
        MPCompileWarning,
        stacklevel=5,
    )


def loss_scale_of(model: Any) -> LossScale:
    """The loss scale of a compiled model or function: `.value`, `.skipped_steps`.

    Raises:
        MPCompileError: it was not compiled with `mpcompile()`.
    """
    return _scale_of(model, _record_of(model))


def _scale_of(model: Any, record: _Record) -> LossScale:
    own = record.loss_scale
    if own.fp16_only and isinstance(model, nn.Module):
        return parameters.given_scale(model.parameters()) or own
    return own


def compiled_plans(model: Any) -> list[GraphPlan]:
    """The plan of each graph compiled so far for this model or function, in order. `left` of a
    graph that was left in FP32 says why.

    Raises:
        MPCompileError: it was not compiled with `mpcompile()`.
    """
    return list(_record_of(model).plans)


def repairs_of(model: Any) -> tuple[str, ...]:
    """What `repair=True` has pinned to FP32 while the model trained, one sentence for each repair.

    Raises:
        MPCompileError: it was not compiled with `mpcompile()`.
    """
    return tuple(loss_scale_of(model).repairs.events)


def pinned_in(model: Any) -> Repairs:
    """What `repair=True` has pinned in a model while it trained; nothing if it isn't compiled."""
    record = recorded(model)
    return _scale_of(model, record).repairs if record else Repairs()


def recorded(model: Any) -> _Record | None:
    """What is known about a model, or else about the one compiled module inside of it; None if
    `mpcompile()` has compiled none.

    Raises:
        MPCompileError: several modules inside were compiled, each by itself.
    """
    if model in _records or not isinstance(model, nn.Module):
        own: _Record | None = _records.get(model)
        return own
    inside = [(path, _records[m]) for path, m in model.named_modules() if m in _records]
    if len(inside) > 1:
        names = ", ".join(path for path, _ in inside)
        raise MPCompileError(
            f"{type(model).__name__} holds several modules that mpcompile() compiled ({names}): "
            "ask about one of them"
        )
    return inside[0][1] if inside else None


def compiled_in(model: nn.Module) -> list[nn.Module]:
    """The modules in a model that `mpcompile()` has compiled, each by itself."""
    return [module for module in model.modules() if module in _records]


def studied(model: Any, who: str) -> nn.Module:
    """The module that `who` ("explain") is asked about: of what torch.compile returned, the module
    in it.

    Raises:
        MPCompileError: it is no module; or on this torch such studies are known to be wrong.
    """
    refuse(Part.EXPLAIN, who, "TORCH_LOGS=mpcompile tells what a training compiles")
    if not isinstance(model, nn.Module):
        raise MPCompileError(
            f"{who}({type(model).__name__}): give an nn.Module. Of a compiled function, "
            "compiled_plans(function) has the plans after its first call"
        )
    inner = unwrapped(model)
    return inner if isinstance(inner, nn.Module) else model


def _record_of(model: Any) -> _Record:
    model = getattr(model, "__func__", model)  # of a method, its function
    within = ddp.called_modules(model)[0] if isinstance(model, nn.Module) else model
    if model not in _records and within in _records:
        model = within
    if model not in _records:
        raise MPCompileError(
            f"this {type(model).__name__} was not compiled by mpcompile(...), or is a copy of one "
            "that was"
        )
    record: _Record = _records[model]
    return record
