"""What is wrong with a row of the zoo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from .arms import AUTOCAST, COMPILED, HALF, LEVELS

__all__ = ["PEER", "faults", "further_off", "peer_fails", "ratio_to"]

PEER = {"O1": AUTOCAST, "O2": HALF}
"""Whose gradients each level's may not be further off than."""


def peer_fails(row: Mapping[str, Any]) -> str:
    """Why plain torch.compile doesn't train the model; "" if it does."""
    failed: str = row.get("arms", {}).get(COMPILED, {}).get("failed", "")
    return failed


def ratio_to(row: Mapping[str, Any], level: str, peer: str, measure: str) -> float | None:
    """Of the errors ("error" or "worst"), the median over the draws; None where one didn't run."""
    ours, theirs = (row["arms"][arm].get(measure) for arm in (level, peer))
    if ours is None or theirs is None:
        return None
    return median(a / b for a, b in zip(ours, theirs, strict=True))


def further_off(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """In each draw."""
    return all(a > b for a, b in zip(ours, theirs, strict=True))


def faults(row: Mapping[str, Any]) -> list[str]:
    """In words; none where plain torch.compile fails, too."""
    if "died" in row:
        return [f"the process died: {row['died']}"]
    if peer_fails(row):
        return []
    return [fault for level in LEVELS for fault in _faults(row["arms"], level)]


def _faults(arms: Mapping[str, Any], level: str) -> list[str]:
    ours, peer = arms[level], PEER[level]
    if "failed" in ours:
        return [f"{level} fails: {ours['failed']}"]
    found = [f"{level} leaves a graph in FP32: {reason}" for reason in ours["left"]]
    found += [f"{level} warns: {message}" for message in ours["warned"]]
    graphs, plain = ours["graphs"], arms[COMPILED]["graphs"]
    if graphs > plain:
        found.append(f"{level} makes {graphs} graphs, torch.compile {plain}")
    for measure, what in (("error", "gradients"), ("worst", "the worst parameter's gradients")):
        theirs = arms[peer].get(measure)
        if theirs and further_off(ours[measure], theirs):
            found.append(f"{level}: {what} further off than {peer}'s")
    return found
