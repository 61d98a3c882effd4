"""Profiles on disk, as plain JSON, and the choice of a device's profile.

    {"format": 1, "device": "AMD EPYC (AVX512-BF16)", ..., "samples": [
    {"kind": "gemm", "dtype": "bfloat16", "dims": [1, 64, 64, 64], "forward": 1e-05, "total": 3e-5},
    ...]}

A file is checked in full when it is read: its fields must have the types of the dataclasses', its
numbers be in range. Nothing in it is executed.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import os
import re
from importlib import resources
from pathlib import Path
from typing import Any

import platformdirs
import torch

from .. import logs
from ..devices.capabilities import Capabilities
from ..devices.registry import capabilities, supported
from ..errors import MPCompileError, warn
from ..stored import replace, restored
from .cost_model import MEASURED, ORIGINS, Profile, Sample

VARIABLE = "MPCOMPILE_PROFILE"
"""Environment variable: the path of a profile to use, or `"none"` to use none."""

FORMAT = 1

_loaded: dict[Path, Profile | None] = {}  # None: missing or unusable


def load(of: torch.device | Capabilities) -> Profile | None:
    """The profile of a device: the user's, the one measured here, or a built-in one. Times nothing.

    1. The file that `MPCOMPILE_PROFILE` names, for devices of its type; `"none"` means no profile.
    2. The file that `mpcompile profile` wrote to the user's cache for exactly this device, torch,
       driver and number of threads. A damaged file is skipped with an `MPCompileWarning`.
    3. The built-in profile that comes closest to the device.

    Every file is read once in a process.

    Args:
        of: a device of this machine; or the capabilities of one that isn't there, of which nothing
            can have been measured here.

    Raises:
        MPCompileError: the file that `MPCOMPILE_PROFILE` names doesn't exist or is no profile.
    """
    there = of if isinstance(of, Capabilities) else capabilities(of)
    wanted = os.environ.get(VARIABLE, "")
    if wanted.lower() == "none":
        return None
    if wanted:
        path = Path(wanted).expanduser().absolute()
        if path not in _loaded:
            _loaded[path] = _named_by_user(path)
        chosen = _loaded[path]
        if chosen is not None and chosen.device_type == there.device.type:
            return chosen
    measured = None if isinstance(of, Capabilities) else _from_cache(of)
    stem = there.builtin_profile()
    return measured or (None if stem is None else builtin(stem))


def cache_path(device: torch.device) -> Path:
    """The path of the profile measured on this device, whether the file exists or not."""
    return platformdirs.user_cache_path("mpcompile") / "profiles" / _filename(empty_profile(device))


def empty_profile(device: torch.device) -> Profile:
    """The profile of a device of this machine, without samples: what any of its must agree with.

    Raises:
        MPCompileError: the device type is not supported.
    """
    one = capabilities(device)
    facts = one.part(), device.type, torch.__version__, one.driver(), one.threads()
    return Profile(*facts, samples=())


def _filename(of: Profile) -> str:
    """A readable file name, different for every part, torch, driver and number of threads."""
    words = re.sub(r"[^a-z0-9.]+", "-", f"{of.device}-torch-{of.torch_version}".lower()).strip("-")
    facts = of.device, of.device_type, of.torch_version, of.driver, of.threads
    return f"{words}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:8]}.json"


@functools.cache
def builtin(stem: str) -> Profile:
    """A profile that is part of mpcompile, by the stem of its file."""
    file = resources.files(__package__) / "builtin" / f"{stem}.json"
    found = _parse(file.read_text(encoding="utf-8"))
    _log_loaded(found, f"{stem}.json")
    return found


def read(path: Path) -> Profile:
    """Read and check a profile.

    Raises:
        MPCompileError: the file doesn't exist or holds no profile; the message says what is wrong.
    """
    try:
        return _parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MPCompileError(f"can't read the profile {path}: {error.strerror}") from None
    except ValueError as error:  # or MPCompileError, UnicodeDecodeError, JSONDecodeError
        raise MPCompileError(f"{path} holds no device profile: {error}") from None


def write(profile: Profile, path: Path) -> None:
    """Write a profile as a whole or not at all: a reader never sees half a file.

    Raises:
        MPCompileError: the file can't be written.
    """
    try:
        replace(_text(profile), path)
    except OSError as error:
        raise MPCompileError(f"can't write the profile {path}: {error.strerror}") from None
    _loaded.pop(path.absolute(), None)


def _named_by_user(path: Path) -> Profile:
    try:
        found = read(path)
    except MPCompileError as error:
        raise MPCompileError(f"{VARIABLE}: {error}; set a path, or 'none', or unset it") from None
    _log_loaded(found, str(path))
    return found


def _from_cache(device: torch.device) -> Profile | None:
    path = cache_path(device).absolute()
    if path not in _loaded:
        _loaded[path] = None
        if path.exists():
            try:
                found = read(path)
            except MPCompileError as error:
                warn(f"{error}; it is passed over: delete it, or run mpcompile profile again")
            else:
                if dataclasses.replace(found, samples=(), origin=MEASURED) == empty_profile(device):
                    _loaded[path] = found
                    _log_loaded(found, str(path))
                else:
                    _log_misfit(found, str(path))
    return _loaded[path]


def _log_loaded(profile: Profile, file: str) -> None:
    logs.event(
        "profile", logging.INFO, "loaded",
        "loaded a profile of %(device)s, %(samples)d samples: %(file)s",
        device=profile.device, samples=len(profile.samples), file=file,
    )  # fmt: skip


def _log_misfit(profile: Profile, file: str) -> None:
    logs.event(
        "profile", logging.INFO, "misfit",
        "a profile of %(device)s is passed over: device, torch, driver or number of threads are "
        "others now: %(file)s",
        device=profile.device, file=file,
    )  # fmt: skip


# -- text ------------------------------------------------------------------------------------------


def _text(profile: Profile) -> str:
    fields = {f.name: getattr(profile, f.name) for f in dataclasses.fields(Profile)}
    samples = fields.pop("samples")
    head = json.dumps({"format": FORMAT, **fields}, indent=1).removesuffix("\n}")
    rows = ",\n".join(json.dumps(_row(sample)) for sample in samples)
    return f'{head},\n "samples": [\n{rows}\n]}}\n'


def _row(sample: Sample) -> dict[str, Any]:
    row = {f.name: getattr(sample, f.name) for f in dataclasses.fields(Sample)}
    rounded = {name: float(f"{row[name]:.4g}") for name in ("forward", "total")}
    return {**row, **rounded, "dtype": str(sample.dtype).removeprefix("torch.")}


def _parse(text: str) -> Profile:
    data = json.loads(text)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise MPCompileError(f"it is no JSON object with format {FORMAT}")
    found = restored(Profile, data)
    if found.device_type not in supported() or found.origin not in ORIGINS:
        raise MPCompileError(f"device_type {found.device_type!r}, origin {found.origin!r}")
    if found.threads < 0:
        raise MPCompileError(f"threads {found.threads}")
    if not found.samples:
        raise MPCompileError("it has no samples")
    if len({(s.kind, s.dtype, s.dims) for s in found.samples}) < len(found.samples):
        raise MPCompileError("it has two samples of one size")
    return found
