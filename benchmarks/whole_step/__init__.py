"""A training step compiled as a whole, against pieces, and against what torch compiles of it.

A step is forward, loss, backward, the optimizer's step and zero_grad; DCGAN's has two backwards
and two optimizers. The peer is what a user of torch would write: torch.compile of the model,
autocast, GradScaler (in FP16) and fused AdamW. "torch.compile(train_step)" is in FP32, with
`torch._dynamo.config.trace_autograd_ops`: forward and backward become one graph, and torch leaves
the graph at each `optimizer.step()`, which becomes another (so AdamW is not the fused one, which
torch doesn't trace). Ours are "pieces", `mpcompile(model)`, and "whole", `mpcompile(train_step)`,
both with an MPOptimizer. Everything runs in one thread.

Without its graphs: the same step when each call of a compiled graph returns at once what it
returned before. What remains is Python, Dynamo's guards, the autograd engine, and all that is not
compiled: of the peer, its fused AdamW and GradScaler. Medians of steps of one arm after the other.

Held: parameters, buffers, optimizer state and working copies. Peak: that, and the most that one
step allocates beyond what is there when it begins; on a CPU by the profiler's record of each
allocation of a tensor's memory, on CUDA by `torch.cuda.max_memory_allocated`. A CPU's operators
take scratch memory of their own (oneDNN's), which is in neither.

Starts are those of fresh processes, from the first compiling call to the end of the third step (in
FP16 the first one searches for the loss scale, so a whole step is compiled in the second): *cold*
with empty caches, *warm* with those that the cold one has left.
"""

from __future__ import annotations

import torch

from benchmarks.harness.record import environment
from benchmarks.harness.report import Report, Settings, paragraphs

from .measure import measure_all
from .report import make_report
from .tasks import TINY, work_for

__all__ = ["run"]


def run(settings: Settings) -> Report:
    """Measure every task; under `settings.quick` tiny ones, without Inductor and starts."""
    device = settings.device
    work = TINY if settings.quick else work_for(device)
    record, threads = environment(device), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = measure_all(work, device)
    finally:
        torch.set_num_threads(threads)
    return make_report(found, work, device, notes=paragraphs(__doc__), record=record)
