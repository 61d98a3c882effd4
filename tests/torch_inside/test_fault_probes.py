"""Which faults of torch itself the installed release has: a small program shows each."""

import dataclasses
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mpcompile.devices.cpu import cpu_flags
from mpcompile.devices.cxx import miscopies_tiles
from mpcompile.devices.torch_faults import (
    FAULTS,
    GCC_MISCOPIES_TILES,
    MAXIMA_DECLARED_TWICE,
    POOLS_COUNT_OTHERWISE,
    SCHEDULER_FORGETS_WRITES,
    SHALLOW_VOLUMES,
    WRITTEN_INPUT_KEPT,
    ZEROS_ARE_REUSED,
    TorchFault,
)
from mpcompile.torch_inside.inductor import cpp_compiler
from mpcompile.torch_inside.names import autocast_off
from mpcompile.torch_inside.version import release

pytestmark = pytest.mark.inside

VERSION = torch.__version__


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


def _gcc_was_seen_to_miscopy() -> bool:
    """Whether the compiler is of a version in which the fault was seen: 11.3 and 12.2."""
    if not miscopies_tiles():
        return False
    asked = [str(cpp_compiler()), "-dumpversion"]
    said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    return said.strip().split(".")[0] in ("11", "12")


def _everywhere() -> bool:
    return True


# Of each fault the program that shows it, the first release in which it does, since others make
# other code of it or were not tried, and whether this machine can show it.
PROBES: dict[str, tuple[Callable[[], bool], str, Callable[[], bool]]] = {
    SCHEDULER_FORGETS_WRITES.name: (_pooled_gradient_is_zero, "2.13", _everywhere),
    SHALLOW_VOLUMES.name: (_shallow_gradient_is_wrong, "2.12", _has_bf16_vectors),
    ZEROS_ARE_REUSED.name: (_zeros_are_reused, "2.12", _everywhere),
    WRITTEN_INPUT_KEPT.name: (_recomputed_from_a_written_input, "2.12", _everywhere),
    MAXIMA_DECLARED_TWICE.name: (_two_maxima_do_not_compile, "2.13", _everywhere),
    POOLS_COUNT_OTHERWISE.name: (_pool_counts_otherwise, "2.13", _everywhere),
    GCC_MISCOPIES_TILES.name: (_tiles_are_miscopied, "2.13", _gcc_was_seen_to_miscopy),
}


@pytest.mark.slow("compiles by Inductor, or in processes of their own")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_release_needs_the_rows_that_name_it(fault: TorchFault) -> None:
    probe, shows, can_show = PROBES[fault.name]
    if not can_show():
        pytest.skip("this machine can't show it")
    found = probe()
    if fault.is_here() and release(shows) <= release(VERSION):
        assert found, (
            f"torch {VERSION} no longer has {fault.name!r}: set `until` of its row in"
            " mpcompile/devices/torch_faults.py; if no supported release has it, delete the row"
            f" and its way round: {fault.way_round}"
        )
    elif not fault.is_here():
        assert not found, (
            f"torch {VERSION} has {fault.name!r}, which its row doesn't say: mend `since` or"
            " `until` of the row in mpcompile/devices/torch_faults.py"
        )


def test_releases() -> None:
    fault = dataclasses.replace(FAULTS[0], since="2.12", until="2.14")
    assert [fault.is_here(v) for v in ("2.11.1", "2.12.0", "2.13.0+cpu", "2.14.1")] == [
        False, True, True, False,
    ]  # fmt: skip
    assert dataclasses.replace(fault, until=None).is_here("3.0")
