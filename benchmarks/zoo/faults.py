"""What is wrong with a row of the zoo."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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


def further_off(row: Mapping[str, Any], level: str, peer: str, measure: str = "error") -> bool:
    """In each draw, by more than FP32 rounds: two runs that round to FP16 at the same places differ
    by as much as each is off in FP32. Where an arm didn't run: no.
    """
    arms = row["arms"]
    draws = [arms[arm].get(measure, ()) for arm in (level, peer, COMPILED)]
    if not all(draws):
        return False
    return all(ours > theirs + 2 * fp32 for ours, theirs, fp32 in zip(*draws, strict=True))


def faults(row: Mapping[str, Any]) -> list[str]:
    """In words; none where plain torch.compile fails, too."""
    if "died" in row:
        return [f"the process died: {row['died']}"]
    if peer_fails(row):
        return []
    return [fault for level in LEVELS for fault in _faults(row, level)]


def _faults(row: Mapping[str, Any], level: str) -> list[str]:
    arms, peer = row["arms"], PEER[level]
    ours = arms[level]
    if "failed" in ours:
        return [f"{level} fails: {ours['failed']}"]
    found = [f"{level} leaves a graph in FP32: {reason}" for reason in ours["left"]]
    found += [f"{level} warns: {message}" for message in ours["warned"]]
    found += [f"{level}: the gradient of {name} is zero" for name in ours.get("dead", ())]
    graphs, plain = ours["graphs"], arms[COMPILED]["graphs"]
    if graphs > plain:
        found.append(f"{level} makes {graphs} graphs, torch.compile {plain}")
    graphs, plain = ours["resized"], arms[COMPILED]["resized"]
    if graphs > plain:
        found.append(f"{level} makes {graphs} graphs over all sizes, torch.compile {plain}")
    left = _names(ours["frames"]) - _names(arms[COMPILED]["frames"])
    found += [f"{level} leaves {frame} to Python, torch.compile doesn't" for frame in sorted(left)]
    for measure, what in (("error", "gradients"), ("worst", "the worst parameter's gradients")):
        if further_off(row, level, peer, measure):
            found.append(f"{level}: {what} further off than {peer}'s")
    return found


def _names(frames: Iterable[str]) -> set[str]:
    """Of the functions, without the reasons: "forward (model.py:12)"."""
    return {frame.partition(": ")[0] for frame in frames}
