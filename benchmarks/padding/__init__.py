"""Padding for Tensor Cores: step time without it, with Inductor's `pad_mm`, and with ours.

Three models whose sizes are odd, as the originals' are: a GPT with 50257 words, DLRM's towers (13
numbers, 27 features, 479, 367 and 1 wide), SSD's heads (81 classes for each anchor). The peers are
torch.compile under autocast, with `shape_padding` off and on; ours are `pad="never"`, `"auto"` and
`"always"`. On a CPU odd sizes cost nothing, so "auto" has to do nothing, and at no cost.
"""

from __future__ import annotations

from benchmarks.harness.record import environment
from benchmarks.harness.report import Report, Settings

from .measure import CPU, CUDA, TINY, measure_all
from .report import make_report

__all__ = ["run"]


def run(settings: Settings) -> Report:
    """Time every model; under `settings.quick` small ones, once, without compiling."""
    device = settings.device
    full = CUDA if device.type == "cuda" else CPU
    work = TINY if settings.quick else full
    record = environment(device)
    return make_report(work, device, measure_all(work, device), record)
