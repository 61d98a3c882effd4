"""What autograd itself says of the results of a rewritten graph, asked in its first call.

The loss scale stands at each result that may have a gradient (`passes/graph/scale_gradients.py`).
Which ones may, a run on FakeTensors has told; what runs in a call that stays opaque there, Dynamo's
notes told. This check reads neither: AOTAutograd, or autograd, has traced the emitted graph anew.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from ..errors import MPCompileError

__all__ = ["check_constants", "constants_of"]


def constants_of(graph: fx.GraphModule) -> Collection[int]:
    """The numbers of the results of a scaled graph that no gradient enters."""
    constant: Collection[int] = graph.meta["mp_constant_results"]
    return constant


def check_constants(results: Sequence[Any], constant: Collection[int]) -> None:
    """Raise MPCompileError if autograd tracks one of the results that no gradient should enter: it
    would enter without the loss scale, and leave divided by it.
    """
    tracked = [i for i in constant if torch.is_tensor(results[i]) and results[i].requires_grad]
    if tracked:
        numbers = ", ".join(map(str, tracked))
        raise MPCompileError(
            f"autograd tracks result {numbers} of a compiled graph, which mpcompile took for a "
            "constant: gradients would come out divided by the loss scale. This is a bug of "
            'mpcompile; until it is mended, compile this model with loss_scale="none", or in BF16'
        )
