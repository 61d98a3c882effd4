"""`Trainer(plugins=[MPCompilePrecision()])`, for the package `pytorch_lightning`."""

from __future__ import annotations

from pytorch_lightning.plugins.precision import Precision

from .lightning_precision import CompiledPrecision


class MPCompilePrecision(CompiledPrecision, Precision):
    """As `mpcompile.integrations.lightning.MPCompilePrecision`."""
