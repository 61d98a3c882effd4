"""A module that can't be compiled as it is asked for is refused at the call, not at a graph."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from ..devices.registry import is_supported, supported
from ..errors import MPCompileError, did_you_mean
from ..ir.dtypes import HALF, half_of, is_trained_fp16, refuse_fp16
from ..passes.graph.replace_operators import RETURNED
from ..planner.graph_plan import GraphPlan
from ..ranks import ddp
from ..rules.other_words import hint_for
from ..rules.policy import Level
from ..settings import Settings

_SHOWN = 6  # of a model's modules, in an error


def for_weights(settings: Settings, module: torch.nn.Module) -> Settings:
    """With `dtype="auto"`, the low dtype is that in which weights of the module are stored."""
    return replace(settings, dtype=settings.dtype or half_of(module.parameters()))


def check_module(module: torch.nn.Module, settings: Settings) -> None:
    """Refuse, at the call, a module that would only fail later.

    Raises:
        MPCompileError: the module has parameters but none in FP32, FP16 or BF16, half parameters
            that O1/O2 can't read as they are or can't train, an unsupported device, or a module
            regex of the policy matches nothing.
    """
    where = type(module).__name__
    parameters = dict(module.named_parameters())
    dtypes = {p.dtype for p in parameters.values()}
    if parameters and not any(d.is_floating_point for d in dtypes):
        raise MPCompileError(f"{where} has no floating-point parameters: nothing to do in FP16")
    if settings.level in (Level.O1, Level.O2):
        _check_low(where, {n: p for n, p in parameters.items() if p.dtype in HALF}, settings.dtype)
    if parameters and settings.level is not Level.O0 and not dtypes & {torch.float32, *HALF}:
        raise MPCompileError(
            f"{where} has no FP32 parameters (found {', '.join(sorted(map(str, dtypes)))}): "
            "mixed precision starts from FP32; call model.float() first"
        )
    for name, parameter in parameters.items():
        if not is_supported(parameter.device):
            raise MPCompileError(
                f"{where}: {name} is on {parameter.device}; supported devices: "
                f"{', '.join(supported())}"
            )
    kinds = {name: type(m).__name__ for name, m in module.named_modules() if name}
    for complaint in matching_no_module(settings, where, kinds):
        raise MPCompileError(complaint)


def called_modules(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules whose calls are to be compiled, so that all of `module` is: itself, and what each
    DDP inside of it wraps; of a DDP, the module that it wraps comes first.

    Dynamo compiles no frame of torch's own files by itself: neither DDP's forward, nor that of an
    nn.Sequential, which DDP calls.

    Raises:
        MPCompileError: see `ddp.check`.
    """
    engines = [m for m in module.modules() if isinstance(m, DistributedDataParallel)]
    for engine in engines:
        ddp.check(engine)
    wrapped = [engine.module for engine in engines]
    return wrapped if isinstance(module, DistributedDataParallel) else [module, *wrapped]


def matching_no_module(settings: Settings, where: str, kinds: Mapping[str, str]) -> Iterator[str]:
    """Regexes of the policy that match no module, as one message each.

    Args:
        where: what holds the modules.
        kinds: dotted path of a module -> its class, or "" where that isn't known.
    """
    for pattern in settings.policy.modules:
        if any(re.search(pattern, path) for path in kinds):
            continue
        ends = [*kinds, *(path.rpartition(".")[2] for path in kinds)]
        hint = did_you_mean(pattern, ends) or did_you_mean(pattern.rpartition(".")[2], ends)
        if pattern in kinds.values():
            paths = [path for path, kind in kinds.items() if kind == pattern]
            hint = f": it is a class, and what is searched are paths, as {_some(paths)}"
        yield (
            f"Policy(modules=...): {pattern!r} matches no module{hint}; the modules of {where}: "
            f"{_some(list(kinds)) or 'none'}"
        )


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
    elif settings.fuse_head and any(RETURNED in node.reason for node in nodes):
        complaints.append(
            f"fuse_head=True, but a head isn't fused: {RETURNED}. Compile a function that returns "
            "the loss alone: `mpcompile(lambda **batch: model(**batch).loss, fuse_head=True)`"
        )
    return complaints if plans else []


def _some(paths: Sequence[str]) -> str:
    return ", ".join(paths[:_SHOWN]) + (", ..." if len(paths) > _SHOWN else "")


def check_call(
    model: torch.nn.Module,
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    options_of: Callable[..., Any],
    more: Iterable[str] = (),
) -> None:
    """Refuse arguments that the model doesn't take, such as a misspelt option of the function that
    they were handed to, or one of `more` options. Raises MPCompileError.
    """
    try:
        inspect.signature(model.forward).bind(*inputs, **kwargs)
    except TypeError as error:
        parameters = inspect.signature(options_of).parameters.values()
        own = [*more, *(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)]
        hint = next(filter(None, (hint_for(name, own) for name in kwargs)), "")
        raise MPCompileError(f"{type(model).__name__} can't be called so: {error}{hint}") from None


T = TypeVar("T")


def deep_copy(what: T, memo: dict[int, Any], model: torch.nn.Module, why: str) -> T:
    """A deep copy of a model, or of more than that; `memo` as for `copy.deepcopy`.

    Raises:
        MPCompileError: something in it can't be copied; `why` says why it has to be.
    """
    try:
        return copy.deepcopy(what, memo)
    except Exception as error:
        raise MPCompileError(
            f"{type(model).__name__} can't be copied ({type(error).__name__}: {error}), and {why}"
        ) from error


def _check_low(where: str, low: dict[str, torch.Tensor], dtype: torch.dtype | None) -> None:
    """Refuse parameters that are stored in a half dtype, where that can't be the low dtype of their
    products, or where their gradients would be lost.
    """
    for name, parameter in low.items():
        stored = _word(parameter.dtype)
        if dtype is not None and parameter.dtype is not dtype:
            raise MPCompileError(
                f"{where}: {name} is stored in {stored}, and the low dtype is {_word(dtype)}. "
                f"Weights in half precision are read as they are: compile with dtype={stored!r}, "
                "store them all in one dtype, or call model.float() first"
            )
        if is_trained_fp16(parameter):
            refuse_fp16(where, name)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
