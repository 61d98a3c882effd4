"""mpcompile: a mixed-precision training compiler for PyTorch.

model = mpcompile(model)        # the only line; the training loop stays plain PyTorch
"""

from ._version import __version__
from .api import compiled_plans, loss_scale_of, mpcompile
from .errors import MPCompileError, MPCompileWarning
from .loss_scale import LossScale
from .ops import register_rule
from .optim import MPOptimizer
from .planning import plan_for
from .policy import Level, Policy, Precision

__all__ = [
    "Level",
    "LossScale",
    "MPCompileError",
    "MPCompileWarning",
    "MPOptimizer",
    "Policy",
    "Precision",
    "__version__",
    "compiled_plans",
    "loss_scale_of",
    "mpcompile",
    "plan_for",
    "register_rule",
]
