"""Help for a model that doesn't train: finds the decision that breaks it."""

from .bisect import Culprit, Outcome, bisect

__all__ = ["Culprit", "Outcome", "bisect"]
