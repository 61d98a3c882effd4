"""Sums over what programs save, and what one saves beyond another."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Sequence

import torch

from mpcompile.plans.partitioned import Saved

__all__ = ["Group", "excess", "groups", "place", "totals"]

SHOWN = 4
"""Of the groups of tensors in which two programs differ, so many are named."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Saved tensors that are alike."""

    count: int
    op: str
    module: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    copied: bool


def groups(saved: Sequence[Saved]) -> list[Group]:
    """By operator, module, shape and dtype, the largest first."""
    found = [
        Group(number, one.op, one.module, one.shape, _short(one.dtype), number * one.bytes,
              one.copied)
        for one, number in collections.Counter(saved).items()
    ]  # fmt: skip
    return sorted(found, key=lambda group: -group.bytes)


def _short(dtype: torch.dtype) -> str:
    """As `bf16`, `f32`, `i64`."""
    name = str(dtype).removeprefix("torch.")
    return re.sub(r"^(bfloat|float|uint|int)", lambda m: m[0].replace("loat", ""), name)


def place(group: Group) -> str:
    """How many, by which operator, in which module."""
    return f"{group.count} {group.op}" + (f" in {group.module}" if group.module else "")


def totals(saved: Sequence[Saved]) -> dict[str, int]:
    """Bytes: all, those in FP32, those of copies of inputs."""
    return {
        "all": sum(s.bytes for s in saved),
        "fp32": sum(s.bytes for s in saved if s.dtype is torch.float32),
        "copies": sum(s.bytes for s in saved if s.copied),
    }


def excess(ours: Sequence[Saved], theirs: Sequence[Saved]) -> list[tuple[Group, int, int]]:
    """Where two programs differ, copies of inputs aside: one of the tensors (its `op` names
    several), and how many more of its size and dtype the first saves, in number and in bytes; the
    largest difference first.
    """

    def alike(one: Saved) -> tuple[int, torch.dtype]:
        return (one.bytes, one.dtype)

    mine, others = (
        collections.Counter(alike(one) for one in side if not one.copied) for side in (ours, theirs)
    )
    found = []
    for key in mine.keys() | others.keys():
        more = mine[key] - others[key]
        if more:
            side = ours if more > 0 else theirs
            example = groups([one for one in side if alike(one) == key and not one.copied])
            group = dataclasses.replace(example[0], op=", ".join(map(place, example[:SHOWN])))
            found.append((group, more, more * key[0]))
    return sorted(found, key=lambda entry: -abs(entry[2]))
