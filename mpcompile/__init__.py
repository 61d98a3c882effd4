"""mpcompile: a mixed-precision training compiler for PyTorch.

model = mpcompile(model)        # the only line; the training loop stays plain PyTorch
"""

import sys
from types import ModuleType
from typing import Any, NoReturn

from .torch_inside import version as _torch  # noqa: F401  isort: skip  # before what needs torch
from ._version import __version__
from .api import mpcompile
from .diagnosis import calibrate, diagnose
from .errors import MPCompileError, MPCompileWarning
from .integrations.export import finalize
from .optim import MPOptimizer
from .preview.explain import explain, plan_for
from .rules import register_rule
from .rules.policy import Level, Policy, Precision
from .runtime.records import compiled_plans, loss_scale_of
from .scaling.loss_scale import LossScale
from .steps import train_step

__all__ = [
    "Level",
    "LossScale",
    "MPCompileError",
    "MPCompileWarning",
    "MPOptimizer",
    "Policy",
    "Precision",
    "__version__",
    "calibrate",
    "compiled_plans",
    "diagnose",
    "explain",
    "finalize",
    "loss_scale_of",
    "mpcompile",
    "plan_for",
    "register_rule",
    "train_step",
]


class _Module(ModuleType):
    """`import mpcompile; mpcompile(model)`: says which name was meant. `dir()`: what is public."""

    def __dir__(self) -> list[str]:
        return __all__

    def __call__(self, *args: Any, **options: Any) -> NoReturn:
        raise MPCompileError(
            "this is the module mpcompile, not the function in it: from mpcompile import mpcompile"
        )


sys.modules[__name__].__class__ = _Module
