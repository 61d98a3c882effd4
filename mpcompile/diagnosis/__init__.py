"""Help for a model that doesn't train: what its numbers do."""

from .calibrate import calibrate
from .diagnose import diagnose
from .report import Report

__all__ = ["Report", "calibrate", "diagnose"]
