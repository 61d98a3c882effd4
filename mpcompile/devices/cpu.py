"""The host's CPU: a call returns when its work is done; its instructions decide what is fast."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

import torch

from .capabilities import Capabilities
from .instructions import cpu_flags, cpu_units, vectors
from .torch_faults import SHALLOW_VOLUMES

__all__ = ["CPU"]

# (flag of `cpu_flags()`, built-in profile), best first
_PROFILES = (
    ("amx_bf16", "cpu-amx-bf16"), ("avx512_bf16", "cpu-avx512-bf16"),
    ("avx512_f", "cpu-avx512"), ("avx2", "cpu-avx2"),
)  # fmt: skip


class CPU(Capabilities):
    """The CPU. Its kernels repack their operands, so unaligned sizes cost nothing."""

    word = "CPU"
    auto = torch.bfloat16
    slow_dtypes = (torch.float16,)
    asynchronous = False
    multi_tensor = False
    counts_memory = False
    fewest_rows = 256  # fewer operations for each byte than a GPU
    turn = 1e-4
    slow_bools = True
    convolves_channels_last = True  # for oneDNN
    # oneDNN reads a BF16 matrix for one row at half the rate of an FP32 one, or less: measured with
    # torch 2.13 and AMX, over 5 sizes in both layouts, 0.85 to 1.62 times FP32's time.
    one_row = 1.2
    wants_alignment = False
    large_sizes = False  # they would take minutes

    def units(self) -> str:
        """Describe the low-precision dot-product instructions."""
        names = [name for name, _ in cpu_units(cpu_flags())]
        return ", ".join(names) if names else "none (no BF16 or FP16 matrix instructions)"

    def has_units(self, dtype: torch.dtype) -> bool:
        """Whether there are instructions that multiply in `dtype`."""
        return any(found is dtype for _, found in cpu_units(cpu_flags()))

    def why_auto(self) -> str:
        """Why "auto" is BF16."""
        names = [name for name, dtype in cpu_units(cpu_flags()) if dtype is self.auto]
        if not names:
            return super().why_auto()
        return f"BF16 has instructions of its own here ({names[0]}), FP16 is slow"

    def has_slow_attention(self, dtype: torch.dtype) -> bool:
        """True for BF16: its backward runs at a fraction of FP32's speed (torch 2.13)."""
        return dtype is torch.bfloat16

    def miscounts_shallow_volumes(self, dtype: torch.dtype) -> bool:
        """True for BF16, in the releases of torch whose oneDNN has this fault."""
        return dtype is torch.bfloat16 and SHALLOW_VOLUMES.is_here()

    def is_there(self) -> bool:
        """Always."""
        return True

    def count(self) -> int:
        """0: the host's device has no index."""
        return 0

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def is_shared(self, memory: torch.UntypedStorage) -> bool:
        """Whether it was put into shared memory."""
        return memory.is_shared()

    def random_state(self) -> torch.Tensor:
        """The state of the host's random number generator."""
        return torch.get_rng_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        """Restore a state that `random_state` returned."""
        torch.set_rng_state(state)

    def name(self) -> str:
        """The model, and the number of threads that torch computes with."""
        return f"{self._model()}, {torch.get_num_threads()} threads"

    def part(self) -> str:
        """The maker's name, which a virtual machine may shorten, and the instructions of products.

        Without matrix units these are its vectors: other vectors make other dtypes fast.
        """
        units = self.units().partition(" (")[0]
        return f"{self._model()} ({vectors() if units == 'none' else units})"

    def memory(self) -> int | None:
        """The host's memory."""
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, ValueError, OSError):  # not a POSIX system
            return None

    def free_memory(self) -> int | None:
        """What the host could give without swapping; None where it doesn't tell as Linux does."""
        try:
            lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
            facts = dict(line.split(":", 1) for line in lines)
            return 1024 * int(facts["MemAvailable"].split()[0])
        except (OSError, KeyError, ValueError):
            return None

    def libraries(self) -> Mapping[str, str]:
        """The libraries of matrix products, and the vector instructions that ATen uses."""
        return {
            "oneDNN": "yes" if torch.backends.mkldnn.is_available() else "no",
            "MKL": "yes" if torch.backends.mkl.is_available() else "no",
            "vectors": vectors(),
        }

    def threads(self) -> int:
        """How many threads torch computes with."""
        return torch.get_num_threads()

    def builtin_profile(self) -> str | None:
        """For an x86 CPU, the best of `_PROFILES` whose instructions it has.

        Its BF16 instructions, or else its vectors, decide which dtype is fast at which size. A CPU
        with AMX also has AVX512-BF16 and gets that profile, which promises too little. The ratio of
        two dtypes' times, on which choices depend, is about the same for any number of threads at
        large sizes; at small sizes BF16 starts to win at about twice the work. Other CPUs have no
        built-in profile: with BF16 instructions their products run low, without them in FP32.
        """
        flags = cpu_flags()
        if not str(flags.get("architecture", "")).startswith("x86"):
            return None
        return next((profile for flag, profile in _PROFILES if flags.get(flag)), None)

    def _model(self) -> str:
        return str(cpu_flags().get("cpu_name") or platform.processor() or platform.machine())
