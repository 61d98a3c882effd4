"""How fast a device is in each dtype: measured once, read by the planner."""

from .cost_model import Profile, Sample
from .store import load

__all__ = ["Profile", "Sample", "load"]
