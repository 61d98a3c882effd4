"""Which products of a model run outside of its compiled graphs: as torch runs them, in FP32.

Dynamo leaves a frame to Python where it can't break the graph: in a loop, above all. It goes on
with the frames that are called there, but not with those of torch's own layers: no graph knows of
them. So the first training calls of a model, and the first in evaluation, are looked at
(`left_to_python.py`): the operators that reach PyTorch from Python while no graph runs, and nothing
compiles, run outside.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import optimization_hint
from torch.optim import Optimizer
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.flop_counter import flop_registry

from .breaks import skipped_since, skips
from .names import TorchDispatchMode, current_mode, current_node, pytree

_WIDE = (torch.float32, torch.float64)
_REENTRANT = CheckpointFunction.forward.__code__  # what is called by its frame isn't compiled


# What looks at the call that this thread is in.
_now: ContextVar[Outside | None] = ContextVar("now", default=None)


class Outside(TorchDispatchMode):
    """Within it as a context: counts the FLOPs of products.

    Attributes:
        compiled: of those in graphs that ran.
        modules: of those in FP32 outside of them, by the path of the module that calls them; in a
            function, by the name of the module's class.
        callers: of each of these products, the modules in whose methods the program is, the
            innermost first.
        checkpointed: those of them in a reentrant checkpoint, called outside of all graphs.
        device: where the last of these ran.

    Args:
        module: the compiled module; None: it is a function, which may call any modules.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Dynamo compiles under it as without it."""
        return True

    def __init__(self, module: nn.Module | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.compiled = 0
        self.modules: Counter[str] = Counter()
        self.callers: list[tuple[nn.Module, ...]] = []
        self.checkpointed: set[nn.Module] = set()
        self.device: torch.device | None = None
        self._paths: Mapping[nn.Module, str] | None = None
        if module is not None:
            self._paths = {m: path for path, m in module.named_modules()}
        self._aside, self._skips = 0, skips()

    @property
    def why(self) -> str:
        """Why Dynamo left frames to Python in this call, as far as is known."""
        return "; ".join(skipped_since(self._skips)) or "TORCH_LOGS=graph_breaks tells why"

    @property
    def share(self) -> float:
        """The share of the FLOPs, 0 to 1, in graphs."""
        total = self.compiled + self.modules.total()
        return self.compiled / total if total else 1.0

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Look at a call in this thread."""
        before = _now.set(self)
        try:
            with self:
                yield
        finally:
            _now.reset(before)

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
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        flops = flop_registry.get(getattr(func, "overloadpacket", None))
        if flops is None or self._aside or current_node() is not None:
            return result  # a backward within the forward, where it has a node
        first = next(filter(torch.is_tensor, pytree.tree_leaves(result)))
        frames = tuple(_frames(sys._getframe(1)))
        callers = [frame.f_locals.get("self") for frame in frames]
        # An optimizer's products make an update, which is not rounded.
        if first.dtype in _WIDE and not any(isinstance(c, Optimizer) for c in callers):
            self.device, paths = first.device, self._paths
            around = (c for c in callers if isinstance(c, nn.Module))
            modules = tuple(m for m in around if paths is None or m in paths)
            self.callers.append(modules)
            at = [i for i, f in enumerate(frames) if f.f_code is _REENTRANT]
            inner = callers[: at[-1]] if at else ()
            self.checkpointed.update(c for c in inner if isinstance(c, nn.Module))
            path = ""
            if modules:
                path = type(modules[0]).__name__ if paths is None else paths[modules[0]]
            # A preview's count may hold symbols.
            self.modules[path] += optimization_hint(flops(*args, **kwargs, out_val=result), 1)
        return result


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames that the program is in since the call began, the innermost first."""
    while frame is not None and not isinstance(frame.f_locals.get("outside"), Outside):
        yield frame
        frame = frame.f_back


def aside() -> contextlib.AbstractContextManager[None]:
    """Around what compiles: nobody looks at it."""
    return contextlib.nullcontext() if (now := _now.get()) is None else now.aside()


def counted(graph: Callable[..., Any], flops: int) -> Callable[..., Any]:
    """Wrap the function that Dynamo calls for a graph with so many FLOPs in its products."""

    def run(*args: Any) -> Any:
        if (now := _now.get()) is None:
            return graph(*args)
        now.compiled += flops
        with now.aside():
            return graph(*args)

    return run
