"""What mpcompile does for a Lightning Trainer; `lightning.py` makes a precision plugin of it.

Lightning exists under two names, `lightning.pytorch` and `pytorch_lightning`, with classes of their
own. This file imports neither. What is used of Lightning was read in lightning 2.6.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..api import mpcompile
from ..errors import MPCompileError
from ..runtime.records import loss_scale_of
from ..torch_inside.modules import compiled_call
from . import compiled_optimizer

# The modules that a plugin has compiled: another Trainer's may compile them again.
_by_plugins: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class CompiledPrecision:
    """The methods of a Lightning precision plugin that are ours; see `MPCompilePrecision`."""

    def __init__(self, *, compile_optimizers: bool = False, **options: Any) -> None:
        super().__init__()
        if not isinstance(compile_optimizers, bool):
            raise MPCompileError(f"compile_optimizers={compile_optimizers!r}: use True or False")
        self._compile = mpcompile(**options)
        self._options = options
        self._compile_optimizers = compile_optimizers
        self._module: Any = None

    def __repr__(self) -> str:
        own = {"compile_optimizers": True} if self._compile_optimizers else {}
        options = ", ".join(f"{name}={value!r}" for name, value in {**own, **self._options}.items())
        return f"{type(self).__name__}({options})"

    # -- called by the strategy, in this order ----------------------------------------------------

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Compile the LightningModule in place, before it moves to its device. In a second fit of
        the same Trainer it keeps its graphs and its loss scale.

        Raises:
            MPCompileError: the module, or one inside of it, is compiled already; or it can't be.
        """
        compiled = [path for path, m in module.named_modules() if compiled_call(m) is not None]
        if compiled and module not in _by_plugins:
            raise MPCompileError(
                f"Trainer(plugins={self!r}): {type(module).__name__} is compiled already "
                f"({compiled[0] or 'all of it'}), and the plugin compiles all of it: leave out "
                "mpcompile() and .compile(), or the plugin"
            )
        if not compiled or self._module is not module:
            self._module = self._compile(module)
            _by_plugins.add(module)
        return module

    def connect(
        self, model: nn.Module, optimizers: Sequence[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Compile the optimizers, if that was asked for. Schedulers keep the ones they were made
        with, whose param groups an MPOptimizer shares.
        """
        if not self._compile_optimizers:
            return model, list(optimizers), lr_schedulers
        return model, [compiled_optimizer(one, self._options) for one in optimizers], lr_schedulers

    # -- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state of the model's loss scale."""
        return {} if self._module is None else loss_scale_of(self._module).state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state of a loss scale."""
        loss_scale_of(self._module).load_state_dict(state_dict)

    def on_load_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """Take over the GradScaler of a checkpoint of `Trainer(precision="16-mixed")`."""
        if state := checkpoint.get("MixedPrecision"):
            self.load_state_dict(state)
