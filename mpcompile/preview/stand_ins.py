"""Copies of a model and its inputs without data: tensors with only a shape, a dtype and a device.

The copies are FakeTensors: they take no memory, and computing with them takes no time. Changes to
the copy don't reach the model's parameters, buffers, gradients or attributes. Tensors on "meta" get
stand-ins on the CPU, so a model that is too large for this machine may be made on "meta". What
tracing changes in the process besides, `no_trace` restores.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode

from ..errors import MPCompileError
from ..ir import aten
from ..runtime.check_module import deep_copy
from ..torch_inside.dynamo import BesideDynamo
from ..torch_inside.names import FakeTensorMode, TracingContext, cached_backends, counters
from ..torch_inside.owned_backend import nothing_happened

_CPU = torch.device("cpu")
_ENDLESS, _BRANCHES = 20, 16


class Answers(BesideDynamo):
    """Answers what a program asks of a condition between two graphs, as in an `if`: by `forced`,
    then no, from the twentieth time on yes, so that a loop ends.
    """

    def __init__(self, forced: tuple[bool, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.forced, self.asked = forced, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asks = func is aten._local_scalar_dense.default and args[0].dtype is torch.bool
        if not asks or TracingContext.try_get() is not None:
            return func(*args, **(kwargs or {}))
        self.asked += 1
        forced = self.forced[self.asked - 1 : self.asked]
        return forced[0] if forced else self.asked > _ENDLESS

    @classmethod
    def in_turn(cls, call: Callable[[], Any]) -> None:
        """Call for each way that the program may go, 16 at most, some of which may raise."""
        todo: list[tuple[bool, ...]] = [()]
        failed: list[MPCompileError] = []
        runs = 0
        while todo and runs < _BRANCHES:
            runs, answers = runs + 1, cls(todo.pop(0))
            try:
                with answers:
                    call()
            except MPCompileError as error:
                failed.append(error)
            more = range(answers.asked - len(answers.forced))
            todo += [(*answers.forced, *[False] * n, True) for n in more]
            todo.sort(key=len)  # what a loop asks comes last
        if len(failed) == runs:
            raise failed[0]


class StandIns:
    """Makes one stand-in for each tensor. Within `mode`, computed tensors are fake too."""

    def __init__(self) -> None:
        # A tensor that the program closes over is not replaced.
        # Sizes that depend on values become symbols.
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        self._memo: dict[int, Any] = {}
        self._originals: dict[int, torch.Tensor] = {}

    def of_module(self, module: nn.Module) -> nn.Module:
        """A copy of the module whose tensors are stand-ins.

        Raises:
            MPCompileError: something in it can't be copied.
        """
        # Copying a parameter calls no torch function, so parameters go into the memo first.
        for parameter in module.parameters():
            self.of_tensor(parameter)
        why = "a plan is made with a copy, so that nothing happens to the model"
        with _Copying(self):
            return deep_copy(module, self._memo, module, why)

    def of_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The stand-in of a tensor: a leaf, which requires a gradient if the tensor does."""
        if id(tensor) not in self._memo:
            plain = tensor.detach()
            if plain.is_meta:
                fake: Any = self.mode.fake_tensor_converter.from_meta_and_device(
                    self.mode, plain, _CPU
                )
            else:
                fake = self.mode.from_tensor(plain, static_shapes=True)
            needs = tensor.requires_grad
            is_parameter = isinstance(tensor, nn.Parameter)
            made = nn.Parameter(fake, needs) if is_parameter else fake.requires_grad_(needs)
            self._memo[id(tensor)], self._originals[id(made)] = made, tensor
        stand_in: torch.Tensor = self._memo[id(tensor)]
        return stand_in

    def original(self, value: Any) -> Any:
        """The tensor that a value stands in for, or the value itself."""
        return self._originals.get(id(value), value)


class _Copying(TorchFunctionMode):
    """While a module is copied, replaces its tensors that are not parameters by stand-ins."""

    def __init__(self, stand_ins: StandIns) -> None:
        self.stand_ins = stand_ins

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__:
            return self.stand_ins.of_tensor(args[0])
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def no_trace() -> Iterator[None]:
    """A context. After it are as before: the random states of Python, NumPy and torch's CPU; and
    Dynamo's sizes, from which it infers which are dynamic, its counters, and its list of backends.

    Meanwhile Python's cyclic garbage collector is off: tracing makes many objects, nearly all of
    which live to its end, and looking through them again and again would take a tenth of the time
    and more. What Dynamo compiled for the user's functions after a graph break stays until
    `torch.compiler.reset()`; their own compilations are kept apart from it (from torch 2.13 on).
    """
    collects, counts = gc.isenabled(), copy.deepcopy(counters)
    backends = set(cached_backends)
    gc.disable()
    try:
        with nothing_happened():
            yield
    finally:
        if collects:
            gc.enable()
        counters.clear()
        counters.update(counts)
        for new in cached_backends.keys() - backends:
            del cached_backends[new]
