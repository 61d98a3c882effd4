"""Let torch take the device that exists by name for a GPU of a certain kind.

Torch internals used here were read in torch 2.13.
"""

from __future__ import annotations

import sys
import traceback
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config as inductor
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _foreach_utils

from benchmarks.cuda_parts.inductor import (
    Sheet,
    describe,
    properties_of,
    set_for_all_threads,
    sheet,
)
from benchmarks.fakecuda import LIBRARY
from mpcompile.scaling.copies import WorkingCopy, _state

_DEVICE = torch.device("cuda", 0)


class FakeGPU:
    """The GPU that this process has become; as a context, what is made in it are fakes.

    Attributes:
        gpu: its data sheet.
        reads: where the host read a value of the device, a few lines of the stack each.
    """

    def __init__(self, kind: Sheet) -> None:
        self.gpu = kind
        self.reads: list[str] = []
        # Numbers from outside (an epsilon as a tensor) may come in as they are.
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def __enter__(self) -> FakeGPU:
        self.mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.mode.__exit__(*error)


_became: FakeGPU | None = None


def become(name: str) -> FakeGPU:
    """Make this process see one GPU, by a name of `mpcompile.devices.gpus`.

    Raises:
        MPCompileError: the name is not known.
        RuntimeError: it is a GPU already.
    """
    global _became
    if _became is not None:
        raise RuntimeError(f"this process is a {_became.gpu.name} already")
    _became = device = FakeGPU(sheet(name))
    _describe(device)
    _make_fakes(device)
    _note_reads(device)
    return device


def _describe(device: FakeGPU) -> None:
    properties = properties_of(device.gpu)
    capability = device.gpu.capability
    answers: dict[str, Any] = {
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: capability,
        "get_device_name": lambda device=None: properties.name,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "current_device": lambda: 0,
        "current_stream": lambda device=None: None,
        "device_count": lambda: 1,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8, device="cpu"),
        "set_rng_state": lambda state, device=None: None,
        "Event": _Never,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.backends.cuda.is_built = lambda: True
    LIBRARY.fakecuda_capability(capability[0])  # for the choice of attention
    torch._C._cuda_getCurrentRawStream = lambda index: 0  # type: ignore[attr-defined]


class _Never:
    """An event that has not happened yet: what waits for it without blocking goes on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    def query(self) -> bool:
        return False


_kernels = torch.library.Library("aten", "IMPL", "CUDA")


def _make_fakes(device: FakeGPU) -> None:
    """What is made on the device outside of the mode is a fake of it, too."""

    def making(op: Any) -> Any:
        def make(*args: Any, device: Any = None, pin_memory: Any = None, **kwargs: Any) -> Any:
            # torch.tensor(2.0, device="cuda") comes here past every mode, the active one included.
            active = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
            return FakeTensor(active or mode, op(*args, device="meta", **kwargs), _DEVICE)

        return make

    mode = device.mode
    _kernels.impl("empty.memory_format", making(torch.ops.aten.empty.memory_format))
    _kernels.impl("empty_strided", making(torch.ops.aten.empty_strided.default))
    _kernels.impl("copy_", lambda target, source, non_blocking=False: target)
    # By the type of a tensor torch decides whether lists of them take multi-tensor kernels.
    _foreach_utils._foreach_supported_types.append(FakeTensor)
    torch.Tensor.pin_memory = lambda self, device=None: self  # type: ignore[method-assign,assignment]


def _note_reads(device: FakeGPU) -> None:
    """A value that the host reads is 0: no overflow. Where it was read is noted."""

    def read(mode: FakeTensorMode, op: Any, value: FakeTensor) -> Any:
        if value.fake_device.type == "cuda" and value.fake_mode is device.mode:
            device.reads.append("".join(traceback.format_stack(limit=24)))
            return False if value.dtype is torch.bool else 0
        raise fake_impls.DataDependentOutputException(op)

    fake_impls.op_implementations_dict[torch.ops.aten._local_scalar_dense.default] = read


def let_inductor_in(device: FakeGPU) -> None:
    """Let Inductor take the device for a GPU that it can generate kernels for: answer what it asks,
    and turn off what would have to run on one.
    """
    describe(device.gpu)
    # `torch._dynamo.reset()` forgets CUDA graphs, by a module that a CPU build can't import.
    graphs = ModuleType("torch._inductor.cudagraph_trees")
    graphs.reset_cudagraph_trees = lambda: None  # type: ignore[attr-defined]
    sys.modules[graphs.__name__] = graphs
    # What is compiled here is of no use to other processes.
    set_for_all_threads(torch.compiler.config, "force_disable_caches", True)
    set_for_all_threads(inductor, "joint_graph_constant_folding", False)  # computes constants


# -- masters ---------------------------------------------------------------------------------------
# Parameters of the device that exists by name only, as masters of copies in the low dtype.


def let_fakes_be_masters() -> None:
    """On a GPU the class of a parameter says whether someone took its `.data`. A fake can't change
    its class, and its copy in the low dtype would be written again in every forward.
    """
    refresh = WorkingCopy.refresh

    def if_changed(copy: WorkingCopy, master: Tensor) -> None:
        if copy._seen != _state(master):
            refresh(copy, master)

    WorkingCopy.refresh = if_changed  # type: ignore[method-assign]
