"""Let torch's Python take the device of `emucuda.cpp` for a GPU of a certain kind.

Torch internals used here were read in torch 2.13.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.backends.cudnn import rnn

from benchmarks.cuda_parts.inductor import Sheet, properties_of, sheet
from benchmarks.emucuda import LIBRARY, graphs, kernels


class EmulatedGPU:
    """The GPU that this process has become.

    Attributes:
        gpu: its data sheet.
        launched: the names of Inductor's kernels that were run, in their order.
    """

    CALLS = ("operators", "allocations", "pinned", "copies", "waits")  # as in calls.h

    def __init__(self, kind: Sheet) -> None:
        self.gpu = kind
        self.launched: list[str] = []

    def host_calls(self) -> dict[str, int]:
        """What the host has asked of the device since the process began.

        Operators (views aside), Inductor's kernels, allocations of the device's memory (a caching
        allocator answers them) and of pinned memory, copies between host and device, events made,
        recorded and asked, and waits for the device.
        """
        calls = {name: LIBRARY.emucuda_calls(kind) for kind, name in enumerate(self.CALLS)}
        return calls | {"kernels": len(self.launched), "events": Event.asked}


_became: EmulatedGPU | None = None


def become(name: str) -> EmulatedGPU:
    """Make this process see one GPU, by a name of `mpcompile.devices.gpus`; once, or it raises."""
    global _became
    kind = sheet(name)
    if _became is not None:
        raise RuntimeError(f"no {kind.name}: this process is a {_became.gpu.name} already")
    _became = device = EmulatedGPU(kind)
    LIBRARY.emucuda_capability(kind.capability[0])
    _answer({**_facts(kind), **_memory(kind), **_random(), **_streams(), **_waits()})
    _answer_below()
    _let_cudnn_in()
    _make_storages()
    kernels.register()
    graphs.put_in_place()
    return device


def this_gpu() -> EmulatedGPU:
    """The GPU that this process has become."""
    if _became is None:
        raise RuntimeError("this process is no GPU: call benchmarks.emucuda.become first")
    return _became


def _answer(answers: dict[str, Any]) -> None:
    """In `torch.cuda` and in its modules that hold the same functions."""
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
        for module in (torch.cuda.memory, torch.cuda.random):
            if hasattr(module, name):
                setattr(module, name, answer)


def _facts(kind: Sheet) -> dict[str, Any]:
    properties, (major, minor) = properties_of(kind), kind.capability

    class Inside:
        """`with torch.cuda.device(0):` there is no other."""

        def __init__(self, *args: Any) -> None:
            pass

        def __enter__(self) -> None:
            pass

        def __exit__(self, *error: Any) -> None:
            pass

    return {
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: kind.capability,
        "get_device_name": lambda device=None: kind.name,
        "get_arch_list": lambda: [f"sm_{major}{minor}"],
        "is_bf16_supported": lambda including_emulation=True: including_emulation or major >= 8,
        "is_available": lambda: True, "is_initialized": lambda: True, "_initialized": True,
        "_is_compiled": lambda: True, "_lazy_init": lambda: None, "init": lambda: None,
        "device_count": lambda: 1, "current_device": lambda: 0, "set_device": lambda device: None,
        "_exchange_device": lambda index: 0, "_maybe_exchange_device": lambda index: 0,
        "device": Inside, "device_of": Inside, "_DeviceGuard": Inside,
    }  # fmt: skip


def _memory(kind: Sheet) -> dict[str, Any]:
    def allocated(device: Any = None) -> int:
        found: int = LIBRARY.emucuda_allocated()
        return found

    def peak(device: Any = None) -> int:
        found: int = LIBRARY.emucuda_peak()
        return found

    def stats(device: Any = None) -> dict[str, int]:
        return {"allocated_bytes.all.current": allocated(), "allocated_bytes.all.peak": peak()}

    def reset(device: Any = None) -> None:
        LIBRARY.emucuda_reset_peak()

    answers: dict[str, Any] = {
        "memory_allocated": allocated, "max_memory_allocated": peak, "memory_stats": stats,
        "reset_peak_memory_stats": reset,
    }  # fmt: skip
    for name in ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"):
        setattr(torch.accelerator, name, answers[name])
    return answers | {
        "memory_reserved": allocated, "max_memory_reserved": peak,
        "mem_get_info": lambda device=None: (kind.memory - allocated(), kind.memory),
        "empty_cache": lambda: None, "ipc_collect": lambda: None,
    }  # fmt: skip


def _random() -> dict[str, Any]:
    generator = torch.Generator("cuda")  # the first one is the default one

    def manual_seed(seed: int) -> None:
        generator.manual_seed(int(seed))

    return {
        "default_generators": (generator,),
        "get_rng_state": lambda device="cuda": generator.get_state(),
        "set_rng_state": lambda state, device="cuda": generator.set_state(state),
        "get_rng_state_all": lambda: [generator.get_state()],
        "manual_seed": manual_seed, "manual_seed_all": manual_seed,
        "initial_seed": generator.initial_seed, "seed": generator.seed, "seed_all": generator.seed,
    }  # fmt: skip


def _streams() -> dict[str, Any]:
    stream = Stream()
    # A function of its own: Dynamo lists both, and takes no function twice.
    torch.accelerator.synchronize = lambda device=None: synchronize()
    torch.accelerator.current_stream = lambda device=None: stream  # type: ignore[return-value]
    return {
        "Event": Event, "Stream": Stream, "synchronize": synchronize,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "stream": lambda given: stream, "set_stream": lambda given: None,
        "is_current_stream_capturing": lambda: False,
    }  # fmt: skip


def _waits() -> dict[str, Any]:
    modes = {"default": 0, "warn": 1, "error": 2}
    now = 0

    def set_mode(value: int | str) -> None:
        nonlocal now
        now = modes[value] if isinstance(value, str) else value
        LIBRARY.emucuda_sync_mode(now)

    return {"set_sync_debug_mode": set_mode, "get_sync_debug_mode": lambda: now}


def _answer_below() -> None:
    """What torch and Inductor ask of the C++ below `torch.cuda`."""
    answers: dict[str, Any] = {
        "_cuda_getCurrentRawStream": lambda index: 0,
        "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
        "_cuda_getDeviceCount": lambda: 1,
        "_cuda_setDevice": lambda index: None,
        "_cuda_getDevice": lambda: 0,
        "_cuda_exchangeDevice": lambda index: 0,
        "_cuda_maybeExchangeDevice": lambda index: 0,
        "_cuda_isCurrentStreamCapturing": lambda: False,
    }
    for name, answer in answers.items():
        setattr(torch._C, name, answer)
    torch.backends.cuda.is_built = lambda: True
    torch.version.cuda = "13.0"


def _let_cudnn_in() -> None:
    """What `kernels.py` has of cuDNN is there."""
    cudnn: Any = torch.backends.cudnn
    cudnn.is_available = lambda: True
    cudnn.version = lambda: 91900
    cudnn.is_acceptable = lambda tensor: tensor.is_cuda and tensor.is_floating_point()
    rnn.get_cudnn_mode = kernels.MODES.__getitem__


def _make_storages() -> None:
    """`torch.UntypedStorage(4, device="cuda")`, as `torch.load` makes them: torch's asks CUDA."""
    made = torch.UntypedStorage.__new__

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        by_size = not args or isinstance(args[0], int)
        if device is None or torch.device(device).type != "cuda" or not by_size:
            return made(cls, *args, **kwargs)
        size = args[0] if args else 0
        return torch.empty(size, dtype=torch.uint8, device="cuda").untyped_storage()

    torch.UntypedStorage.__new__ = new  # type: ignore[method-assign]


# -- streams ---------------------------------------------------------------------------------------
# Streams and events: one stream, and events that happen some kernels after they were recorded.

LAG = 30
"""Kernels by which the device is behind the host: an event has happened when so many more were
asked for. A GPU in a training step is behind by more than that.
"""

_EVER = 2**62


def synchronize(device: Any = None) -> None:
    """Wait until the device has done all of its work."""
    LIBRARY.emucuda_arrive(_EVER)


class Event:
    """A moment in the device's work.

    Attributes:
        asked: how often one was made, recorded, or asked whether it has happened.
    """

    asked = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        Event.asked += 1
        self._recorded: int | None = None
        self._time = 0.0

    def record(self, stream: Any = None) -> None:
        Event.asked += 1
        self._recorded, self._time = LIBRARY.emucuda_now(), time.perf_counter()

    def query(self) -> bool:
        """Whether it has happened. A host that does nothing but ask gets there, too."""
        Event.asked += 1
        if self._recorded is None or LIBRARY.emucuda_now() >= self._recorded + LAG:
            self.synchronize()
            return True
        LIBRARY.emucuda_tick()
        return False

    def synchronize(self) -> None:
        if self._recorded is not None:
            LIBRARY.emucuda_arrive(self._recorded)

    def wait(self, stream: Any = None) -> None:
        """Nothing to do: all work is done in one order."""

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds of the host, which say nothing of a GPU."""
        return 1000 * (end._time - self._time)


class Stream:
    """The one stream, whoever makes it."""

    device_index = stream_id = cuda_stream = priority = 0
    device_type = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cuda", 0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_stream(self, other: Stream) -> None:
        """Nothing to do: all work is done in one order."""

    def wait_event(self, event: Event) -> None:
        """Nothing to do: all work is done in one order."""

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        synchronize()
