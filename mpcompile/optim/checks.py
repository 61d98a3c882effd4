"""Checks for what an MPOptimizer can't do, when it is made or is given parameters."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from ..errors import MPCompileError, did_you_mean, kind_of
from ..lower.emitter import check_inductor
from ..ranks.shards import Connected, connect
from ..ranks.zero import is_zero
from ..scaling.loss_scale import LossScale
from ..scaling.parameters import parameters_of
from ..settings import OPTIONS
from ..torch_inside.distributed import overlaps_backward
from ..torch_inside.inductor import check_how
from ..torch_inside.optimizers import needs_closure
from ..torch_inside.private_names import Part, refuse
from .masters import is_low

_EXAMPLE = "MPOptimizer(torch.optim.AdamW(model.parameters()))"


def check_arguments(cls: type[Any], args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Refuse arguments that `cls` doesn't have, such as those of the optimizer that it wraps.

    Raises:
        MPCompileError: says where they belong.
    """
    known = inspect.signature(cls.__init__).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values()):
        return
    given = args[0] if args else options.get("optimizer")
    name = type(given).__name__ if isinstance(given, Optimizer) else "AdamW"
    if len(args) > 1:
        found = ", ".join(map(kind_of, args))
        raise MPCompileError(
            f"MPOptimizer({found}): give the optimizer alone, made, as in {_EXAMPLE}"
        )
    for option in (o for o in options if o not in known):
        hint = did_you_mean(option, known) or (
            ". What the optimizer itself takes goes there: "
            f"MPOptimizer(torch.optim.{name}(model.parameters(), {option}=...))"
        )
        if option in OPTIONS:
            hint = f": that is an option of the model, mpcompile(model, {option}=...)"
        raise MPCompileError(f"MPOptimizer({option}=...): there is no such argument{hint}")


def check(
    optimizer: Any,
    scale: Any,
    max_grad_norm: float | None,
    emit: str,
    mode: str | None,
    options: Any,
) -> None:
    """Refuse arguments of `MPOptimizer`.

    Raises:
        MPCompileError: an argument is wrong; says which and why.
    """
    refuse(Part.OPTIMIZER, "MPOptimizer", "use the optimizer as it is; its steps are skipped, too")
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise MPCompileError(
            f"MPOptimizer({kind_of(optimizer)}): give a torch.optim optimizer, as in {_EXAMPLE}"
        )
    _check_wrapper(name, optimizer)
    if needs_closure(type(optimizer)):
        raise MPCompileError(
            f"MPOptimizer: {name}.step() runs its closure several times, which can't be traced; "
            f"use {name} as it is"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise MPCompileError("MPOptimizer: SparseAdam wants sparse gradients; use it as it is")
    for group in optimizer.param_groups:
        check_group(name, group)
    if scale is not None and not isinstance(scale, LossScale):
        raise MPCompileError(
            f"MPOptimizer(loss_scale={scale!r}): give a LossScale, as LossScale.static(1024.0); or "
            "leave it to the model, mpcompile(model, loss_scale=...)"
        )
    number: Any = max_grad_norm
    if number is not None and not (isinstance(number, (int, float)) and 0 < number < math.inf):
        raise MPCompileError(
            f"MPOptimizer(max_grad_norm={max_grad_norm!r}): must be a positive number, or None to "
            "clip nothing"
        )
    if emit not in ("inductor", "aot_eager", "eager"):
        raise MPCompileError(f"MPOptimizer(emit={emit!r}): use inductor, aot_eager or eager")
    check_how(emit)
    if mode is not None and emit != "inductor":
        raise MPCompileError(
            f"MPOptimizer(mode={mode!r}) is Inductor's; it means nothing to {emit}"
        )
    if options is not None and not isinstance(options, Mapping):
        raise MPCompileError(f"MPOptimizer(options={options!r}): give a dict of Inductor's options")
    check_inductor(mode, options)


def _check_wrapper(name: str, optimizer: Optimizer) -> None:
    """Refuse an optimizer that steps another one, unless it is ZeRO's. Raises MPCompileError."""
    if is_zero(optimizer):
        if overlaps_backward(optimizer):
            raise MPCompileError(
                f"MPOptimizer: {name}(overlap_with_ddp=True) updates parameters inside of the "
                "backward, before anyone knows whether their gradients overflowed; use "
                "overlap_with_ddp=False"
            )
        return
    for key, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            raise MPCompileError(
                f"MPOptimizer: {name} steps another optimizer, its {key}. Wrap that one: "
                f"MPOptimizer({type(value).__name__}(...)), and give it to {name}"
            )


def check_ranks(optimizer: Optimizer, max_grad_norm: float | None) -> Connected | None:
    """The processes that share the optimizer's parameters, or None.

    Raises:
        MPCompileError: they can't take a step alike, or can't know the norm to clip by.
    """
    name = f"MPOptimizer({type(optimizer).__name__})"
    connected = connect(parameters_of(optimizer), name)
    if connected is not None and max_grad_norm is not None and not connected.countable:
        raise MPCompileError(
            f"{name}: max_grad_norm needs the norm over all processes, and some parameters are "
            "plain tensors, or DTensors on a part of the mesh. Distribute all parameters on one "
            "mesh (distribute_tensor(p, mesh, [Replicate()])), or clip by hand"
        )
    return connected


def check_group(name: str, group: dict[str, Any]) -> None:
    """Refuse a param group of the optimizer called `name`. Raises MPCompileError."""
    if group.get("differentiable"):
        raise MPCompileError(
            f"MPOptimizer: {name}(differentiable=True) can't be compiled; leave that out, or use "
            f"{name} as it is"
        )
    if name == "ZeroRedundancyOptimizer" and any(map(is_low, group["params"])):
        raise MPCompileError(
            "MPOptimizer(ZeroRedundancyOptimizer): some parameters are stored in FP16 or BF16, and "
            "their FP32 masters can't be brought to the rank that saves a checkpoint: call "
            "model.float() first and train at O2, or use FSDP2"
        )
    if any(p.is_complex() for p in group["params"]):
        raise MPCompileError(f"MPOptimizer: {name} holds complex parameters; use it as it is")
