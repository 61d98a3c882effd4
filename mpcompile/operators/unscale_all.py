"""The operator that unscales many gradients at once and looks for overflows in them.

    unscale_all(gradients, found, inverse)      each gradient times `inverse`, in place;
                                                `found` = 1 if an element was inf or nan

It is the kernel that GradScaler launches for all gradients of an optimizer. As an operator of our
own it tells Inductor what ATen's does not: that its operands must lie as the graph says. Inductor
may copy an operand in order to lay it out, and writes the copy back only where it knows of that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_LIBRARY = torch.library.Library("mpcompile", "FRAGMENT")
_LIBRARY.define(
    "unscale_all(Tensor(a!)[] gradients, Tensor(b!) found, Tensor inverse) -> ()",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


def _unscale_all(
    gradients: Sequence[torch.Tensor], found: torch.Tensor, inverse: torch.Tensor
) -> None:
    torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default(gradients, found, inverse)


def _fake_unscale_all(
    gradients: Sequence[torch.Tensor], found: torch.Tensor, inverse: torch.Tensor
) -> None:
    pass


_LIBRARY.impl("unscale_all", _unscale_all, "CompositeExplicitAutograd")
torch.library.register_fake("mpcompile::unscale_all", _fake_unscale_all, lib=_LIBRARY)
