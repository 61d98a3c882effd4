"""Faults of torch itself that our users would meet, and how mpcompile goes round each.

A row says in which releases a fault stands, and has a probe: a small program that says whether the
installed torch has it. `tests/test_torch_faults.py` runs the probes and says which row a release no
longer needs, or needs again. The way round acts in these releases alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from .instructions import cpu_flags

__all__ = ["FAULTS", "SCHEDULER_FORGETS_WRITES", "SHALLOW_VOLUMES", "TorchFault"]


@dataclass(frozen=True)
class TorchFault:
    """One fault.

    Attributes:
        name: a few words.
        wrong: what comes out wrong, and when.
        since: the first release that has it, of those that mpcompile supports.
        until: the first release that doesn't; None: none is known.
        shows: the first release in which `probe` sees it.
        way_round: what mpcompile does about it, where, and what that costs.
        where: whether this machine can show it.
        probe: whether the installed torch has it, on such a machine. Takes up to a minute.
    """

    name: str
    wrong: str
    since: str
    until: str | None
    shows: str
    way_round: str
    where: Callable[[], bool]
    probe: Callable[[], bool]

    def is_here(self, version: str = torch.__version__) -> bool:
        """Whether a release of torch has it."""
        return _number(self.since) <= _number(version) and (
            self.until is None or _number(version) < _number(self.until)
        )

    def shows_in(self, version: str = torch.__version__) -> bool:
        """Whether the probe sees it in a release of torch."""
        return self.is_here(version) and _number(self.shows) <= _number(version)


def _number(version: str) -> tuple[int, int]:
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


def _pooled_gradient_is_zero() -> bool:
    """Two convolutions under a pool, compiled by torch alone; their gradients are not zero."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch._C._DisableAutocast():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10),
        )  # fmt: skip
        torch.compile(model)(torch.randn(4, 1, 12, 12)).square().mean().backward()
    return not any(bool(p.grad.any()) for p in list(model.parameters())[:4] if p.grad is not None)


def _shallow_gradient_is_wrong() -> bool:
    """The weight gradient of a BF16 convolution, after its memory has held large numbers."""
    shape = (16, 16, 3, 3, 3)
    value = torch.linspace(-1, 1, 2 * 16 * 2 * 8 * 8).reshape(2, 16, 2, 8, 8).bfloat16()
    weight = torch.linspace(-0.1, 0.1, 16 * 16 * 27).reshape(shape).bfloat16()

    def gradient(dtype: torch.dtype) -> torch.Tensor:
        one = [1, 1, 1]
        gradients = torch.ops.aten.convolution_backward(
            value.to(dtype), value.to(dtype), weight.to(dtype),
            None, one, one, one, False, [0, 0, 0], 1, [False, True, False],
        )  # fmt: skip
        return gradients[1].double()  # type: ignore[no-any-return]

    exact = gradient(torch.float64)
    for _ in range(8):
        used = [torch.full((count,), 3e33) for count in (2**n for n in range(10, 20))]
        del used
        if not bool((gradient(torch.bfloat16) - exact).norm() < 0.1 * exact.norm()):
            return True
    return False


def _has_bf16_vectors() -> bool:
    """Whether oneDNN takes its kernels for AVX512: where no tile instructions take their place."""
    flags = cpu_flags()
    return bool(flags.get("avx512_f")) and not flags.get("amx_bf16")


SCHEDULER_FORGETS_WRITES = TorchFault(
    name="Inductor's C++ forgets an order of writes",
    wrong="A value that was written in place (a scatter: the backward of max_pool2d) may be read "
    "before it is written, where Inductor aligns the loops of its reader with another node's. "
    "Behind max_pool2d, the gradients of all convolutions are exactly 0.",
    since="2.11",
    until="2.14",
    shows="2.13",  # older releases make other code of the program of the probe
    way_round="`mpcompile/emit/write_order.py` puts the forgotten order back, in our compilations "
    "alone. It costs nothing: a right program compiles to the same code.",
    where=lambda: True,
    probe=_pooled_gradient_is_zero,
)

SHALLOW_VOLUMES = TorchFault(
    name="BF16 convolutions over shallow volumes",
    wrong="oneDNN leaves parts of the weight gradient of conv3d and conv_transpose3d unwritten "
    "where the kernel is larger than the padded volume is without its padding, such as a kernel of "
    "3 with padding 1 over a depth of 2; some sizes write out of bounds.",
    since="2.11",
    until=None,
    shows="2.11",
    way_round="`passes/graph/guard_kernels.py` computes these convolutions in FP32, whatever the "
    "policy. In BF16 they would take about a third of the time.",
    where=_has_bf16_vectors,
    probe=_shallow_gradient_is_wrong,
)

FAULTS = (SCHEDULER_FORGETS_WRITES, SHALLOW_VOLUMES)
