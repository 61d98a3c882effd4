"""`Trainer(plugins=[MPCompilePrecision()])`, for the package `lightning`."""

from __future__ import annotations

from lightning.pytorch.plugins.precision import Precision

from .lightning_precision import CompiledPrecision


class MPCompilePrecision(CompiledPrecision, Precision):
    """Train a LightningModule in mixed precision: compile its steps, with the loss in the graph.

        trainer = Trainer(plugins=[MPCompilePrecision(level="O2", dtype=torch.float16)])

    It stands in the place of `Trainer(precision=...)`. The loss scale is saved in checkpoints.

    Args:
        compile_optimizers: make an `MPOptimizer` of each optimizer that `configure_optimizers`
            returns.
        **options: those of `mpcompile()`.

    Raises:
        MPCompileError: a bad option.
    """
