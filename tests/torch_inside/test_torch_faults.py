"""Faults of torch itself: a model of ours never meets them."""

import dataclasses
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

import mpcompile
from mpcompile.devices.torch_faults import FAULTS, SCHEDULER_FORGETS_WRITES, SHALLOW_VOLUMES
from mpcompile.lower import write_order
from mpcompile.lower.write_order import KeepOrder, inductor_for
from mpcompile.passes.graph.guard_kernels import guard_kernels
from mpcompile.torch_inside.inductor import PRE_FUSION

pytestmark = pytest.mark.inside


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
def test_gradients_after_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a graph in FP32, as one that was left; without the way round they are zero."""
    model, x = pooled(), torch.randn(4, 1, 12, 12)
    wanted = gradients(model, model, x)
    ours = gradients(mpcompile.mpcompile(model, level="O0"), model, x)
    for mine, true in zip(ours, wanted, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-4, atol=1e-5)
    if not SCHEDULER_FORGETS_WRITES.is_here() or torch.__version__ < "2.13":  # shown since then
        return
    gone = dataclasses.replace(SCHEDULER_FORGETS_WRITES, until="2.12")
    monkeypatch.setattr(write_order, "SCHEDULER_FORGETS_WRITES", gone)
    torch._dynamo.reset()
    wrong = gradients(mpcompile.mpcompile(model, level="O0", verify=False), model, x)
    assert not any(bool(gradient.any()) for gradient in wrong[:4])


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
    stage = ran_twice(guard_kernels, program, *inputs, **{**in_bf16, **options})
    return stage.marks


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
        used = [torch.full((2**n,), 3e33) for n in range(10, 20)]
        del used
        for mine, true in zip(gradients(run, model, x), wanted, strict=True):
            assert float((mine - true).norm()) < 0.05 * float(true.norm())
