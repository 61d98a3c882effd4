"""NVIDIA's Tensor Cores according to data sheets: the dtypes they multiply, and at which sizes.

Sources: NVIDIA's list of compute capabilities per GPU, CUDA's table of the data types that each
Tensor Core generation multiplies, and the data sheets of B200, H100, L40, A100, T4 and V100.
"""

from __future__ import annotations

import dataclasses

import torch

# (first compute capability, generation, dtypes its Tensor Cores multiply, dense FP16 FLOP for each
# byte of memory traffic), newest first.
_GENERATIONS: tuple[tuple[tuple[int, int], str, str, float], ...] = (
    ((10, 0), "Blackwell", "FP16, BF16, TF32, FP8, FP4", 281),
    ((9, 0), "Hopper", "FP16, BF16, TF32, FP8", 295),
    ((8, 9), "Ada", "FP16, BF16, TF32, FP8", 209),
    ((8, 0), "Ampere", "FP16, BF16, TF32", 200),
    ((7, 5), "Turing", "FP16", 203),
    ((7, 0), "Volta", "FP16", 139),
)
_ROWS_COUNT_BEFORE = (8, 0)  # before Ampere the number of rows must be aligned, too (cuBLAS)
# An FP16 product whose rows don't start at multiples of 16 bytes runs at about half speed. The gain
# from padding GPT-2's vocabulary from 50257 to 50304 agrees with that.
_SLOWDOWN = 2.0


@dataclasses.dataclass(frozen=True)
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


def cuda_tensor_cores(capability: tuple[int, int], name: str = "") -> str:
    """Describe the Tensor Cores of an NVIDIA GPU by its compute capability.

    ``name`` matters for one family: the GTX 16 series shares 7.5 with Turing RTX parts but has
    no Tensor Cores.
    """
    dotted = f"compute capability {capability[0]}.{capability[1]}"
    if "GTX 16" in name:
        return f"none (GTX 16 series, {dotted})"
    for first, generation, dtypes, _ in _GENERATIONS:
        if capability >= first:
            return f"{dtypes} ({generation}, {dotted})"
    return f"none ({dotted}; they start with Volta, 7.0)"


def multiply_in(units: str, dtype: torch.dtype) -> bool:
    """Whether Tensor Cores, as `cuda_tensor_cores` describes them, multiply in FP16 or BF16."""
    return ("FP16" if dtype is torch.float16 else "BF16") in units.partition(" (")[0]


def cuda_matrix_units(capability: tuple[int, int]) -> TensorCores:
    """The sizes that an NVIDIA GPU's Tensor Cores require, by its compute capability."""
    for first, *_, balance in _GENERATIONS:
        if capability >= first:
            rows = capability < _ROWS_COUNT_BEFORE
            return TensorCores(rows=rows, slowdown=_SLOWDOWN, balance=balance)
    return TensorCores()  # no Tensor Cores
