"""CUDA graphs: whether a function becomes one, and results of it that outlive its next replay.

A replay reads and writes the same memory as the one before, and what it returns lies there. So
whoever keeps a result (a loop that collects its losses) would find the last step's value in all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..devices.registry import capabilities
from ..torch_inside import inductor
from .inference import Function
from .write_order import inductor_for

_RECORDS = "triton.cudagraphs"


def replays(mode: str | None, options: Mapping[str, Any] | None, device: torch.device) -> bool:
    """Whether what Inductor compiles for this device, mode and options becomes a CUDA graph."""
    patches = inductor_for(mode, options).config
    records = patches.get(_RECORDS, inductor.setting(_RECORDS))
    return bool(records) and capabilities(device).cuda_graphs


def outliving(run: Function, made: Sequence[bool]) -> Function:
    """A function that returns copies of the results of `run`.

    Args:
        run: a function that may be replayed.
        made: for each result, whether it is memory that `run` made; others are its inputs, or views
            of them. Those that share memory still do so when copied.
    """

    def run_and_copy(values: list[Any]) -> Sequence[Any]:
        results = list(run(values))
        copies: dict[int, torch.UntypedStorage] = {}  # by address
        for i, (result, own) in enumerate(zip(results, made, strict=True)):
            if own and isinstance(result, torch.Tensor):
                memory = result.untyped_storage()
                at = memory.data_ptr()
                if at not in copies:
                    copies[at] = memory.clone()
                place = result.storage_offset(), result.size(), result.stride()
                results[i] = result.new_empty(0).set_(copies[at], *place)
        return results

    return run_and_copy
