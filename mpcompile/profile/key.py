"""What a profile is valid for: one part, one build of torch, one driver, one number of threads."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass, fields

import torch

from ..devices.registry import capabilities
from .model import Profile, Sample

__all__ = ["Key", "key_of"]


@dataclass(frozen=True)
class Key:
    """The fields of a `Profile` that must agree with the device it is used for."""

    device: str
    device_type: str
    torch_version: str
    driver: str
    threads: int

    @property
    def filename(self) -> str:
        """A readable file name, different for every key."""
        words = re.sub(
            r"[^a-z0-9.]+", "-", f"{self.device}-torch-{self.torch_version}".lower()
        ).strip("-")
        digest = hashlib.sha256(repr(astuple(self)).encode()).hexdigest()[:8]
        return f"{words}-{digest}.json"

    def profile(self, samples: Iterable[Sample]) -> Profile:
        return Profile(**asdict(self), samples=tuple(samples))

    def fits(self, profile: Profile) -> bool:
        return all(
            getattr(profile, field.name) == getattr(self, field.name) for field in fields(self)
        )


def key_of(device: torch.device) -> Key:
    """The key of a device of this machine.

    Raises:
        MPCompileError: the device type is not supported.
    """
    one = capabilities(device)
    return Key(one.part(), device.type, torch.__version__, one.driver(), one.threads())
