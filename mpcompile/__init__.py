"""mpcompile: a mixed-precision training compiler for PyTorch.

model = mpcompile(model)        # the only line; the training loop stays plain PyTorch
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from .torch_inside import version as _torch  # noqa: F401  isort: skip  # before what needs torch
from ._version import __version__

if TYPE_CHECKING:
    from .api import mpcompile
    from .diagnosis.calibrate import calibrate
    from .diagnosis.diagnose import diagnose
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

# What each public name is imported from, when it is first asked for: torch and its compiler take
# seconds, and a program that only has this package installed needn't wait for them.
_HOMES = {
    "Level": ".rules.policy",
    "LossScale": ".scaling.loss_scale",
    "MPCompileError": ".errors",
    "MPCompileWarning": ".errors",
    "MPOptimizer": ".optim",
    "Policy": ".rules.policy",
    "Precision": ".rules.policy",
    "calibrate": ".diagnosis.calibrate",
    "compiled_plans": ".runtime.records",
    "diagnose": ".diagnosis.diagnose",
    "explain": ".preview.explain",
    "finalize": ".integrations.export",
    "loss_scale_of": ".runtime.records",
    "mpcompile": ".api",
    "plan_for": ".preview.explain",
    "register_rule": ".rules",
    "train_step": ".steps",
}


class _Module(ModuleType):
    """`import mpcompile; mpcompile(model)`: says which name was meant. `dir()`: what is public."""

    def __getattr__(self, name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(_HOMES[name], __name__), name)
        setattr(self, name, found)
        return found

    def __dir__(self) -> list[str]:
        return __all__

    def __call__(self, *args: Any, **options: Any) -> NoReturn:
        from .errors import MPCompileError

        raise MPCompileError(
            "this is the module mpcompile, not the function in it: from mpcompile import mpcompile"
        )


sys.modules[__name__].__class__ = _Module
