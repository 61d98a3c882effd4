"""Bytes kept between forward and backward, counted in the programs that torch.compile parts.

Every arm goes the way it goes in training: Dynamo, AOTAutograd, Inductor's passes on the joint
graph and its min-cut partitioner. Only code generation is left out: in its place stands a function
that reads from the partitioned forward what it hands to the backward. So a model of any size is
counted in seconds; its parameters are memory that nothing touches, its activations are never
allocated.

What is counted: see `mpcompile/plans/partitioned.py`. A model in half precision has its low
weights as parameters, which exist anyway. A copy of an input that the graph makes itself (a weight
cast to the low dtype) does count, and has a column of its own.

Without a GPU, peers are traced on the CPU, and our passes plan as for a GPU that has a kernel for
everything: a CPU's plan is another one (its attention is written out, for one thing), made for the
CPU's speed. What remains different: padding, and whatever else needs a GPU to be asked.

For a GPT small enough to run, the same arms run op by op as well, and saved-tensor hooks say what
autograd really holds.
"""

from __future__ import annotations

from benchmarks.harness.record import environment
from benchmarks.harness.report import Report, Settings

from .cases import TINY, Work
from .count import count_all
from .report import make_report

__all__ = ["run"]


def run(settings: Settings) -> Report:
    """Count everything; under `settings.quick` tiny models."""
    device = settings.device
    work = TINY if settings.quick else Work()
    record = environment(device)
    return make_report(work, device, count_all(work, device), record)
