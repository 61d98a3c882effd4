"""The first calls of what was compiled are looked at, and what they run outside of all graphs is
compiled module by module.

    for layer in self.layers:       # a break in this loop: Dynamo leaves the frame to Python,
        x = layer(x)                # and each `nn.Linear` in it, since its code is torch's own

A module gets an entry function of our own (`owned_backend.py`), which Dynamo compiles where it
meets it: with the same options, by the same backend, with the same loss scale. Within a graph the
entry is traced like any other call. Where the products of a module still run outside, its frame
can't be compiled either, and what it calls is next: from the outermost module inwards, one call
each. What is left after that is said.

Dynamo doesn't compile what a checkpoint calls outside of a graph, nor does it see the call that the
backward makes again. So the entry of such a module is compiled by itself (`compiled_part`), if the
checkpoint is a reentrant one. (The other kind checks that both calls save the same tensors: a
module must not be compiled between the two.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..devices.registry import is_supported
from ..errors import MPCompileError, shortened, warn
from ..planner.graph_plan import GraphPlan
from ..planner.plan_data import ENOUGH
from ..planner.target import target_of
from ..torch_inside.modules import compiled_call, plain_call, set_compiled_call
from ..torch_inside.outside_products import Outside
from ..torch_inside.owned_backend import entry

CompilePart = Callable[[nn.Module], Callable[..., Any]]


def enter_by_itself(module: nn.Module, compiled_part: CompilePart | None = None) -> None:
    """Have Dynamo compile the calls of this module that it meets outside of a graph; if
    `compiled_part` is given, all its calls.
    """
    make = compiled_part or functools.partial(entry, plain_call(type(module)))
    set_compiled_call(module, make(module))


def looked_into(call: Callable[[], Any], module: nn.Module, compiled_part: CompilePart) -> Outside:
    """Call a module until it compiles no more of what it calls. Returns what the last call ran
    outside of all graphs.
    """
    while True:
        outside = Outside(module)
        with outside.looking():
            call()
        if not _entered(outside, module, compiled_part):
            return outside


class ProductsCheck:
    """Looks at the first training calls of something compiled, and the first in evaluation.

    Attributes:
        due: whether the next call may be looked at.
        again: whether the last call's modules have been given entries: the next one is looked at
            again, and what is compiled may differ.
        entries: each gives a module that was found its entry, again.

    Args:
        compiled: a module or a function.
        compiled_part: compiles the call of a module inside of it by itself.
        plans: of the graphs compiled so far.
        dtype: what the user asked for; None: "auto".
        strict: whether it is an error if products run outside of all graphs.
        called: called after the first training call that was looked at.
    """

    def __init__(
        self,
        compiled: Any,
        compiled_part: CompilePart,
        plans: Sequence[GraphPlan],
        dtype: torch.dtype | None,
        *,
        strict: bool,
        called: Callable[[], None] = lambda: None,
    ) -> None:
        self._called, self._compiled_part = called, compiled_part
        self.due, self.again = True, False
        self.entries: list[functools.partial[None]] = []
        self._module = compiled if isinstance(compiled, nn.Module) else None
        self._named = getattr(compiled, "__name__", "a function")
        if self._module is not None:
            self._named = type(compiled).__name__
        self._plans, self._dtype, self._strict = plans, dtype, strict
        self._modes = {True, False}  # grad modes not yet called in

    def at(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A call that may be the first with gradients, or the first without."""
        training = torch.is_grad_enabled()
        if training not in self._modes:
            return run(*args, **kwargs)
        outside = Outside(self._module)
        with outside.looking():
            result = run(*args, **kwargs)
        gains = self._gains_in(outside)
        entries = _entered(outside, self._module, self._compiled_part) if gains else []
        self.entries += entries
        self.again = bool(entries)
        if not self.again:
            self._modes.discard(training)
            if training:
                self._called()
            if gains and self._said(outside):  # else there is another warning of that
                self._modes.clear()
        self.due = bool(self._modes)
        return result

    def _gains_in(self, outside: Outside) -> bool:
        """Whether what a call ran outside of the graphs would gain anything in one."""
        if outside.device is None or outside.share >= ENOUGH:
            return False
        inside = self._module.modules() if self._module is not None else ()
        if any(isinstance(m, DistributedDataParallel) for m in inside):
            return False  # Dynamo splits the graph of a DDP inside: what ran in it isn't counted
        return is_supported(outside.device) and target_of(outside.device, self._dtype).promised

    def _said(self, outside: Outside) -> bool:
        """Warn of products in FP32 that no graph holds, or raise if that is to be an error. Returns
        whether it was said.
        """
        trains = self._module is not None and any(True for _ in self._module.parameters())
        if trains and not self._plans:
            return False
        names = shortened([path or self._named for path, _ in outside.modules.most_common()])
        text = (
            f"mpcompile: {outside.share:.0%} of the product FLOPs of {self._named} ran in compiled "
            f"graphs; {names} ran as torch runs them, in FP32, because Dynamo left the code that "
            f"calls them to Python: {outside.why}. Move what breaks the graph out of there"
        )
        if self._strict:
            raise MPCompileError(text)
        warn(text)
        return True


def _entered(
    outside: Outside, but: nn.Module | None, compiled_part: CompilePart
) -> list[functools.partial[None]]:
    """Give entries to the outermost modules around the products that have none; return what gives
    them.
    """
    free = [
        [m for m in callers if compiled_call(m) is None and m is not but]
        for callers in outside.callers
    ]
    entries = [
        functools.partial(
            enter_by_itself, part, compiled_part if part in outside.checkpointed else None
        )
        for part in dict.fromkeys(modules[-1] for modules in free if modules)
    ]
    for enter in entries:
        enter()
    return entries
