"""A module that can't be compiled as it is asked for is refused at the call, not at a graph."""

from __future__ import annotations

import re

import torch

from .devices.registry import is_supported, supported
from .errors import MPCompileError, did_you_mean
from .ir.dtypes import HALF
from .rules.policy import Level
from .settings import Settings

_SHOWN = 6  # of a model's modules, in an error


def check_module(module: torch.nn.Module, settings: Settings) -> None:
    """Refuse, at the call, a module that would only fail later.

    Raises:
        MPCompileError: the module has parameters but none in FP32, half parameters at O1/O2, an
            unsupported device, or a module regex of the policy matches nothing.
    """
    where = type(module).__name__
    parameters = dict(module.named_parameters())
    dtypes = {p.dtype for p in parameters.values()}
    if parameters and not any(d.is_floating_point for d in dtypes):
        raise MPCompileError(f"{where} has no floating-point parameters: nothing to do in FP16")
    half = [n for n, p in parameters.items() if p.dtype in HALF]
    if half and settings.level in (Level.O1, Level.O2):
        raise MPCompileError(
            f"{where} is already in half precision ({half[0]} is "
            f"{str(parameters[half[0]].dtype).removeprefix('torch.')}): {settings.level.value} "
            "keeps FP32 master weights and makes the low-precision copies itself. Call "
            "model.float() first and load FP32 weights; or use level='O3'"
        )
    if parameters and settings.level is not Level.O0 and torch.float32 not in dtypes | set(HALF):
        raise MPCompileError(
            f"{where} has no FP32 parameters (found {', '.join(sorted(map(str, dtypes)))}): "
            "mixed precision starts from FP32; call model.float() first"
        )
    for name, parameter in parameters.items():
        if not is_supported(parameter.device):
            raise MPCompileError(
                f"{where}: {name} is on {parameter.device}; supported devices: "
                f"{', '.join(supported())}"
            )
    paths = [name for name, _ in module.named_modules() if name]
    for pattern in settings.policy.modules:
        if not any(re.search(pattern, path) for path in paths):
            hint = did_you_mean(pattern, [*paths, *(path.rpartition(".")[2] for path in paths)])
            some = ", ".join(paths[:_SHOWN]) + (", ..." if len(paths) > _SHOWN else "")
            raise MPCompileError(
                f"Policy(modules=...): {pattern!r} matches no module{hint}; the modules of "
                f"{where}: {some or 'none'}"
            )
