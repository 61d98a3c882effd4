"""A module, or an operator with a backward, that a test needs once, without a class of its own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class _Module(nn.Module):
    def __init__(self, run: Callable[..., Any], parts: dict[str, Any]) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def module_of(forward: Callable[..., Any], **parts: Any) -> Any:
    """A module with these attributes, whose forward is a function of it and of the inputs."""
    return _Module(forward, parts)


def function_of(computes: Callable[..., Any], differentiates: Callable[..., Any]) -> Any:
    """An autograd.Function of its forward and its backward; both are given `ctx` first."""

    class Made(torch.autograd.Function):
        forward, backward = staticmethod(computes), staticmethod(differentiates)

    return Made
