"""Let Inductor take the device that exists by name for a GPU that it can generate kernels for.

Torch internals used here were read in torch 2.13.
"""

from __future__ import annotations

import sys
from types import ModuleType

import torch
from torch._inductor import config as inductor

from benchmarks.cuda_parts.inductor import describe, set_for_all_threads
from benchmarks.fakecuda.device import FakeGPU


def let_inductor_in(device: FakeGPU) -> None:
    """Answer what Inductor asks of a GPU, and turn off what would have to run on one."""
    describe(device.gpu)
    # `torch._dynamo.reset()` forgets CUDA graphs, by a module that a CPU build can't import.
    graphs = ModuleType("torch._inductor.cudagraph_trees")
    graphs.reset_cudagraph_trees = lambda: None  # type: ignore[attr-defined]
    sys.modules[graphs.__name__] = graphs
    # What is compiled here is of no use to other processes.
    set_for_all_threads(torch.compiler.config, "force_disable_caches", True)
    set_for_all_threads(inductor, "joint_graph_constant_folding", False)  # computes constants
