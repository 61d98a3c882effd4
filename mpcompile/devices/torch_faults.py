"""Faults of torch itself that our users would meet, and how mpcompile goes round each.

A row says in which releases a fault stands, and has a probe: a small program that says whether the
installed torch has it. `tests/torch_inside/test_torch_faults.py` runs the probes and says which row
a release no longer needs, or needs again. The way round acts in these releases alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..torch_inside.amp import autocast_off
from .cxx import GCC_FLAG, was_seen_to_miscopy
from .instructions import cpu_flags

__all__ = [
    "FAULTS",
    "GCC_FLAG",
    "GCC_MISCOPIES_TILES",
    "MAXIMA_DECLARED_TWICE",
    "POOLS_COUNT_OTHERWISE",
    "SCHEDULER_FORGETS_WRITES",
    "SHALLOW_VOLUMES",
    "WRITTEN_INPUT_KEPT",
    "ZEROS_ARE_REUSED",
    "TorchFault",
]


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
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), autocast_off():
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


def _zeros_are_reused() -> bool:
    """The derivative of a product along a tangent, compiled by torch alone: its backward raises."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        found: Any = torch.func.jvp(lambda z: z.matmul(w), (x,), (torch.ones_like(x),))
        total: torch.Tensor = found[0] + found[1]
        return total

    with torch.enable_grad(), autocast_off():
        x = torch.ones(16, 16, requires_grad=True)
        try:
            torch.compile(program)(x, x).sum().backward()
        except RuntimeError as error:
            return "ZeroTensor" in str(error)
    return False


def _recomputed_from_a_written_input() -> bool:
    """A checkpoint of values that were computed of an input before it was written."""

    def inner(p: torch.Tensor, q: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.layer_norm((p @ weight.half()).float(), (8,)) * q

    def program(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        before = torch.cos(x)
        narrow = before.half()
        x.relu_()
        return checkpoint(inner, narrow, before, weight, use_reentrant=False)  # type: ignore[no-any-return]

    def gradient(run: Callable[..., torch.Tensor]) -> torch.Tensor:
        weight = torch.linspace(-0.5, 0.4, 64).sin().view(8, 8).requires_grad_()
        result = run(weight, torch.linspace(-2, 2, 64).view(2, 4, 8))
        (result * torch.linspace(-1, 1.5, 64).view(2, 4, 8)).sum().backward()
        return weight.grad  # type: ignore[return-value]

    with torch.enable_grad(), autocast_off():
        exact = gradient(program)
        mine = gradient(torch.compile(program, backend="aot_eager"))
    return not bool((mine - exact).norm() < 0.1 * exact.norm())


def _two_maxima_do_not_compile() -> bool:
    """Two equal maxima in BF16, compiled by torch alone: its C++ is refused."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.amax(1), x.transpose(1, 2).amax(2)

    with torch.no_grad(), autocast_off():
        try:
            torch.compile(program)(torch.linspace(-1, 1, 2**15).view(4, 64, 128).bfloat16())
        except RuntimeError as error:
            return "conflicting declaration" in str(error)
    return False


def _pool_counts_otherwise() -> bool:
    """The places of maxima in a volume whose height and width are transposed in memory."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return F.max_pool3d(x, 3, stride=2, return_indices=True)[1]

    volume = torch.linspace(-60, 60, 2 * 2 * 6 * 6 * 5).sin().view(2, 2, 6, 5, 6).mT
    with torch.no_grad(), autocast_off():
        return not torch.equal(torch.compile(program)(volume), program(volume))


def _tiles_are_miscopied() -> bool:
    """Tiles of BF16 that are transposed twice in one loop, compiled by torch alone."""

    def program(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.t() + y, x.t() * y

    x = torch.linspace(-9, 9, 128 * 64).sin().view(128, 64).bfloat16()
    y = torch.linspace(-5, 5, 64 * 128).cos().view(64, 128).bfloat16()
    with torch.no_grad(), autocast_off():
        found = torch.compile(program)(x, y)
        return not all(map(torch.equal, found, program(x, y)))


def _has_bf16_vectors() -> bool:
    """Whether oneDNN takes its kernels for AVX512: where no tile instructions take their place."""
    flags = cpu_flags()
    return bool(flags.get("avx512_f")) and not flags.get("amx_bf16")


SCHEDULER_FORGETS_WRITES = TorchFault(
    name="Inductor's C++ forgets an order of writes",
    wrong="A value that was written in place (a scatter: the backward of max_pool2d) may be read "
    "before it is written, where Inductor aligns the loops of its reader with another node's. "
    "Behind max_pool2d, the gradients of all convolutions are exactly 0.",
    since="2.12",
    until="2.14",
    shows="2.13",  # older releases make other code of the program of the probe
    way_round="`mpcompile/lower/write_order.py` puts the forgotten order back, in our compilations "
    "alone. It costs nothing: a right program compiles to the same code.",
    where=lambda: True,
    probe=_pooled_gradient_is_zero,
)

SHALLOW_VOLUMES = TorchFault(
    name="BF16 convolutions over shallow volumes",
    wrong="oneDNN leaves parts of the weight gradient of conv3d and conv_transpose3d unwritten "
    "where the kernel is larger than the padded volume is without its padding, such as a kernel of "
    "3 with padding 1 over a depth of 2; some sizes write out of bounds.",
    since="2.12",
    until=None,
    shows="2.12",
    way_round="`passes/graph/guard_kernels.py` computes these convolutions in FP32, whatever the "
    "policy. In BF16 they would be faster.",
    where=_has_bf16_vectors,
    probe=_shallow_gradient_is_wrong,
)

ZEROS_ARE_REUSED = TorchFault(
    name="Inductor reuses the memory of zeros that have none",
    wrong="The backward of forward mode (torch.func.jvp, jacfwd, hessian) raises under Inductor: "
    "'ZeroTensors are immutable'.",
    since="2.12",
    until="2.14",
    shows="2.12",
    way_round="`passes/joint/fill_zeros.py` fills tensors with zeros in graphs with a transform of "
    "functorch. It costs these tensors' memory.",
    where=lambda: True,
    probe=_zeros_are_reused,
)

WRITTEN_INPUT_KEPT = TorchFault(
    name="the backward recomputes from a written input",
    wrong="Where the forward writes an input that needs no gradient, AOTAutograd's partitioner may "
    "keep the input itself and recompute, in the backward, what was computed before the write. A "
    "checkpoint that reads such values gives wrong gradients.",
    since="2.12",
    until=None,
    shows="2.12",
    way_round="`passes/joint/keep_written_inputs.py` keeps a copy of the input as it was: its "
    "memory once more, only where the gradient would be wrong.",
    where=lambda: True,
    probe=_recomputed_from_a_written_input,
)

MAXIMA_DECLARED_TWICE = TorchFault(
    name="Inductor's C++ declares maxima twice",
    wrong="Two equal maxima of BF16 or FP16 values in one loop, such as x.amax(1) and "
    "x.mT.amax(2), do not compile: 'conflicting declaration'.",
    since="2.12",
    until=None,
    shows="2.13",  # not tried in older releases
    way_round="`passes/joint/widen_maxima.py` takes them in FP32, which gives the same values and "
    "costs nothing.",
    where=lambda: True,
    probe=_two_maxima_do_not_compile,
)

POOLS_COUNT_OTHERWISE = TorchFault(
    name="Inductor counts places in a large pool otherwise",
    wrong="Indices of max_pool2d and max_pool3d with a window of more than 25 elements, and "
    "gradients, are those of other elements, in any dtype, where depth, height and width don't lie "
    "in this order in memory.",
    since="2.12",
    until=None,
    shows="2.13",  # not tried in older releases
    way_round="`passes/joint/order_pools.py` lays out in order what such a pool reads: a copy.",
    where=lambda: True,
    probe=_pool_counts_otherwise,
)

GCC_MISCOPIES_TILES = TorchFault(
    name="g++ miscopies Inductor's tiles",
    wrong="g++ 11 and 12, on a CPU with AVX512 that they don't know and so tune for none: a tile "
    "of 32x32 BF16 or FP16 elements that is transposed twice in a loop holds what was on the "
    "stack.",
    since="2.12",
    until=None,
    shows="2.13",  # not tried in older releases
    way_round=f"`mpcompile/lower/write_order.py` hands g++ {GCC_FLAG} where it tunes for no CPU. "
    "It costs no time.",
    where=was_seen_to_miscopy,
    probe=_tiles_are_miscopied,
)

FAULTS = (
    SCHEDULER_FORGETS_WRITES, SHALLOW_VOLUMES, ZEROS_ARE_REUSED, WRITTEN_INPUT_KEPT,
    MAXIMA_DECLARED_TWICE, POOLS_COUNT_OTHERWISE, GCC_MISCOPIES_TILES,
)  # fmt: skip
