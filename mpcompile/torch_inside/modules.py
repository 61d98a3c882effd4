"""How a call of an nn.Module reaches its forward, and what it holds."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

COMPILED_CALL = "_compiled_call_impl"
"""What `nn.Module.compile` sets, and a call of the module runs. Pickling and deepcopy drop it."""

# Asked in each call of a compiled module.
hooks_around: Callable[[nn.Module], tuple[Mapping[int, Any], ...]] = operator.attrgetter(
    "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
)
"""A module's own hooks: before and after its forward and its backward."""


def plain_call(module: Any) -> Any:
    """A module's call with its hooks, uncompiled; of a class, the function of the module."""
    return module._call_impl


def compiled_call(module: nn.Module) -> Any:
    """What a call of the module runs, or None: its plain call."""
    return module._compiled_call_impl


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Let a call of the module run this; None: its plain call. Its state stays as it is."""
    module._compiled_call_impl = call


def read_by_dynamo(module: nn.Module) -> None:
    """Let Dynamo read what a call of the module runs, where it traces a caller of it.

    It traces the forward of a module without hooks instead, and never looks at its compiled call
    (`UnspecializedNNModuleVariable.call_function`, read in torch 2.12 to 2.14). It counts as hooks
    these notes, too, which say of each hook whether it takes keyword arguments; of no hook they say
    nothing to anyone else.
    """
    module._forward_pre_hooks_with_kwargs[_NO_HOOK] = False


_NO_HOOK = -1  # torch counts hooks from 0


def entered_by_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let Dynamo trace this function, which `functools.wraps` made look like what torch.compile
    returned: by that one's mark it would trace the function below.
    """
    vars(function).pop("_torchdynamo_inline", None)
    return function


def buffers_of(module: nn.Module) -> dict[str, Any]:
    """The dict in which a module holds its buffers."""
    return module._buffers


def unwrapped(model: Any) -> Any:
    """The module in what `torch.compile(module)` returned; else the model itself."""
    return getattr(model, "_orig_mod", model)


# id of a parameter -> its dotted name in the model. Where that isn't known, `dict`: no names.
Names = Callable[[], Mapping[int, str]]


def names_in(module: nn.Module) -> Names:
    """The names of a module's parameters, as they are when they are asked for."""
    there = weakref.ref(module)

    def names() -> Mapping[int, str]:
        alive = there()
        if alive is None:  # (a module may have a length, and be false)
            return {}
        return {id(p): name for name, p in alive.named_parameters()}

    return names
