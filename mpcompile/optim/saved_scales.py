"""Loss scales in an optimizer's checkpoint: each goes back to the model it came from.

Scales belong to models, and a checkpoint is mostly loaded before the first forward, when no scale
is known yet. So each is saved with the indices of the parameters whose gradients it scales, and
waits until a model with these parameters runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..state.loss_scale import LossScale

_PARAMETERS = "parameters"


def saved(scale: LossScale, parameters: Collection[int]) -> dict[str, Any]:
    """A scale's state and the indices of its parameters in the optimizer."""
    return {**scale.state_dict(), _PARAMETERS: sorted(parameters)}


class SavedScales:
    """The scales of a checkpoint that wait for their models."""

    def __init__(self, entries: Sequence[Mapping[str, Any]] = ()) -> None:
        self.waiting = list(entries)
        self._restored: weakref.WeakSet[LossScale] = weakref.WeakSet()

    def __reduce__(self) -> tuple[Any, ...]:
        return SavedScales, (self.waiting,)  # a copy knows no scale yet

    def restore(
        self, known: Mapping[LossScale, Collection[int]], *, appeared: bool = False
    ) -> None:
        """Load into each known scale the entry saved for its parameters. A scale whose own state
        was loaded separately keeps that state.

        Args:
            appeared: a model ran after the checkpoint was loaded. Its scale may be in use already;
                another optimizer of the checkpoint that holds the model may have loaded it then.
        """
        for scale, parameters in known.items():
            if scale in self._restored:
                continue
            likeness = {i: _likeness(e, set(parameters)) for i, e in enumerate(self.waiting)}
            best = max(likeness, key=likeness.__getitem__, default=None)
            if best is not None and likeness[best] >= 0:
                entry = self.waiting.pop(best)
                self._restored.add(scale)
                if not (scale.restored if appeared else scale.loaded):
                    scale.load_state_dict(entry)
                scale.loaded = False


def _likeness(entry: Mapping[str, Any], parameters: set[int]) -> float:
    """The share of parameters that both sets have in common; 0 for a GradScaler's entry (no set).

    A model may have run more or fewer of its graphs when it was saved than now. If each set has
    parameters that the other lacks, the entry is of another model that shares some: negative.
    """
    theirs = set(entry.get(_PARAMETERS, ()))
    if theirs - parameters and parameters - theirs:
        return -1.0
    return len(theirs & parameters) / max(len(theirs | parameters), 1)
