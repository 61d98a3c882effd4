"""A module that a test needs once, without a class of its own."""

from collections.abc import Callable
from typing import Any

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
