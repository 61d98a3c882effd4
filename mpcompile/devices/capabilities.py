"""The questions that a plan, a step, a profile and ``mpcompile info`` ask of a device.

`Capabilities` answers them for an accelerator about which nothing more is known: no low dtype is
fast, no kernel is special, and torch's own interfaces drive it. A device type is a subclass that
overrides what differs. The answers depend on the device and on the settings of libraries; nothing
is timed.

`torch.accelerator` waits for the device and counts its memory. Random states, names and the number
of devices exist only in the module of the device type (`torch.cuda`, `torch.xpu`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch


@dataclass(frozen=True)
class TensorCores:
    """The sizes that a device's matrix units require of dimensions, and the cost of other sizes.

    Attributes:
        alignment: the stride of a row must be a multiple of this many bytes (16 for every Tensor
            Core generation: 8 FP16 values; NVIDIA's mixed-precision guide).
        rows: whether the number of rows, which is not a stride, must be a multiple too.
        slowdown: how many times as long an unaligned product takes; 1: no difference.
        balance: FLOP that the units do in the time of one byte of memory traffic.
    """

    alignment: int = 16
    rows: bool = False
    slowdown: float = 1.0
    balance: float = 1.0


class Capabilities:
    """One device. The device itself is not asked before a method is called.

    Attributes:
        device: the device, e.g. `torch.device("cuda", 0)`.
        word: the name of its kind in messages: "CPU", "GPU".
        auto: the low dtype that `dtype="auto"` stands for, torch.float16 or torch.bfloat16.
        slow_dtypes: dtypes in which torch's kernels take many times as long as in FP32.
        asynchronous: whether a call returns before the device has done the work, so that reading a
            result makes the host wait. Such a device counts its memory (`allocated_memory`), and is
            busy only at sizes that would take a host minutes.
        multi_tensor: whether one kernel may work on many tensors (torch's `foreach` operators,
            Inductor's concatenations). It pays where a launch costs more than a small update.
        cuda_graphs: whether Inductor's mode "reduce-overhead" records graphs on this device.
        fewest_rows: chunks of at least so many rows make the fused head's products take longer than
            adding up the weight's gradient (8 bytes an element), which each chunk does once.
        turn: the least number of seconds that a profile times in one go.
        recomputes: whether a step is no faster if the forward keeps an operand of a matrix product
            that the backward could make of other kept values.
        slow_bools: whether Inductor's code takes many times as long to load or store a bool as a
            byte.
        convolves_channels_last: whether Inductor lays out channels-last what convolutions read.
        convolves_low_channels_last: whether convolutions in a low dtype read and write
            channels-last, and Inductor lays out so what some of them read only.
        spares_launches: whether a launch costs more than a look at a small gradient, or than its
            cast, so that gradients are unscaled and weights cast many at once.
        one_row: how many times as long as in FP32 a product of one row with a matrix takes in a low
            dtype, at least; 0: no longer than a profile says.
        wants_alignment: whether products of unaligned sizes take longer.
    """

    word: ClassVar[str]
    auto: ClassVar[torch.dtype]
    slow_dtypes: ClassVar[tuple[torch.dtype, ...]] = ()
    asynchronous: ClassVar[bool] = True
    multi_tensor: ClassVar[bool] = True
    cuda_graphs: ClassVar[bool] = False
    fewest_rows: ClassVar[int] = 1024
    turn: ClassVar[float] = 2e-3
    recomputes: ClassVar[bool] = False
    slow_bools: ClassVar[bool] = False
    convolves_channels_last: ClassVar[bool] = False
    convolves_low_channels_last: ClassVar[bool] = False
    spares_launches: ClassVar[bool] = False
    one_row: ClassVar[float] = 0.0
    wants_alignment: ClassVar[bool] = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    # -- the units that multiply matrices ----------------------------------------------------------

    def units(self) -> str:
        """Describe the hardware that multiplies in a low dtype: `"none..."` if there is none."""
        return "none known to mpcompile"

    def has_units(self, dtype: torch.dtype) -> bool:
        """Whether hardware multiplies matrices in `dtype`, according to the data sheet."""
        return False

    def matrix_units(self) -> TensorCores:
        """The sizes that these units require of dimensions; by default none."""
        return TensorCores()

    def why_auto(self) -> str:
        """Why `dtype="auto"` chooses this dtype here, for `mpcompile info`."""
        short = "FP16" if self.auto is torch.float16 else "BF16"
        if self.has_units(self.auto):
            return f"{short} has units of its own here ({self.units()})"
        return f"nothing multiplies {short} fast here: products stay FP32, unless measured"

    # -- kernels -----------------------------------------------------------------------------------

    def products_leave_in_fp32(self) -> bool:
        """Whether `mm.dtype` exists: a product of low operands with an FP32 result."""
        return False

    def has_slow_attention(self, dtype: torch.dtype) -> bool:
        """Whether fused attention is slower in `dtype` than two products around a softmax."""
        return False

    def miscounts_shallow_volumes(self, dtype: torch.dtype) -> bool:
        """Whether weight gradients of convolutions over three dimensions come out wrong in `dtype`
        where the kernel is larger than the volume is without its padding.
        """
        return False

    def accumulate_in_fp32(self) -> None:
        """Make libraries accumulate products of low dtypes in FP32: a setting of the process."""

    def low_accumulation(self, dtype: torch.dtype) -> str | None:
        """The setting of torch that now allows sums of products to be added in `dtype`, or None."""
        return None

    # -- running -----------------------------------------------------------------------------------

    def is_there(self) -> bool:
        """Whether this machine, and this build of torch, has the device."""
        return (self.device.index or 0) < self.count()

    def count(self) -> int:
        """How many devices of this type torch sees; 0 for the host, whose device has no index."""
        return int(self._module.device_count())

    def synchronize(self) -> None:
        """Wait until the device has done all its work."""
        torch.accelerator.synchronize(self.device)

    def stream(self) -> object:
        """The stream that operators run on now; None if each waits for the one before it."""
        return torch.accelerator.current_stream(self.device) if self.asynchronous else None

    def is_recording(self) -> bool:
        """Whether operators are noted in a graph of launches now, to be run later."""
        return False

    def is_shared(self, memory: torch.UntypedStorage) -> bool:
        """Whether other processes may have this memory, as far as torch can tell."""
        return False

    def record_event(self) -> Any:
        """An event whose `query()` says whether all work given to the device so far is done.

        The device need not be the current one, on whose stream a plain `record()` would put it.
        """
        event = self._module.Event()
        event.record(self._module.current_stream(self.device))
        return event

    def random_state(self) -> torch.Tensor:
        """The state of the device's random number generator, as bytes on the CPU."""
        state: torch.Tensor = self._module.get_rng_state(self.device)
        return state

    def set_random_state(self, state: torch.Tensor) -> None:
        """Restore a state that `random_state` returned."""
        self._module.set_rng_state(state, self.device)

    def allocated_memory(self) -> int:
        """Bytes of all tensors on the device; this also resets `peak_memory`."""
        torch.accelerator.reset_peak_memory_stats(self.device)
        return torch.accelerator.memory_allocated(self.device)

    def peak_memory(self) -> int:
        """The most bytes of tensors at any time since the last `allocated_memory`."""
        return torch.accelerator.max_memory_allocated(self.device)

    # -- facts: shown by `mpcompile info`, and part of what a profile is valid for -----------------

    def name(self) -> str:
        """The maker's name of the part."""
        return str(self._module.get_device_name(self.device))

    def part(self) -> str:
        """The name of the part in profiles: parts with one name are equally fast."""
        return self.name()

    def memory(self) -> int | None:
        """Bytes of memory, or None if unknown."""
        return int(self._module.get_device_properties(self.device).total_memory)

    def memory_text(self) -> str:
        """Its size: `"15.6 GiB"`, or `"unknown"`."""
        memory = self.memory()
        return "unknown" if memory is None else f"{memory / 2**30:.1f} GiB"

    def free_memory(self) -> int | None:
        """Bytes of memory that are free now, or None if unknown."""
        ask = getattr(self._module, "mem_get_info", None)
        return int(ask(self.device)[0]) if ask is not None else None

    def libraries(self) -> Mapping[str, str]:
        """The math libraries torch was built with or found: name -> version, "yes" or "no"."""
        return {}

    def driver(self) -> str:
        """The driver's version; `""` if there is no driver or its version is unknown."""
        return ""

    def threads(self) -> int:
        """How many threads torch computes with; 0 if the host's threads don't compute."""
        return 0

    def builtin_profile(self) -> str | None:
        """The file stem of the built-in profile that comes closest to the device, or None."""
        return None

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self.device)
