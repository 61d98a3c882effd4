"""The entry point of the library: `model = mpcompile(model)`."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import torch
from torch import fx, nn
from typing_extensions import Unpack

from .capture.rebound import check_torch, gradients_of_rebound
from .compiler.backend import compile_graph
from .devices.registry import accumulate_in_fp32, is_supported
from .errors import MPCompileError, kind_of, warn
from .planner.graph_plan import GraphPlan
from .rules.other_words import unknown_option
from .rules.policy import Level, Policy, around
from .runtime import check_module as checks
from .runtime.left_to_python import ProductsCheck
from .runtime.module_call import ModuleCall, compiled_part, running
from .runtime.records import ModelRecord, records
from .runtime.regions import Regions
from .runtime.sharded_call import ends_graph
from .runtime.trainer_steps import compile_steps, has_steps
from .scaling import hooks, uncalled
from .scaling.loss_scale import LossScale
from .settings import OPTIONS, Emits, LevelWord, Mode, Options, Pads, Settings, documented
from .torch_inside.inductor import check_how
from .torch_inside.modules import Names, names_in, read_by_dynamo, set_compiled_call
from .torch_inside.owned_backend import compiled_by
from .torch_inside.tracing_settings import VALUE_SIZES
from .verify.verdicts import say_again
from .whole_step.train_step import TrainStep, goes_backward

F = TypeVar("F", bound=Callable[..., Any])  # modules are callable, too


@overload
def mpcompile(model: F, **options: Unpack[Options]) -> F: ...
@overload
def mpcompile(**options: Unpack[Options]) -> Callable[[F], F]: ...
@documented
def mpcompile(
    model: Any = inspect.Parameter.empty,  # help() shows no default for it
    *more: Any,
    dtype: torch.dtype | str = "auto",
    level: Level | LevelWord = "O1",
    policy: Policy | str | os.PathLike[str] | None = None,
    loss_scale: LossScale | str | float | None = "dynamic",
    pad: Pads = "auto",
    emit: Emits = "inductor",
    dump: str | Path | None = None,
    fuse_head: bool = False,
    recompute: bool = False,
    regional: bool = False,
    disable_passes: Collection[str] = (),
    repair: bool = False,
    strict: bool = False,
    verify: bool | Literal["always"] = True,
    mode: Mode | None = None,
    options: dict[str, Any] | None = None,
    **torch_compile_kwargs: Any,
) -> Any:
    """Train in mixed precision: compile a model, or a function, for FP16 or BF16.

    The training loop stays plain PyTorch: no autocast, no GradScaler. Parameters stay FP32, and
    `p.grad` is unscaled. An optimizer step whose gradients overflowed is skipped. Parameters that
    are BF16 already, or frozen FP16 ones, are read as they are: train such weights with an
    `MPOptimizer`, which keeps FP32 masters.

    Args:
        model: an nn.Module with FP32 or BF16 parameters, or a function. A module is compiled in
            place and returned: its `state_dict()`, attributes and pickles stay as they were.
            Without this argument, a decorator is returned, as by `torch.compile`.
        {options}
        **torch_compile_kwargs: `dynamic`, `fullgraph` and others, passed to `torch.compile`.

    Returns:
        The same module, or the compiled function.

    Raises:
        MPCompileError: a bad argument, a model with trained FP16 parameters or non-float ones, an
            unsupported device or torch version.
    """
    request = {name: value for name, value in locals().items() if name in OPTIONS}
    if more:
        _refuse_more(model, more)
    settings = Settings.parse(request)
    say_again()
    check_how(settings.emit)
    request["policy"] = settings.policy  # its file is read once, not again for every graph
    _check_torch_compile(torch_compile_kwargs)
    if model is inspect.Parameter.empty:
        return functools.partial(mpcompile, **request, **torch_compile_kwargs)
    if isinstance(model, (staticmethod, classmethod)):
        return type(model)(_compiled(model.__func__, settings, request, torch_compile_kwargs))
    _check_kind(model)
    return _compiled(model, settings, request, torch_compile_kwargs)


def _check_kind(model: Any) -> None:
    """Refuse what is neither a module nor a function."""
    if isinstance(model, type):
        name = model.__name__
        raise MPCompileError(
            f"mpcompile({name}): this is a class; give an instance, such as mpcompile({name}(...))"
        )
    if isinstance(model, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        raise MPCompileError(
            f"mpcompile({kind_of(model)}): TorchScript can't be captured; give the model or the "
            "function that it was made of"
        )
    if isinstance(model, nn.Module) or callable(model):
        return
    hint = ""
    if model is None:
        hint = ". Does the function that makes it return it? (A decorator is mpcompile(level=...))"
    elif isinstance(model, (list, tuple, dict)):
        hint = ", each by itself"
    elif isinstance(model, torch.optim.Optimizer):
        hint = "; MPOptimizer(optimizer) compiles the step of an optimizer"
    raise MPCompileError(f"mpcompile({kind_of(model)}): give an nn.Module or a function{hint}")


def _refuse_more(model: Any, more: tuple[Any, ...]) -> None:
    """Refuse more than one argument without a name."""
    given = f"mpcompile({', '.join(map(kind_of, (model, *more)))})"
    if isinstance(model, fx.GraphModule):
        raise MPCompileError(f'{given}: the backend is a word, torch.compile(backend="mpcompile")')
    what = "options have names, as level='O2'"
    if any(isinstance(one, torch.optim.Optimizer) for one in more):
        what = "no optimizer is handed over; MPOptimizer(optimizer) compiles its step, if you like"
    elif any(isinstance(one, nn.Module) for one in more):
        what = "give one model; each is compiled by itself"
    raise MPCompileError(f"{given}: {what}")


def _compiled(
    model: Any, settings: Settings, request: dict[str, Any], torch_compile_kwargs: dict[str, Any]
) -> Any:
    accumulate_in_fp32()
    hooks.register()
    names: Names = dict
    if isinstance(model, nn.Module):
        settings = checks.for_weights(settings, model)
        request = {**request, "dtype": settings.dtype or "auto"}
        checks.check_module(model, settings)
        first, *others = checks.called_modules(model)
        names = names_in(first)
    # Each call gets a scale of its own: Dynamo then keeps the compiled code of two models apart.
    scale = settings.loss_scale or LossScale.default()
    record = ModelRecord(scale, {**request, "loss_scale": scale})
    own = replace(Settings.parse(record.request), names=names)
    backend = functools.partial(compile_graph, settings=own, plans=record.plans)
    looking_for: Callable[..., ProductsCheck] | None = None
    if settings.level is not Level.O0:
        looking_for = functools.partial(
            ProductsCheck,
            compiled_part=functools.partial(compiled_part, backend, torch_compile_kwargs),
            plans=record.plans,
            dtype=settings.dtype,
            strict=settings.strict,
        )
    if isinstance(model, nn.Module):
        compiled_call = functools.partial(
            ModuleCall,
            backend=backend,
            compile_kwargs=torch_compile_kwargs,
            reads_copies=settings.level is not Level.O0,
            check=functools.partial(_check_again, settings),
            called=functools.partial(_after_call, settings, record),
            looking=looking_for,
            scaled=lambda: any(plan.scaled for plan in record.plans),
            regions=Regions(first, settings.policy) if settings.regional else None,
        )
        for module in (first, *others):
            call = compiled_call(module)
            set_compiled_call(module, call if module is first else ends_graph(call.__call__))
            read_by_dynamo(module)
        if has_steps(first):
            compile_steps(first, compiled_call)
        records[model] = record
        uncalled.expect(first)
        return model
    if settings.regional:
        raise MPCompileError(
            "regional=True is about the modules of a model: give it to mpcompile(model)"
        )
    remake = functools.partial(_compiled, model, settings, request, torch_compile_kwargs)
    called = functools.partial(_after_call_of_function, model, settings, record.plans)
    compiled = _compiled_function(
        model, own, torch_compile_kwargs, record, looking_for, called, remake
    )
    records[compiled] = record
    return compiled


def _compiled_function(
    function: Callable[..., Any],
    settings: Settings,
    compile_kwargs: dict[str, Any],
    record: ModelRecord,
    looking_for: Callable[..., ProductsCheck] | None,
    called: Callable[[], None],
    remake: Callable[[], Any],
) -> Callable[..., Any]:
    """A compiled function: as a whole with its backward and optimizers, where it goes backward."""
    check_torch()

    def in_pieces(one: Callable[..., Any], by_operator: bool = False) -> Callable[..., Any]:
        own = replace(settings, emit="eager", mode=None) if by_operator else settings
        backend = functools.partial(compile_graph, settings=own, plans=record.plans)
        looking = looking_for(function, called=called) if looking_for and not by_operator else None
        return by(compile_kwargs, backend, one, looking=looking, **VALUE_SIZES)

    def by(kwargs: Any, backend: Any, one: Any, *also: Any, **how: Any) -> Callable[..., Any]:
        compiled = compiled_by(backend, one, **kwargs)
        return running(compiled, one, *also, gradients_of_rebound, allow_rnn=True, **how)

    if not goes_backward(function):
        return in_pieces(function)
    as_one = functools.partial(by, {**compile_kwargs, "fullgraph": True})
    return TrainStep(function, in_pieces, as_one, settings, record.plans, called, remake)


def _check_torch_compile(kwargs: Mapping[str, Any]) -> None:
    if "backend" in kwargs:
        raise MPCompileError("mpcompile() is the backend; choose what runs below it with emit=")
    theirs = [name for name in inspect.signature(torch.compile).parameters if name != "model"]
    known = [*OPTIONS, *(name for name in theirs if name not in OPTIONS and name != "backend")]
    for name, value in kwargs.items():
        if name not in theirs:
            raise unknown_option(name, known)
        if name in ("dynamic", "fullgraph", "disable") and value not in (True, False, None):
            raise MPCompileError(f"{name}={value!r}: use True or False")


def _check_again(settings: Settings, module: nn.Module) -> None:
    """Check the module at its first call and when its dtype has changed: it may have been cast."""
    if torch.is_grad_enabled() and any(
        p.is_inference() for p in module.parameters() if p.requires_grad
    ):
        raise MPCompileError(
            f"{type(module).__name__} was made under torch.inference_mode(), so it can't be "
            "trained: make it outside, or load its state_dict() into one that is"
        )
    try:
        checks.check_module(module, settings)
    except MPCompileError as error:
        if not all(is_supported(p.device) for p in module.parameters()):
            raise MPCompileError(f"{error}. It was moved there after mpcompile()") from None
        raise MPCompileError(
            f"{error}. It was cast after mpcompile(): if the trainer does that, as Lightning's "
            "Trainer(precision='16-true'), leave it to mpcompile; to run a model in another dtype, "
            "cast a copy, which is a plain module: copy.deepcopy(model).to(dtype)"
        ) from None


def _after_call(settings: Settings, record: ModelRecord, module: nn.Module) -> bool:
    """Warn of what the first calls of a module reveal; True once nothing is left to check."""
    if not record.plans:
        warn(
            f"mpcompile: no part of {type(module).__name__} was compiled; it ran as plain PyTorch, "
            "in FP32. torch.compile skipped its forward (an unsupported construct at the top of "
            "it, or compilation is disabled); TORCH_LOGS=graph_breaks tells why"
        )
        return True
    if not torch.is_grad_enabled():  # an evaluation tells nothing about training
        return False
    for complaint in checks.matched_nothing(settings, record.plans):
        warn(f"mpcompile: {type(module).__name__}: {complaint}")
    return True


def _after_call_of_function(
    function: Callable[..., Any], settings: Settings, plans: list[GraphPlan]
) -> None:
    """Warn of what the first training call of a function reveals. Its modules are known only now:
    those that its operators come from.
    """
    name = getattr(function, "__name__", type(function).__name__)
    inner = {n.module for plan in plans for n in plan.nodes if n.module}
    paths = dict.fromkeys([*sorted(inner), *(path for one in inner for path in around(one))], "")
    wrong = checks.matching_no_module(settings, name, paths) if paths else ()
    for complaint in (*wrong, *checks.matched_nothing(settings, plans)):
        warn(f"mpcompile: {name}: {complaint}")
