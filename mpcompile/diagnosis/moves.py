"""An optimizer's step on the copy of the model, and how far it moves each parameter."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from ..errors import MPCompileError
from ..ir.dtypes import HALF
from ..observe.numbers import Numbers
from ..optim import MPOptimizer
from .report import Update


def usable(optimizer: object, model: nn.Module) -> torch.optim.Optimizer | None:
    """The optimizer that takes the steps: that inside of an `MPOptimizer`.

    Raises:
        MPCompileError: it is no optimizer, needs a closure, or holds no parameter of the model.
    """
    if isinstance(optimizer, MPOptimizer):
        optimizer = optimizer.inner
    if optimizer is None:
        return None
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise MPCompileError(f"optimizer={optimizer!r}: give a torch.optim.Optimizer")
    name = type(optimizer).__name__
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise MPCompileError(
            f"{name} runs the model again inside of its step: leave `optimizer` out, or give "
            "another"
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(p) in held for p in model.parameters()):
        raise MPCompileError(f"{name} holds no parameter of {type(model).__name__}")
    return optimizer


def default_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, also for sparse gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def densify(*_: object) -> None:
        for p in model.parameters():
            p.grad = None if p.grad is None else p.grad.to_dense()

    optimizer.register_step_pre_hook(densify)
    return optimizer


def updates(
    twin: nn.Module,
    gradients: Mapping[str, torch.Tensor | None],
    optimizer: torch.optim.Optimizer,
    dtype: torch.dtype,
) -> Iterator[Update]:
    """Take a step with these gradients, if they are finite; how far it moved each parameter.

    Args:
        twin: the model; its parameters are changed.
        gradients: by the parameter's name, FP32 and unscaled.
        optimizer: holds the parameters.
        dtype: the low dtype.
    """
    parameters = dict(twin.named_parameters())
    given = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    if any(Numbers.of(gradient).bad for gradient in given.values()):
        return
    before = {name: parameters[name].detach().clone() for name in given}
    for name, gradient in given.items():
        parameters[name].grad = gradient
    optimizer.step()
    twin.zero_grad()
    if dtype not in HALF:
        return
    half_unit = torch.finfo(dtype).eps / 2
    for name, old in before.items():
        ratio = ((parameters[name].detach() - old).abs() / old.abs()).flatten()
        ratio = ratio[ratio.isfinite() & (ratio > 0)]
        if len(ratio):
            stalls = float((ratio < half_unit).double().mean())
            yield Update(name, float(ratio.median()), stalls)
