"""timm's models, where torchvision is missing.

timm imports torchvision, whose wheels fit one build of torch each; beside another build its import
fails. timm's models use nothing of it: only timm's data sets do, and a check for one class of
layers. So where torchvision can't be imported, stand-ins take its modules' places while timm is
imported.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from unittest import mock

from torch import nn

__all__ = ["timm"]

_IMPORTED = ("torchvision", "torchvision.ops", "torchvision.ops.misc", "torchvision.transforms",
             "torchvision.transforms.functional", "torchvision.datasets")  # fmt: skip
"""What timm 1.0 imports of torchvision, other than in a `try`."""


class _FrozenBatchNorm2d(nn.Module):
    """timm asks whether a layer is an instance of it; none of the zoo's is."""


def timm() -> ModuleType:
    """The package.

    Raises:
        ImportError: timm itself isn't installed.
    """
    if "timm" in sys.modules or _importable("torchvision"):
        return importlib.import_module("timm")
    stand_ins = {name: mock.MagicMock() for name in _IMPORTED}
    stand_ins["torchvision.ops.misc"].FrozenBatchNorm2d = _FrozenBatchNorm2d
    sys.modules.update(stand_ins)
    try:
        return importlib.import_module("timm")
    finally:  # others must not take them for torchvision
        for name in _IMPORTED:
            del sys.modules[name]


def _importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except (ImportError, RuntimeError):  # torchvision 0.28 beside another build: its operators lack
        return False
    return True
