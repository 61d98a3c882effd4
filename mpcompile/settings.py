"""What `mpcompile()` and `torch.compile(backend="mpcompile", options=...)` accept, checked once."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import rules
from .devices.registry import is_supported, supported
from .emit.emitter import check_inductor
from .errors import MPCompileError, did_you_mean
from .ir.dtypes import HALF
from .rules.policy import Level, Policy, op_exists, parse_dtype, parse_level
from .state.loss_scale import LossScale

EMITS = ("inductor", "aot_eager", "eager")
PADS = ("auto", "always", "never")
OLDEST, NEWEST = (2, 11), (2, 14)

_KEYS = (
    "dtype",
    "level",
    "policy",
    "loss_scale",
    "pad",
    "emit",
    "dump",
    "fuse_head",
    "recompute",
    "strict",
    "mode",
    "options",
)


@dataclass(frozen=True)
class Settings:
    """A checked request.

    Attributes:
        level: O0..O3.
        dtype: torch.float16, torch.bfloat16, or None for "auto" (the device decides).
        policy: the user's precision overrides.
        loss_scale: the model's own scale, or None: the backend finds or makes one.
        scale_any_dtype: the user handed over a LossScale, so BF16 is scaled too.
        pad: "auto", "always" or "never": whether dims of products are padded.
        emit: "inductor", "aot_eager" or "eager".
        dump: directory for dumps, or None.
        fuse_head: make one operator of a head and its cross entropy.
        recompute: the backward computes again what one kernel can from what is stored anyway.
        strict: raise where a graph can't be rewritten, instead of compiling it unchanged.
        mode, inductor: handed to Inductor.
    """

    level: Level = Level.O1
    dtype: torch.dtype | None = None
    policy: Policy = Policy()
    loss_scale: LossScale | None = None
    scale_any_dtype: bool = False
    pad: str = "auto"
    emit: str = "inductor"
    dump: Path | None = None
    fuse_head: bool = False
    recompute: bool = False
    strict: bool = False
    mode: str | None = None
    inductor: Mapping[str, Any] | None = None

    @classmethod
    def parse(cls, request: Mapping[str, Any]) -> Settings:
        """Check a request; absent keys take their defaults.

        Raises:
            MPCompileError: an unknown key, level, dtype, operator or choice; a torch version
                outside the supported range.
        """
        check_torch_version(torch.__version__)
        for key in request:
            if key not in _KEYS:
                raise MPCompileError(
                    f"unknown option {key!r}{did_you_mean(key, _KEYS)}; known: {', '.join(_KEYS)}"
                )
        policy = request.get("policy") or Policy()
        if not isinstance(policy, Policy):
            raise MPCompileError(f"policy={policy!r}: give an mpcompile.Policy(...)")
        _check_policy(policy)
        dtype = parse_dtype(request.get("dtype", "auto"))
        scale = request.get("loss_scale", "dynamic")
        any_dtype = isinstance(scale, LossScale) and not scale.fp16_only
        if dtype is not torch.float16 and not any_dtype:
            _check_unscaled(policy)
        emit = _choice("emit", request.get("emit", "inductor"), EMITS)
        mode = request.get("mode")
        recompute = _flag("recompute", request.get("recompute", False))
        for name, asked in ((f"mode={mode!r}", mode is not None), ("recompute=True", recompute)):
            if asked and emit != "inductor":
                raise MPCompileError(f"{name} is Inductor's; it means nothing to emit={emit!r}")
        return cls(
            level=parse_level(request.get("level", Level.O1)),
            dtype=dtype,
            policy=policy,
            loss_scale=parse_loss_scale(scale),
            scale_any_dtype=any_dtype,
            pad=_choice("pad", request.get("pad", "auto"), PADS),
            emit=emit,
            dump=_directory(request.get("dump") or os.environ.get("MPCOMPILE_DUMP")),
            fuse_head=_flag("fuse_head", request.get("fuse_head", False)),
            recompute=recompute,
            strict=_flag("strict", request.get("strict", False)),
            mode=mode,
            inductor=_inductor_options(mode, request.get("options")),
        )


def parse_loss_scale(scale: LossScale | str | float | None) -> LossScale | None:
    """`"dynamic"` -> None (one is made per model), `"none"` or None -> off, a number -> static."""
    if isinstance(scale, LossScale):
        return scale
    if scale is None or scale == "none":
        return LossScale.none()
    if scale == "dynamic":
        return None
    if scale == "grad_scaler":
        made = LossScale.grad_scaler()
        made.fp16_only = True
        return made
    if isinstance(scale, (int, float)) and not isinstance(scale, bool):
        return LossScale.static(float(scale))
    raise MPCompileError(
        f"loss_scale={scale!r}: use 'dynamic', 'grad_scaler', 'none', a number, or a "
        f"LossScale{did_you_mean(str(scale), ('dynamic', 'grad_scaler', 'none'))}"
    )


def _choice(name: str, value: Any, known: tuple[str, ...]) -> str:
    if value not in known:
        raise MPCompileError(
            f"{name}={value!r}: use one of {', '.join(known)}{did_you_mean(str(value), known)}"
        )
    return str(value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise MPCompileError(f"{name}={value!r}: use True or False")
    return value


def _directory(dump: Any) -> Path | None:
    """Where dumps go, made if need be: what can't be written should not fail at the first graph."""
    if not dump:
        return None
    if not isinstance(dump, (str, os.PathLike)):
        raise MPCompileError(f"dump={dump!r}: give the path of a directory")
    try:
        Path(dump).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MPCompileError(f"dump={str(dump)!r}: can't be made a directory ({error})") from None
    return Path(dump)


def _inductor_options(mode: str | None, options: Any) -> Mapping[str, Any] | None:
    """`options`, once Inductor has accepted it and `mode`."""
    if options is not None and not isinstance(options, Mapping):
        raise MPCompileError(f"options={options!r}: give a dict of Inductor's options")
    if mode is not None or options:
        check_inductor(mode, options)
    return options


def _check_policy(policy: Policy) -> None:
    for key in policy.low | policy.full | policy.keep:
        if not op_exists(key):
            known = [name.removeprefix("aten::") for name in rules.known_ops()]
            hint = did_you_mean(key.removeprefix("aten::"), known)
            raise MPCompileError(f"Policy: no operator {key!r}{hint}")


def _check_unscaled(policy: Policy) -> None:
    """Without a loss scale, as in a BF16 compile, small gradients of an FP16 part would be zero."""
    for (where, key), dtype in policy.low_dtypes.items():
        if dtype is torch.float16:
            raise MPCompileError(
                f"Policy({where}={{{key!r}: 'fp16'}}): FP16 gradients need a loss scale, and BF16 "
                "has none: compile with dtype=torch.float16, hand over a LossScale, or write 'low'"
            )


def check_torch_version(version: str) -> None:
    """Raise `MPCompileError` outside the supported range, torch>=2.11,<2.14."""
    match = re.match(r"(\d+)\.(\d+)", version)
    found = (int(match[1]), int(match[2])) if match else (0, 0)
    if not OLDEST <= found < NEWEST:
        raise MPCompileError(
            f"mpcompile supports torch>=2.11,<2.14; this is torch {version}: "
            "install a supported torch, or an mpcompile made for this one"
        )


def check_module(module: torch.nn.Module, settings: Settings) -> None:
    """Refuse at the call what could only go wrong later.

    Raises:
        MPCompileError: no FP32 parameters where there are some, half parameters at O1/O2, an
            unsupported device, a module regex that matches nothing.
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
            hint = did_you_mean(pattern, paths)
            raise MPCompileError(f"Policy(modules=...): {pattern!r} matches no module{hint}")
