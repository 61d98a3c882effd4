"""Help for a model that doesn't train: what its numbers do, and which decision breaks it."""

from .bisect import Culprit, Outcome, bisect
from .calibrate import calibrate
from .diagnose import diagnose
from .report import Report

__all__ = ["Culprit", "Outcome", "Report", "bisect", "calibrate", "diagnose"]
