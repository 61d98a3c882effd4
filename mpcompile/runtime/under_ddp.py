"""A call of a graph may run in the forward of a DistributedDataParallel, which averages gradients.

Only that forward tells (`mpcompile/ranks/ddp.py`), so each graph asks in each call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..scaling import reductions
from ..scaling.loss_scale import LossScale
from ..torch_inside.distributed import active_ddp
from .graph_call import is_leaf

__all__ = ["noticing_ddp"]


def noticing_ddp(
    call: Callable[..., Any],
    examples: Sequence[Any],
    low: torch.dtype | None,
    scale: LossScale | None,
    *,
    hooked: bool,
) -> Callable[..., Any]:
    """Wrap the function that Dynamo calls.

    Args:
        call: takes the caller's inputs.
        examples: those that the graph was compiled with.
        low: the dtype in which its gradients may be exchanged; None: FP32.
        scale: its loss scale; None where it is not scaled.
        hooked: whether the settings ask for low gradients on the wire, whatever became of this
            graph.
    """
    leaves = [i for i, x in enumerate(examples) if is_leaf(x)]
    wish = reductions.gradients_in(low, scale)

    def run(*args: Any) -> Any:
        module = active_ddp()
        if module is not None and torch.is_grad_enabled():
            reductions.enter(module, [args[i] for i in leaves], wish, scale, hooked=hooked)
        return call(*args)

    return run
