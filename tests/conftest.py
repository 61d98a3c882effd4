"""Fixtures for every test, and the warnings of torch's own that are none of ours."""

import os
from collections.abc import Iterator
from pathlib import Path

if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    # Before torch is imported: each worker, and what it starts, has its share of the cores.
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))

import pytest
import torch
from emulated import EMULATED
from lanes import LIMIT, limit, put_in_lanes, set_limit
from torch import distributed as dist

# Warnings are errors (pyproject.toml). These arise inside torch, whatever the program.
FROM_TORCH = (
    # Dynamo, on any autograd.Function
    "ignore:.*torch.autograd.function.Function.* should not be instantiated:DeprecationWarning",
    # Dynamo, on an input that is no leaf: it asks for `.grad` and mutes its logger, not the warning
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    # mpcompile of a torch that it wasn't tested with yet: the tests are there to find out
    "ignore:mpcompile. torch .* is newer than",
    # Inductor, when it is first imported
    "ignore:.torch.jit.script:DeprecationWarning",
    # torch.distributed.optim, when it is imported
    "ignore:.torch.jit.interface:DeprecationWarning",
    # Inductor, at the first compile on a GPU that has TF32 units: advice
    "ignore:TensorFloat32 tensor cores:UserWarning",
    # torch 2.14 of its own tables for forward mode, at the first `torch.func.jvp`
    "ignore:`torch.jit.script` is deprecated:FutureWarning",
    # torch 2.12's profiler, when it is first used: about cycles, of which there is one
    "ignore:Warning. Profiler clears events at the end of each cycle:UserWarning",
    # Inductor, where a GPU splits the sums of a softmax: about speed
    "ignore:\\s*Online softmax is disabled:UserWarning",
)


@pytest.hookimpl(tryfirst=True)  # before pytest-timeout reads its option
def pytest_configure(config: pytest.Config) -> None:
    # No plan depends on the machine that the tests run on.
    os.environ.setdefault("MPCOMPILE_PROFILE", "none")
    for line in FROM_TORCH:
        config.addinivalue_line("filterwarnings", line)
    set_limit(config)


def pytest_report_header() -> str:
    return f"a test may take {limit():.0f} s on this machine ({LIMIT:.0f} s on a usual one)"


def pytest_addoption(parser: pytest.Parser) -> None:
    about = "of the rows of each test, run every n-th"
    parser.addoption("--every", type=int, default=1, metavar="n", help=about)


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    put_in_lanes(items, config.getoption("--every"))


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
def group(tmp_path: Path) -> Iterator[None]:
    """This process is the one rank of a process group."""
    from ranks import join  # it asks for the limit, which must be set

    join(0, 1, str(tmp_path))
    yield
    dist.destroy_process_group()


@pytest.fixture
def rnns_in_graphs() -> Iterator[None]:
    """RNNs stay in Dynamo's graph, as the backend has it."""
    with torch._dynamo.config.patch(allow_rnn=True):
        yield
