"""What is run on a device, the most telling pieces first."""

from __future__ import annotations

from .runner import Piece

__all__ = ["LONGEST", "MODELS", "PIECES", "ROWS"]

MODELS = 4
"""Of `benchmarks/real_models`."""

ROWS = 15
"""Of the papers' table; those of torchvision end at once where it isn't installed."""

LONGEST = 480
"""Seconds of the longest piece: it fits into a call of ten minutes, its start and end included."""

_MPCOMPILE = ("-c", "import sys; from mpcompile.cli import main; sys.exit(main())")


def _tests(name: str, limit: float, *paths: str, workers: int = 4) -> Piece:
    """Tests marked gpu. Warnings don't fail them: a device that nobody has seen may bring new ones
    of torch's, which the log lists, and which should not hide what the tests say. Each result is in
    the log as it comes, and a test that hangs takes its worker with it alone: so where tests
    measure, and nothing may run beside them, there is one worker.
    """
    return Piece(
        name,
        ("-m", "pytest", "-m", "gpu", "-v", "-n", str(workers), "-W", "default",
         "-p", "no:cacheprovider", "--junitxml={out}/tests.xml",
         *(f"tests/{path}.py" for path in paths)),
        limit,
    )  # fmt: skip


def _benchmark(name: str, limit: float) -> Piece:
    command = ("-m", "benchmarks", "run", name, "--device", "cuda", "--out", "{out}")
    return Piece(f"benchmark-{name}", command, limit)


def _row(number: int) -> Piece:
    """One row of the papers' table; the benchmark after them collects what they keep."""
    return Piece(f"papers-{number}", ("-m", "benchmarks.papers", "cuda", str(number)), 300)


def _model(number: int) -> Piece:
    """One of the models that people train; the benchmark after them collects what they keep."""
    return Piece(f"model-{number}", ("-m", "benchmarks.real_models", "cuda", str(number)), 480)


PIECES = (
    Piece("info", (*_MPCOMPILE, "info", "--device", "cuda"), 60,
          by_name=("-m", "benchmarks.gpu.by_name", "{gpu}", "info")),
    Piece("smoke", ("-m", "benchmarks.gpu.smoke"), 240,
          by_name=("-m", "benchmarks.gpu.by_name", "{gpu}", "smoke")),
    *(_model(number) for number in range(MODELS)),
    _benchmark("real_models", 480),
    # What it measures, the planner uses in the pieces below: it lies in the cache directory.
    Piece("profile", (*_MPCOMPILE, "profile", "--device", "cuda", "--seconds", "100"), 240),
    _benchmark("padding", 480),
    # It measures: nothing else beside it.
    _tests("tests-costs", 300, "devices/test_gpu_costs", workers=1),
    _benchmark("saved_bytes", 480),
    _tests("tests", 480, "devices/test_gpu"),
    _tests("tests-numerics", 420, "devices/test_gpu_numerics"),
    _tests("tests-elsewhere", 300, "devices/test_device_sheets", "devices/test_profile_store",
           "optim/test_optim_scale", "passes/test_fused_head", "passes/test_joint"),
    _benchmark("gpt", 480),
    _benchmark("optimizer_step", 420),
    Piece("demo", (*_MPCOMPILE, "demo", "--device", "cuda", "--dump", "{out}/dump"), 300),
    _benchmark("conv", 360),
    _benchmark("small", 360),
    _benchmark("planning", 300),
    _benchmark("parity", 480),
    _benchmark("first_steps", 480),
    _benchmark("overhead", 300),
    _benchmark("whole_step", 480),
    _benchmark("deepbench", 240),
    _benchmark("peers", 480),
    *(_row(number) for number in range(ROWS)),
    _benchmark("papers", 480),
)  # fmt: skip
