"""Loss scales in an optimizer's checkpoint: each goes back to the model it came from.

Scales belong to models, and a checkpoint is mostly loaded before the first forward, when none is
known yet. So each is saved with the indices of the parameters whose gradients it scales, and waits
until a model of these parameters runs.
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
        return SavedScales, (self.waiting,)  # in a copy no scale is known

    def restore(
        self, known: Mapping[LossScale, Collection[int]], *, appeared: bool = False
    ) -> None:
        """Give each scale that is known by now, and its parameters, what was saved for it. One that
        was loaded by itself keeps that.

        Args:
            appeared: a model ran after the checkpoint was loaded. Its scale may be in use already,
                and was given its state then: another optimizer of the checkpoint holds the model
                that ran first.
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
    """How much of both sets of parameters is in either; 0 for a GradScaler's, which has none.

    A model may have run more of its graphs then than now, or more now than then. Where either has
    parameters that the other has not, it is another model, that shares some: negative.
    """
    theirs = set(entry.get(_PARAMETERS, ()))
    if theirs - parameters and parameters - theirs:
        return -1.0
    return len(theirs & parameters) / max(len(theirs | parameters), 1)
