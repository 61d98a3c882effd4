"""Hugging Face's Trainer: a Trainer that compiles its model and its optimizer.

    trainer = MPCompileTrainer(model=model, args=args, ..., mpcompile={"level": "O2"})

Everything else stays as it is: `max_grad_norm`, gradient accumulation and checkpointing,
evaluation, checkpoints. `fp16=True` and `bf16=True` of the TrainingArguments choose the low dtype.
Other Trainers take the mixin: `class MyTrainer(MPCompileMixin, Seq2SeqTrainer): ...`.

Transformers' internals used here were read in transformers 5.23 and exist in 5.0.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from transformers import Trainer

from ..errors import MPCompileError
from .accelerate import SCALES_FILE, MPCompileAccelerator, load_scales, options_for, scales_in


class MPCompileMixin:
    """Makes a `transformers.Trainer` compile; it comes first among the base classes.

    Args:
        mpcompile: arguments of `mpcompile()`, such as `{"level": "O2"}`.
        compile_optimizers: whether the optimizer is wrapped in an `MPOptimizer`.
        *args, **kwargs: the Trainer's own.

    Raises:
        MPCompileError: TrainingArguments that can't be followed, or a bad argument; says what to
            change. A class whose bases name a Trainer before the mixin: where it is defined.
    """

    model: Any
    args: Any
    accelerator: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if Trainer in order and order.index(Trainer) < order.index(MPCompileMixin):
            raise MPCompileError(
                f"class {cls.__name__}: the Trainer's own methods come before MPCompileMixin's, so "
                "nothing would be compiled; name the mixin first among the base classes"
            )

    def __init__(
        self,
        *args: Any,
        mpcompile: Mapping[str, Any] | None = None,
        compile_optimizers: bool = False,
        **kwargs: Any,
    ) -> None:
        self._mp_given, self._mp_compile_optimizers = mpcompile, compile_optimizers
        super().__init__(*args, **kwargs)
        self.accelerator.compile_model(self.model)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the Trainer's Accelerator, without mixed precision of its own, and let it compile.

        Raises:
            MPCompileError: see the class.
        """
        if self.args.torch_compile:
            raise MPCompileError(
                "TrainingArguments(torch_compile=True): mpcompile compiles the model; leave it "
                'out, and pass mode, dynamic and the like in mpcompile={"mode": ...}'
            )
        if self.args.fp16_full_eval or self.args.bf16_full_eval:
            raise MPCompileError(
                "TrainingArguments(fp16_full_eval or bf16_full_eval) casts the FP32 parameters of "
                "the model in place; leave it out: a compiled model evaluates in the low dtype "
                "anyway"
            )
        if self.args.n_gpu > 1:
            raise MPCompileError(
                f"the Trainer would wrap the model in nn.DataParallel over {self.args.n_gpu} GPUs, "
                "whose replicas can't run what is compiled; start one process for each GPU: "
                f"torchrun --nproc_per_node={self.args.n_gpu}"
            )
        told = self.args.mixed_precision
        options = options_for(told, self._mp_given)
        self.args.mixed_precision = "no"
        try:
            super().create_accelerator_and_postprocess()  # type: ignore[misc]
        finally:
            self.args.mixed_precision = told
        MPCompileAccelerator.adopt(self.accelerator, options, self._mp_compile_optimizers)

    def call_model_init(self, trial: Any = None) -> Any:
        """The model that `model_init` makes, compiled."""
        return self.accelerator.compile_model(super().call_model_init(trial))  # type: ignore[misc]

    def _save_scaler(self, output_dir: str) -> None:
        super()._save_scaler(output_dir)  # type: ignore[misc]
        if self.args.should_save:
            states = [scale.state_dict() for scale in scales_in([self.model])]
            torch.save(states, os.path.join(output_dir, SCALES_FILE))

    def _load_scaler(self, checkpoint: str | None) -> None:
        super()._load_scaler(checkpoint)  # type: ignore[misc]
        if checkpoint is not None:
            load_scales([self.model], checkpoint)


class MPCompileTrainer(MPCompileMixin, Trainer):
    """`transformers.Trainer` in mixed precision, see `MPCompileMixin`."""
