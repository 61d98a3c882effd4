"""Which products of a model run outside of its compiled graphs: as torch runs them, in FP32.

Dynamo leaves a frame to Python where it can't break the graph: in a loop, above all. The layers
that are called there are not compiled, and no graph knows of them. So one training call of a model,
and one call in evaluation, are looked at: the operators that reach PyTorch from Python while no
graph runs, and nothing compiles, run outside.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from ..capture.breaks import skipped_since, skips
from ..ir import hint, tensors_of
from ..torch_inside.autograd import current_node
from ..torch_inside.modes import TorchDispatchMode, current_mode

__all__ = ["Outside", "aside", "counted"]

_WIDE = (torch.float32, torch.float64)


class _Thread(threading.local):
    now: Outside | None = None  # what looks at the call that this thread is in


_thread = _Thread()


class Outside(TorchDispatchMode):
    """Within it as a context: counts the FLOPs of products.

    Attributes:
        compiled: of those in graphs that ran.
        modules: of those in FP32 outside of them, by the path of the module that calls them.
        device: where the last of these ran.
    """

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Dynamo compiles under it as without it."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """The same, for what Dynamo asks from torch 2.12 on."""
        return True

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.compiled = 0
        self.modules: Counter[str] = Counter()
        self.device: torch.device | None = None
        self._paths: Mapping[int, str] = {id(m): path for path, m in module.named_modules()}
        self._aside, self._skips = 0, skips()

    @property
    def why(self) -> str:
        """Why Dynamo left frames to Python in this call, as far as is known."""
        reasons = skipped_since(self._skips)
        return "; ".join(reasons) or "TORCH_LOGS=graph_breaks tells why"

    @property
    def share(self) -> float:
        """The share of the FLOPs, 0 to 1, in graphs."""
        total = self.compiled + self.modules.total()
        return self.compiled / total if total else 1.0

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Look at a call in this thread."""
        before, _thread.now = _thread.now, self
        try:
            with self:
                yield
        finally:
            _thread.now = before

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Don't look: a graph runs, or something compiles."""
        on_top = current_mode() is self
        if on_top:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._aside += 1
        try:
            yield
        finally:
            self._aside -= 1
            if on_top:
                self.__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, and count it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        flops = flop_registry.get(getattr(func, "overloadpacket", None))
        if flops is None or self._aside or current_node() is not None:
            return result  # a backward within the forward, where it has a node
        first = next(tensors_of(result))
        if first.dtype in _WIDE:
            self.device = first.device
            path = self._module_at(sys._getframe(1))
            self.modules[path] += hint(flops(*args, **kwargs, out_val=result))
        return result

    def _module_at(self, frame: FrameType | None) -> str:
        """The path of the innermost module in whose method the program is."""
        while frame is not None:
            path = self._paths.get(id(frame.f_locals.get("self")))
            if path is not None:
                return path
            frame = frame.f_back
        return ""


def aside() -> contextlib.AbstractContextManager[None]:
    """Around what compiles: nobody looks at it."""
    return contextlib.nullcontext() if _thread.now is None else _thread.now.aside()


def counted(graph: Callable[..., Any], flops: int) -> Callable[..., Any]:
    """Wrap the function that Dynamo calls for a graph with so many FLOPs in its products."""

    def run(*args: Any) -> Any:
        now = _thread.now
        if now is None:
            return graph(*args)
        now.compiled += flops
        with now.aside():
            return graph(*args)

    return run
