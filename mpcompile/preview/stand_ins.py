"""A model and its inputs without numbers: copies whose tensors have a shape, a dtype and a device.

The copies are FakeTensors, so they take no memory and computing with them takes no time. What
happens to the copy happens to no parameter, buffer, gradient or attribute of the model. Tensors on
"meta" stand on the CPU: a model that is too large for this machine may be made there.

Torch internals used here were read in torch 2.13 and exist in 2.11.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..errors import MPCompileError

_CPU = torch.device("cpu")


class StandIns:
    """Makes stand-ins, one for each tensor; as a context, what is computed with them is one too."""

    def __init__(self) -> None:
        # A tensor that the program closes over comes in as it is.
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._memo: dict[int, Any] = {}

    def __enter__(self) -> StandIns:
        self.mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.mode.__exit__(*error)

    def of_module(self, module: nn.Module) -> nn.Module:
        """A copy of the module whose tensors are stand-ins.

        Raises:
            MPCompileError: something in it can't be copied.
        """
        # Parameters are no matter of torch functions, so these are in the memo before the copy.
        for parameter in module.parameters():
            self.of_tensor(parameter)
        try:
            with _Copying(self):
                return copy.deepcopy(module, self._memo)
        except Exception as error:
            raise MPCompileError(
                f"{type(module).__name__} can't be copied ({type(error).__name__}: {error}), and a "
                "plan is made with a copy, so that nothing happens to the model"
            ) from error

    def of_inputs(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same with stand-ins for the tensors, at any depth."""
        made: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(
            torch.Tensor, self.of_tensor, (tuple(args), dict(kwargs))
        )
        return made

    def of_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The one stand-in of a tensor: a leaf, which requires a gradient if the tensor does."""
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
            self._memo[id(tensor)] = (
                nn.Parameter(fake, needs) if is_parameter else fake.requires_grad_(needs)
            )
        made: torch.Tensor = self._memo[id(tensor)]
        return made


class _Copying(TorchFunctionMode):
    """While a module is copied: tensors that are no parameters become stand-ins."""

    def __init__(self, stand_ins: StandIns) -> None:
        self.stand_ins = stand_ins

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__:
            return self.stand_ins.of_tensor(args[0])
        return func(*args, **(kwargs or {}))
