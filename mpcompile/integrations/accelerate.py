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

from ..api import mpcompile
from ..errors import MPCompileError
from ..runtime.records import compiled_in, loss_scale_of
from ..scaling.loss_scale import LossScale
from . import compiled_optimizer

SCALES_FILE = "loss_scale.pt"  # in the folder of a checkpoint
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_ENGINES = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.FSDP)


def options_for(precision: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The arguments of `mpcompile()` for what a trainer was told about precision.

    Args:
        precision: Accelerate's word: "no", "fp16" or "bf16".
        given: the arguments that the user wants.

    Raises:
        MPCompileError: the two name different dtypes, or `precision` is another word, or `given`
            is no mapping.
    """
    if given is not None and not isinstance(given, Mapping):
        raise MPCompileError(
            f'mpcompile={given!r}: give the arguments of mpcompile(), such as {{"level": "O2"}}'
        )
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


def scales_in(models: Iterable[nn.Module]) -> list[LossScale]:
    """The loss scales of all that `mpcompile()` has compiled in these models, in their order."""
    return [loss_scale_of(module) for model in models for module in compiled_in(model)]


def load_scales(models: Iterable[nn.Module], folder: str) -> None:
    """Take over the loss scales of a checkpoint, if it has any: a plain trainer's has none.

    Raises:
        MPCompileError: it was saved with more or fewer compiled modules.
    """
    file = os.path.join(folder, SCALES_FILE)
    if not os.path.isfile(file):
        return
    scales, states = scales_in(models), torch.load(file, weights_only=True)
    if len(scales) != len(states):
        raise MPCompileError(
            f"{file} holds the loss scales of {len(states)} compiled modules, and here are "
            f"{len(scales)}: load it with the models that it was saved with"
        )
    for scale, state in zip(scales, states, strict=True):
        scale.load_state_dict(state)


class MPCompileAccelerator(Accelerator):  # type: ignore[misc]
    """An `accelerate.Accelerator` that compiles the models and optimizers that it prepares.

    A model that `mpcompile()` has compiled already, and an `MPOptimizer`, are taken as they are.

    Args:
        mpcompile: arguments of `mpcompile()`, such as `{"level": "O2"}`.
        compile_optimizers: whether optimizers are wrapped in `MPOptimizer`.
        mixed_precision: "fp16" or "bf16" names the low dtype. Default: what `accelerate launch` was
            told, or else mpcompile's own choice.
        **kwargs: those of `accelerate.Accelerator`. What a `GradScalerKwargs` among its
            `kwargs_handlers` sets goes to the loss scale of each model.

    Raises:
        MPCompileError: a bad argument; two different dtypes, or two loss scales; `AutocastKwargs`;
            or DeepSpeed, Megatron-LM or FSDP.
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
        if not isinstance(compile_optimizers, bool):
            raise MPCompileError(f"compile_optimizers={compile_optimizers!r}: use True or False")
        if self.autocast_handler is not None:
            raise MPCompileError(
                "AutocastKwargs: MPCompileAccelerator runs no autocast, so they change nothing; "
                "leave them out, and name what stays in FP32 in a Policy"
            )
        if self.scaler_handler is not None and "loss_scale" in options:
            raise MPCompileError(
                "GradScalerKwargs, and loss_scale in the arguments of mpcompile(): give one"
            )
        mpcompile(**options)  # checks them
        self.compile_options = dict(options)
        self.compile_optimizers = compile_optimizers
        # Scales are looked up when the state is saved: which models exist, and who steps them, can
        # change until then. They are no registered objects, whose number must be the same in
        # every process that loads the state.
        self.register_save_state_pre_hook(self._save_scales)
        self.register_load_state_pre_hook(load_scales)

    @classmethod
    def adopt(
        cls, accelerator: Accelerator, options: Mapping[str, Any], compile_optimizers: bool
    ) -> MPCompileAccelerator:
        """Make one of an Accelerator that someone else has just made, without mixed precision.

        Raises:
            MPCompileError: see the class.
        """
        accelerator.__class__ = cls
        accelerator._compile_with(options, compile_optimizers)
        return accelerator  # type: ignore[no-any-return]

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As Accelerate's; models are compiled and optimizers wrapped before.

        Raises:
            MPCompileError: a model or an optimizer that can't be compiled; says what to do.
        """
        for given in args:  # models come first, wherever they stand
            if isinstance(given, nn.Module):
                self.compile_model(given)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """As Accelerate's; the model is compiled before. For evaluation alone, one that isn't in
        FP32 stays as it is.

        Raises:
            MPCompileError: it can't be compiled; says what to do.
        """
        if not evaluation_mode or all(p.dtype is torch.float32 for p in model.parameters()):
            self.compile_model(model)
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
        return prepared

    def prepare_optimizer(
        self, optimizer: Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """As Accelerate's; with `compile_optimizers` the optimizer is wrapped before.

        Raises:
            MPCompileError: it can't be compiled; says what to do.
        """
        if self.compile_optimizers and not isinstance(optimizer, AcceleratedOptimizer):
            optimizer = compiled_optimizer(optimizer, self.compile_options)
        return super().prepare_optimizer(optimizer, device_placement)

    def compile_model(self, model: nn.Module) -> nn.Module:
        """Compile a model in place, unless it is compiled, or some modules in it are."""
        if any(True for _ in model.parameters()) and not compiled_in(model):
            options = self.compile_options
            if self.scaler_handler is not None:  # its arguments hold in FP16, as a GradScaler's
                told = self.scaler_handler.to_kwargs()
                scale = LossScale.dynamic(**told) if told.pop("enabled", True) else LossScale.none()
                scale.fp16_only = True
                options = {"loss_scale": scale, **options}
            mpcompile(model, **options)
        return model

    def _save_scales(self, models: list[nn.Module], _weights: Any, folder: str) -> None:
        if scales := scales_in(models):
            self.save([scale.state_dict() for scale in scales], os.path.join(folder, SCALES_FILE))
