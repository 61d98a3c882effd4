"""The operator that stands for an optimizer's step while a whole training step is traced.

    take_step(number, params, grads)

It only marks the place. `mpcompile/whole_step` puts the optimizer's own step there; run by anything
else, it is an error.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_LIBRARY = torch.library.Library("mpcompile", "FRAGMENT")
# It writes to the parameters, so no tracer takes it for dead code, or moves reads across it.
_LIBRARY.define("take_step(int number, Tensor(a!)[] params, Tensor[] grads) -> ()")


def _take_step(number: int, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
    raise RuntimeError(
        f"mpcompile::take_step({number}, ...) marks a place in a graph; it can't run"
    )


def _fake_step(number: int, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
    pass


_LIBRARY.impl("take_step", _take_step, "CompositeExplicitAutograd")
torch.library.register_fake("mpcompile::take_step", _fake_step, lib=_LIBRARY)
