"""Warn of a compiled module that is trained without its compiled call: it gains nothing.

`mpcompile(module)` compiles a call of the module, and the steps of a LightningModule
(`trainer_steps.py`). A trainer that calls another method never runs it. This shows when an
optimizer steps: the module's parameters have gradients, but no graph that we compiled held one of
them. Once a module is called in training, or the warning is given, this is not checked any more.
Nor is a call ours after `module.compile()`, which puts another one in its place.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import warn
from ..torch_inside.modules import compiled_call
from . import hooks, parameters

# compiled modules not called yet -> optimizers known to hold none of their parameters
_waiting: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[Optimizer]] = (
    weakref.WeakKeyDictionary()
)


def expect(module: nn.Module) -> None:
    """Note a compiled module: it should be called before its parameters are updated."""
    if any(True for _ in module.parameters()):
        hooks.look_before_steps(_look)
        _waiting[module] = weakref.WeakSet()
    # Nothing but the module holds its call, which so ends as soon as another one is put there.
    weakref.finalize(compiled_call(module), _ended, weakref.ref(module)).atexit = False


def called(module: nn.Module) -> None:
    """Note that the module was called: there is nothing left to check."""
    _waiting.pop(module, None)


def reached(inputs: Iterable[Any]) -> None:
    """A graph was compiled with these inputs: it counts as a call of the modules they belong to,
    unless it is for an evaluation.
    """
    if _waiting and torch.is_grad_enabled():
        ids = {id(x) for x in inputs if isinstance(x, nn.Parameter)}
        for module in list(_waiting):
            if any(id(p) in ids for p in module.parameters()):
                called(module)


def _look(optimizer: Optimizer) -> None:
    """An optimizer is about to step."""
    if not _waiting:
        return
    held = None
    for module, others in list(_waiting.items()):
        if optimizer in others:
            continue
        if held is None:
            held = set(map(id, parameters.parameters_of(optimizer)))
        own = [p for p in module.parameters() if id(p) in held]
        if not own:
            others.add(optimizer)
        elif any(p.grad is not None for p in own) and _updates(optimizer):
            del _waiting[module]
            _warn(module, optimizer)


def _updates(optimizer: Optimizer) -> bool:
    """Whether a step changes anything. torch.distributed.checkpoint takes one with a learning rate
    of 0, before the model has run, to make the state that it is about to load.
    """
    return any(group.get("lr", 1.0) != 0 for group in optimizer.param_groups)


def _ended(known: weakref.ref[nn.Module]) -> None:
    """The call that was ours is no more; another's may have come."""
    module = known()
    call = None if module is None else compiled_call(module)
    if call is not None and not type(call).__module__.startswith("mpcompile."):
        warn(
            f"mpcompile: {type(module).__name__}.compile() was called after mpcompile() and took "
            "its place: the module runs in FP32 from now on. Leave it out, or call "
            "mpcompile(model) after it"
        )


def _warn(module: nn.Module, optimizer: Optimizer) -> None:
    name = type(module).__name__
    warn(
        f"mpcompile: {name} was compiled but never called, yet {type(optimizer).__name__} updates "
        "its parameters: it trains as plain PyTorch, in FP32. Only module(x) is compiled. Where a "
        "trainer calls a method: module.training_step = mpcompile(module.training_step), or, "
        "inside of it, self.net = mpcompile(self.net)"
    )
