"""Two losses that torch computes otherwise where it traces them, in any compiled graph.

`F.multilabel_margin_loss` counts the labels after the first -1, which end a sample's list; and of
one sample without a batch, the loss of both is a row of one (torch 2.12 to 2.14).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _multilabel_margin_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    losses: Tensor = torch.ops.mpcompile.multilabel_margin_losses.default(input, target)
    if reduce is False or reduction == "none":
        return losses
    return losses.sum() if size_average is False or reduction == "sum" else losses.mean()


def _multi_margin_loss(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    loss = F.multi_margin_loss(input, target, *args, **kwargs)
    return loss if target.dim() else loss.reshape(())


INSTEAD: dict[Any, Any] = {
    F.multilabel_margin_loss: _multilabel_margin_loss,
    F.multi_margin_loss: _multi_margin_loss,
}
"""What a program calls -> what is traced instead."""
