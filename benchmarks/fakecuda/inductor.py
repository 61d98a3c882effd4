"""Let Inductor take the device that exists by name for a GPU that it can generate kernels for.

Torch internals used here were read in torch 2.13.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import config as inductor

from .device import FakeGPU

__all__ = ["let_inductor_in", "set_for_all_threads"]


def let_inductor_in(device: FakeGPU) -> None:
    """Answer what Inductor asks of a GPU, and turn off what would have to run on one."""
    properties = device.properties()
    major, minor = device.gpu.capability

    class Worker:
        """What Inductor's compile workers ask."""

        set_device = staticmethod(lambda index: None)
        current_device = staticmethod(lambda: 0)
        get_device_properties = staticmethod(lambda device=None: properties)

    answers: dict[str, Any] = {
        "Worker": Worker,
        "get_device_properties": staticmethod(lambda device=None: properties),
        "is_available": staticmethod(lambda: True),
        "current_device": staticmethod(lambda: 0),
        "device_count": staticmethod(lambda: 1),
        "get_compute_capability": staticmethod(lambda device=None: 10 * major + minor),
        "is_triton_capable": staticmethod(lambda device=None: True),
        "raise_if_triton_unavailable": staticmethod(lambda device=None: None),
        "get_raw_stream": staticmethod(lambda index: 0),
        "synchronize": staticmethod(lambda device=None: None),
    }
    for name, answer in answers.items():
        setattr(CudaInterface, name, answer)
    torch.cuda._exchange_device = lambda index: 0  # type: ignore[attr-defined]
    torch.cuda._maybe_exchange_device = lambda index: 0  # type: ignore[attr-defined]
    # `torch._dynamo.reset()` forgets CUDA graphs, by a module that a CPU build can't import.
    graphs = ModuleType("torch._inductor.cudagraph_trees")
    graphs.reset_cudagraph_trees = lambda: None  # type: ignore[attr-defined]
    sys.modules[graphs.__name__] = graphs
    # What is compiled here is of no use to other processes.
    set_for_all_threads(torch.compiler.config, "force_disable_caches", True)
    set_for_all_threads(inductor, "compile_threads", 1)  # workers know nothing of this device
    set_for_all_threads(inductor, "shape_padding", False)  # times products padded and unpadded
    set_for_all_threads(inductor, "joint_graph_constant_folding", False)  # computes constants


def set_for_all_threads(config: Any, name: str, value: Any) -> None:
    """Set an option of torch's. What is assigned to one holds in the thread that does it, and the
    backward is compiled in a thread of autograd's.
    """
    config._config[name].default = value
