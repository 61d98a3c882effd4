"""Help for those whose model doesn't train: which decision breaks it."""

from .bisect import Culprit, Outcome, bisect

__all__ = ["Culprit", "Outcome", "bisect"]
