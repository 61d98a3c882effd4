"""Hugging Face Accelerate: an Accelerator whose `prepare` compiles.

    accelerator = MPCompileAccelerator(mpcompile={"level": "O2"})
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

The loop stays as it is: `accumulate`, `backward`, `clip_grad_norm_`, `save_state`, `load_state`.
The Accelerator's own mixed precision is off. What it was told (`mixed_precision="fp16"`) chooses
the low dtype, so there is one loss scale, which is saved with the state.

Accelerate's internals used here were read in accelerate 1.15.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import nn
from torch.optim import Optimizer

from ..api import compiled_in, loss_scale_of, mpcompile
from ..errors import MPCompileError
from ..optim import MPOptimizer
from ..state import clipping, parameters

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_ENGINES = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.FSDP)


def options_for(precision: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The arguments of `mpcompile()` for what a trainer was told about precision.

    Args:
        precision: Accelerate's word: "no", "fp16" or "bf16".
        given: the arguments that the user wants.

    Raises:
        MPCompileError: the two name different dtypes, or `precision` is another word.
    """
    options = dict(given or {})
    if precision in ("", "no"):
        return options
    dtype = _DTYPES.get(precision)
    if dtype is None:
        raise MPCompileError(f"mixed_precision={precision!r}: use 'no', 'fp16' or 'bf16' here")
    if options.setdefault("dtype", dtype) not in (dtype, "auto"):
        raise MPCompileError(
            f"mixed_precision={precision!r}, and mpcompile's dtype is {options['dtype']}: name one"
        )
    return {**options, "dtype": dtype}


class MPCompileAccelerator(Accelerator):  # type: ignore[misc]
    """An `accelerate.Accelerator` that compiles the models and optimizers given to `prepare`.

    A model that `mpcompile()` has compiled already, and an `MPOptimizer`, are taken as they are.

    Args:
        mpcompile: arguments of `mpcompile()`, such as `{"level": "O2"}`.
        compile_optimizers: whether `prepare` wraps optimizers in `MPOptimizer`.
        mixed_precision: "fp16" or "bf16" names the low dtype. Default: what `accelerate launch` was
            told, or else mpcompile's own choice.
        **kwargs: those of `accelerate.Accelerator`.

    Raises:
        MPCompileError: two different dtypes; or DeepSpeed, Megatron-LM or FSDP.
    """

    def __init__(
        self,
        *,
        mpcompile: Mapping[str, Any] | None = None,
        compile_optimizers: bool = False,
        mixed_precision: str | None = None,
        **kwargs: Any,
    ) -> None:
        told = mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        options = options_for(str(told).lower(), mpcompile)
        super().__init__(mixed_precision="no", **kwargs)
        self._compile_with(options, compile_optimizers)

    def _compile_with(self, options: Mapping[str, Any], compile_optimizers: bool) -> None:
        if self.distributed_type in _ENGINES:
            raise MPCompileError(
                f"Accelerate's {self.distributed_type.value} replaces parameters and optimizers by "
                "its own, which MPCompileAccelerator doesn't know. Use DDP (several processes, no "
                "plugin), or torch's fully_shard in a loop of your own"
            )
        self.compile_options = dict(options)
        self.compile_optimizers = compile_optimizers

    @classmethod
    def adopt(
        cls, accelerator: Accelerator, options: Mapping[str, Any], compile_optimizers: bool
    ) -> MPCompileAccelerator:
        """Make one of an Accelerator that somebody else has just made, without mixed precision.

        Raises:
            MPCompileError: DeepSpeed, Megatron-LM or FSDP.
        """
        accelerator.__class__ = cls
        accelerator._compile_with(options, compile_optimizers)
        return accelerator  # type: ignore[no-any-return]

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As Accelerate's; models are compiled and optimizers wrapped before.

        Raises:
            MPCompileError: a model or an optimizer that can't be compiled; says what to do.
        """
        result = super().prepare(*map(self._compiled, args), device_placement=device_placement)
        for model in args:
            if isinstance(model, nn.Module):
                self._save_scales_of(model)
        return result

    def compile_model(self, model: nn.Module) -> nn.Module:
        """Compile a model in place, unless it is compiled, or some modules in it are."""
        if any(True for _ in model.parameters()) and not compiled_in(model):
            mpcompile(model, **self.compile_options)
        return model

    def _compiled(self, given: Any) -> Any:
        if isinstance(given, nn.Module):
            return self.compile_model(given)
        known = isinstance(given, (MPOptimizer, AcceleratedOptimizer))
        if self.compile_optimizers and isinstance(given, Optimizer) and not known:
            return MPOptimizer(given, emit=self.compile_options.get("emit", "inductor"))
        return given

    def _save_scales_of(self, model: nn.Module) -> None:
        """Save the loss scales of a model with the state, unless its optimizer's state has them."""
        if any(parameters.owner_of(p) is not None for p in model.parameters()):
            return
        for module in compiled_in(model):
            if (scale := loss_scale_of(module)) not in self._custom_objects:
                self.register_for_checkpointing(scale)

    def clip_grad_norm_(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
    ) -> Any:
        """As Accelerate's, also where O2 stores gradients times the loss scale. Returns the norm of
        the true gradients before clipping, 0-d.
        """
        held = clipping.listed(parameters)
        if clipping.stores_scaled(held):
            return clipping.clip_grad_norm_(held, max_norm, norm_type)
        return super().clip_grad_norm_(held, max_norm, norm_type)

    def clip_grad_value_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float
    ) -> None:
        """As Accelerate's, also where O2 stores gradients times the loss scale."""
        held = clipping.listed(parameters)
        if clipping.stores_scaled(held):
            clipping.clip_grad_value_(held, clip_value)
        else:
            super().clip_grad_value_(held, clip_value)
