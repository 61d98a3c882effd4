"""Faults of torch itself: a model of ours never meets them. And which of them the installed release
has: a small program shows each.
"""

import dataclasses
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from graphs import ran_twice
from repository import ROOT
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mpcompile
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
from mpcompile.lower import write_order
from mpcompile.lower.write_order import KeepOrder, inductor_for
from mpcompile.passes.graph.guard_kernels import guard_kernels
from mpcompile.torch_inside.inductor import PRE_FUSION, cpp_compiler
from mpcompile.torch_inside.version import release

pytestmark = pytest.mark.inside

VERSION = torch.__version__


def test_the_page_lists_them() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    for fault in FAULTS:
        assert f"| {fault.name}" in page


# -- Inductor forgets the order of writes ---------------------------------------------------------


def pooled() -> nn.Module:
    """Two convolutions under a pool."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


def gradients(run: Callable[..., Any], model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    run(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.slow("compiles by Inductor, or in processes of their own")
def test_gradients_after_a_pool() -> None:
    """Of a graph in FP32, as one that was left. (Without the way round: a probe below.)"""
    model, x = pooled(), torch.randn(4, 1, 12, 12)
    wanted = gradients(model, model, x)
    ours = gradients(mpcompile.mpcompile(model, level="O0"), model, x)
    for mine, true in zip(ours, wanted, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-4, atol=1e-5)


class Theirs(CustomGraphPass):
    """A user's pass over the scheduler's nodes."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, nodes: Any) -> Any:
        self.seen += 1
        return nodes

    def uuid(self) -> Any:
        return "theirs"


class Node:
    """A node of the scheduler whose reads are worked out again."""

    def __init__(self) -> None:
        from torch._inductor.dependencies import MemoryDep, ReadWrites, StarDep
        from torch.utils._ordered_set import OrderedSet

        self.mutation_renames = {"zeros": "scattered"}
        self.found = ReadWrites(
            OrderedSet([MemoryDep("zeros", sympy.Integer(0), (), ())]),
            OrderedSet([]), OrderedSet([]),
        )  # fmt: skip
        self.read_writes = self.found.rename(self.mutation_renames).with_read(StarDep("added"))

    def get_nodes(self) -> list[Any]:
        return [self]

    def _compute_attrs(self) -> None:
        self.read_writes = self.found

    def set_read_writes(self, reads: Any) -> None:
        self.read_writes = reads


def test_a_node_keeps_what_it_depends_on() -> None:
    node, theirs = Node(), Theirs()
    before = {dep.name for dep in node.read_writes.reads}
    assert KeepOrder(theirs)([node]) == [node]
    assert theirs.seen == 1
    node._compute_attrs()
    assert {dep.name for dep in node.read_writes.reads} == before == {"scattered", "added"}


def test_what_the_caches_know() -> None:
    assert KeepOrder().uuid()
    assert KeepOrder(Theirs()).uuid() == ("theirs", KeepOrder().uuid())
    assert KeepOrder(lambda nodes: nodes).uuid() is None  # torch then doesn't cache


def test_settings_stay_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        write_order, "SCHEDULER_FORGETS_WRITES", dataclasses.replace(FAULTS[0], until=None)
    )
    theirs = Theirs()
    settings = inductor_for(None, {PRE_FUSION: theirs, "epilogue-fusion": False}).config
    assert settings["epilogue_fusion"] is False
    assert settings[PRE_FUSION].theirs is theirs
    assert getattr(torch._inductor.config, PRE_FUSION) is None


# -- shallow volumes ------------------------------------------------------------------------------

in_bf16 = {"low": torch.bfloat16}


def volume(depth: int, *, channels: int = 4) -> torch.Tensor:
    return torch.randn(1, channels, depth, 4, 4)


KERNEL = torch.randn(4, 4, 3, 3, 3)


def decided(program: Any, *inputs: torch.Tensor, **options: Any) -> str:
    return ran_twice(guard_kernels, program, *inputs, **{**in_bf16, **options}).marks


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpcompile.devices import cpu

    always = dataclasses.replace(SHALLOW_VOLUMES, until=None)
    monkeypatch.setattr(cpu, "SHALLOW_VOLUMES", always)


@pytest.mark.parametrize(
    ("run", "size", "options", "is_hit"),
    [
        (F.conv3d, 2, {"padding": 1}, True),
        (F.conv3d, 1, {"padding": 1}, True),
        (F.conv3d, 3, {"padding": 1}, False),
        (F.conv3d, 2, {"padding": "same"}, True),
        (F.conv3d, 4, {"padding": (1, 2, 2), "dilation": (2, 1, 1)}, True),
        (F.conv3d, 5, {"padding": (1, 2, 2), "dilation": (2, 1, 1)}, False),
        (F.conv3d, 3, {"padding": 0}, False),
        (F.conv3d, 5, {"padding": "valid", "dilation": (2, 1, 1)}, False),
        # The result is what the kernel runs over: of depth 2, 4 and 4 here.
        (F.conv_transpose3d, 2, {"padding": 1}, True),
        (F.conv_transpose3d, 2, {"padding": 0}, False),
        (F.conv_transpose3d, 4, {"padding": 1}, False),
    ],
)
def test_volumes(here: None, run: Any, size: int, options: dict[str, Any], is_hit: bool) -> None:
    def program(x: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
        return run(x, kernel, **options)

    assert ("FULL [kernel]" in decided(program, volume(size), KERNEL)) == is_hit
    assert "LOW [table]" in decided(program, volume(size), KERNEL, low=torch.float16)


def test_planes_are_left_alone(here: None) -> None:
    def program(x: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, kernel, padding=1)

    marks = decided(program, torch.randn(1, 4, 2, 2), torch.randn(4, 4, 3, 3))
    assert "LOW [table]" in marks


def test_a_size_that_is_not_known(here: None) -> None:
    def program(x: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
        return F.conv3d(x, kernel, padding=1)

    assert "FULL [kernel]" in decided(program, volume(5), KERNEL, dynamic=True)


def test_releases_without_the_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpcompile.devices import cpu

    monkeypatch.setattr(cpu, "SHALLOW_VOLUMES", dataclasses.replace(SHALLOW_VOLUMES, until="2.12"))
    assert "LOW [table]" in decided(lambda x, w: F.conv3d(x, w, padding=1), volume(2), KERNEL)


def fill_memory() -> None:
    """With large numbers, and free it."""
    used = [torch.full((2**n,), 3e33) for n in range(10, 20)]
    del used


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_weight_gradients_of_shallow_volumes(level: str) -> None:
    """Even if the user asks for BF16; memory that held large numbers is not taken for a result."""
    model = nn.Sequential(nn.Conv3d(16, 16, 3, padding=1), nn.ConvTranspose3d(16, 16, 3, padding=1))
    x = torch.randn(2, 16, 2, 8, 8)
    wanted = gradients(model, model, x)
    run = mpcompile.mpcompile(
        model, dtype=torch.bfloat16, level=level, emit="eager",
        policy=mpcompile.Policy(modules={".*": "LOW"}),
    )  # fmt: skip
    for _ in range(3):
        fill_memory()
        for mine, true in zip(gradients(run, model, x), wanted, strict=True):
            assert float((mine - true).norm()) < 0.05 * float(true.norm())


# -- which release has which fault ----------------------------------------------------------------


def _pooled_gradient_is_zero() -> bool:
    """Two convolutions under a pool, compiled by torch alone; their gradients are not zero."""
    model = pooled()
    found = gradients(torch.compile(model), model, torch.randn(4, 1, 12, 12))
    return not any(bool(gradient.any()) for gradient in found[:4])


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
        fill_memory()
        if not bool((gradient(torch.bfloat16) - exact).norm() < 0.1 * exact.norm()):
            return True
    return False


def _zeros_are_reused() -> bool:
    """The derivative of a product along a tangent, compiled by torch alone: its backward raises."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        found: Any = torch.func.jvp(lambda z: z.matmul(w), (x,), (torch.ones_like(x),))
        total: torch.Tensor = found[0] + found[1]
        return total

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

    exact = gradient(program)
    mine = gradient(torch.compile(program, backend="aot_eager"))
    return not bool((mine - exact).norm() < 0.1 * exact.norm())


def _two_maxima_do_not_compile() -> bool:
    """Two equal maxima in BF16, compiled by torch alone: its C++ is refused."""
    maxima = torch.compile(lambda x: (x.amax(1), x.transpose(1, 2).amax(2)))
    try:
        maxima(torch.linspace(-1, 1, 2**15).view(4, 64, 128).bfloat16())
    except RuntimeError as error:
        return "conflicting declaration" in str(error)
    return False


def differs(program: Callable[..., Any], *inputs: torch.Tensor) -> bool:
    """Whether torch alone compiles it to something else."""
    return not all(map(torch.equal, torch.compile(program)(*inputs), program(*inputs)))


def _pool_counts_otherwise() -> bool:
    """The places of maxima in a volume whose height and width are transposed in memory."""
    pool = lambda x: F.max_pool3d(x, 3, stride=2, return_indices=True)[1:]  # noqa: E731
    return differs(pool, torch.linspace(-60, 60, 2 * 2 * 6 * 6 * 5).sin().view(2, 2, 6, 5, 6).mT)


def _tiles_are_miscopied() -> bool:
    """Tiles of BF16 that are transposed twice in one loop."""
    x = torch.linspace(-9, 9, 128 * 64).sin().view(128, 64).bfloat16()
    y = torch.linspace(-5, 5, 64 * 128).cos().view(64, 128).bfloat16()
    return differs(lambda x, y: (x.t() + y, x.t() * y), x, y)


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


# Of each fault the program that shows it, the first release in which it does, since others make
# other code of it or were not tried, and whether this machine can show it.
PROBES: dict[str, tuple[Callable[[], bool], str, Callable[[], bool]]] = {
    SCHEDULER_FORGETS_WRITES.name: (_pooled_gradient_is_zero, "2.13", lambda: True),
    SHALLOW_VOLUMES.name: (_shallow_gradient_is_wrong, "2.12", _has_bf16_vectors),
    ZEROS_ARE_REUSED.name: (_zeros_are_reused, "2.12", lambda: True),
    WRITTEN_INPUT_KEPT.name: (_recomputed_from_a_written_input, "2.12", lambda: True),
    MAXIMA_DECLARED_TWICE.name: (_two_maxima_do_not_compile, "2.13", lambda: True),
    POOLS_COUNT_OTHERWISE.name: (_pool_counts_otherwise, "2.13", lambda: True),
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
            f"torch {VERSION} has {fault.name!r}, which its row doesn't say: mend"
            " `until` of the row in mpcompile/devices/torch_faults.py"
        )


def test_releases() -> None:
    fault = dataclasses.replace(FAULTS[0], until="2.14")
    found = [fault.is_here(version) for version in ("2.12.0", "2.13.0+cpu", "2.14.1")]
    assert found == [True, True, False]
    assert dataclasses.replace(fault, until=None).is_here("3.0")
