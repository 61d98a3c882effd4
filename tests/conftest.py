"""Fixtures for every test, and the warnings of torch's own that are none of ours."""

from __future__ import annotations

import collections
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from emulated import EMULATED
from rows import covering

# Warnings are errors (pyproject.toml). These arise inside torch, whatever the program.
FROM_TORCH = (
    # Dynamo, on any autograd.Function
    "ignore:.*torch.autograd.function.Function.* should not be instantiated:DeprecationWarning",
    # Dynamo, on an input that is no leaf: it asks for `.grad` and mutes its logger, not the warning
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    # Inductor, when it is first imported
    "ignore:.torch.jit.script:DeprecationWarning",
    # torch.distributed.optim, when it is imported
    "ignore:.torch.jit.interface:DeprecationWarning",
    # Inductor, at the first compile on a GPU that has TF32 units: advice
    "ignore:TensorFloat32 tensor cores:UserWarning",
    # torch 2.14 of its own tables for forward mode, at the first `torch.func.jvp`
    "ignore:`torch.jit.script` is deprecated:FutureWarning",
    # torch 2.11's profiler, when it is first used: about cycles, of which there is one
    "ignore:Warning. Profiler clears events at the end of each cycle:UserWarning",
    # Inductor, where a GPU splits the sums of a softmax: about speed
    "ignore:\\s*Online softmax is disabled:UserWarning",
)


def pytest_configure(config: pytest.Config) -> None:
    # No plan depends on the machine that the tests run on.
    os.environ.setdefault("MPCOMPILE_PROFILE", "none")
    os.environ.setdefault("MPCOMPILE_CHECK", "0")  # nor on what a check of it has found
    for line in FROM_TORCH:
        config.addinivalue_line("filterwarnings", line)


def pytest_addoption(parser: pytest.Parser) -> None:
    about = "of the rows of each test, run every n-th"
    parser.addoption("--every", type=int, default=1, metavar="n", help=about)


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the rows of a test marked sampled(n), the default run takes every n-th; of those of
    another test, as many as it takes to see each value of each axis (`rows.covering`).
    """
    tests: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        if not any(map(item.get_closest_marker, ("slow", "whole"))):
            tests[item.nodeid.partition("[")[0]].append(item)
    every = config.getoption("--every")
    for rows in tests.values():
        mark = rows[0].get_closest_marker("sampled")
        if mark is None:
            taken = [rows[i] for i in covering([values(row) for row in rows])][::every]
        else:
            taken = rows[:: max(every, mark.args[0])]
        for row in set(rows).difference(taken):
            row.add_marker("whole")


def values(row: pytest.Item) -> tuple[str, ...]:
    """The name of its value on each axis: one for each `parametrize`."""
    callspec = getattr(row, "callspec", None)
    return tuple(callspec._idlist) if callspec is not None else ("",)


@pytest.fixture(autouse=True)
def from_nothing() -> Iterator[None]:
    """Each test compiles from nothing and draws the same random numbers, in whatever order."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def on_a_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests marked gpu are skipped where there is none, and leave it as they found it. An emulated
    one leaves out what is marked real_gpu, for the reason that stands there.
    """
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if EMULATED and (mark := request.node.get_closest_marker("real_gpu")):
        pytest.skip(f"not on an emulated GPU: {mark.args[0]}")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def with_units(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU has BF16 instructions, so that plans are the same on one that has none; but for the
    tests that ask what a machine has.
    """
    if request.node.get_closest_marker("this_machine") is None:
        monkeypatch.setattr("mpcompile.devices.cpu.CPU.has_units", lambda self, dtype: True)


@pytest.fixture(scope="module")
def inductor_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture
def own_inductor_cache(inductor_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module's tests share a cache of Inductor's, which starts empty."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(inductor_folder))


@pytest.fixture
def rnns_in_graphs() -> Iterator[None]:
    """RNNs stay in Dynamo's graph, as the backend has it."""
    with torch._dynamo.config.patch(allow_rnn=True):
        yield
