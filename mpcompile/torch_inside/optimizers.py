"""Optimizers of torch: their hooks, and the state that they make in their first step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

from .names import step_post_hooks, step_pre_hooks


def needs_closure(cls: type[Optimizer]) -> bool:
    """Whether a step runs the model by itself, perhaps several times, as that of LBFGS."""
    closure = inspect.signature(without_wrappers(cls.step)).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def has_hooks(optimizer: Optimizer) -> bool:
    """Whether the optimizer has hooks of its own around its step."""
    hooks: tuple[Mapping[int, Any], ...] = (
        getattr(optimizer, "_optimizer_step_pre_hooks", {}),
        getattr(optimizer, "_optimizer_step_post_hooks", {}),
    )
    return any(hooks)


def global_hooks() -> list[Callable[..., Any]]:
    """The hooks around each step of every optimizer of the process."""
    return [*step_pre_hooks.values(), *step_post_hooks.values()]


def init_group(optimizer: Optimizer) -> Callable[..., Any] | None:
    """The method by which torch's own classes make the state of a param group (2.12 to 2.14), or
    None. It takes the group, and lists that it appends to.
    """
    found: Callable[..., Any] | None = getattr(optimizer, "_init_group", None)
    return found


def note_step(optimizer: Any) -> None:
    """Note that a step was made: schedulers of the learning rate warn if they come before one."""
    optimizer._opt_called = True


def is_hooked(step: Any) -> bool:
    """Whether torch has wrapped a class's step, to run hooks and to be seen by the profiler."""
    return getattr(step, "hooked", False)


def without_wrappers(step: Any) -> Callable[..., Any]:
    """A step without torch's wrappers: hooks and profiling, the switch of the grad mode. The user's
    own decorators stay, also `@torch.no_grad()`.
    """
    if is_hooked(step):
        step = step.__wrapped__
    if getattr(step, "__code__", None) is not None and step.__code__.co_name == "_use_grad":
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]


def unhooked(cls: type[Optimizer]) -> type[Optimizer]:
    """The class, or one below it, in which `super().step()` finds no step with torch's wrappers: no
    hooks run, and no profiler sees it. The classes themselves stay as they are.
    """
    own = next(c for c in cls.__mro__ if "step" in vars(c))
    wrapped = [c for c in cls.__mro__ if c is not own and is_hooked(vars(c).get("step"))]
    if not wrapped:
        return cls
    # Each stands in front of its own base in the order of methods, so `super()` finds it first.
    without: list[Any] = [
        type(f"Unhooked{c.__name__}", (c,), {"step": vars(c)["step"].__wrapped__}) for c in wrapped
    ]
    below: type[Optimizer] = type(f"Unhooked{cls.__name__}", (cls, *without), {})
    return below
