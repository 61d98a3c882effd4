"""Parameters of the device that exists by name only, as masters of copies in the low dtype."""

from __future__ import annotations

from torch import Tensor

from mpcompile.scaling.copies import WorkingCopy, _state

__all__ = ["let_fakes_be_masters"]


def let_fakes_be_masters() -> None:
    """On a GPU the class of a parameter says whether somebody took its `.data`. A fake can't change
    its class, and its copy in the low dtype would be written anew in every forward.
    """
    refresh = WorkingCopy.refresh

    def if_changed(copy: WorkingCopy, master: Tensor) -> None:
        if copy._seen != _state(master):
            refresh(copy, master)

    WorkingCopy.refresh = if_changed  # type: ignore[method-assign]
