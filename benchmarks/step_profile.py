"""Where the time of a training step on a CPU goes, by kind of kernel: ours beside the peer's.

The models, their batches and the step are those of `real_models`, in BF16. All arms of a model are
in one process; in each round each of them does one step under torch's profiler, for which Inductor
names its kernels, and one without it, of which the clock is read. Numbers are medians over the
rounds. Time under the profiler is that of a kernel itself; as kernels run on all threads at once,
it compares with the clock.

The process keeps the memory that it frees (glibc's `MALLOC_` settings). Left alone, it gives large
blocks back to the system, which pages them in again in the next step: a tenth to a fifth of a step,
in the kernel that happens to write there first, and another one in each run.

Kinds, the first that fits. *Optimizer*: all within its step. *Products*: matrix products and
convolutions. *Fused attention*: torch's, forward and backward. *Casts*: a generated kernel that
does nothing but round, widen or lay out. *Norms*, *softmax and loss*, *the rest*: a generated
kernel by the operators in its name. *torch's others*: its own operators aside from these. *Outside
of kernels* is what the clock shows beyond their sum: Python, Dynamo's guards, autograd.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from statistics import median
from typing import Any

import torch
from torch._inductor import config
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness.processes import calls_elsewhere
from benchmarks.harness.report import Report, Settings, Table, paragraphs, where
from benchmarks.harness.ways import AUTOCAST, GENERATED, PIECES, everyones, trainer_for
from benchmarks.papers.task import Task
from benchmarks.real_models import BY_DEVICE, TASKS, TINY

DEVICES = ("cpu",)
NEEDS = ("timm", "transformers")
ARMS = (AUTOCAST, PIECES[0], GENERATED, PIECES[1])
KEEPS_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_TOP_PAD_": str(2**28),
}  # fmt: skip

OPTIMIZER, PRODUCTS, ATTENTION, CASTS = "optimizer", "products", "fused attention", "casts"
NORMS, SOFTMAX, REST, OTHERS = "norms", "softmax and loss", "the rest", "torch's others"
KINDS = (PRODUCTS, ATTENTION, CASTS, NORMS, SOFTMAX, REST, OTHERS, OPTIMIZER)
CLOCK = "clock"

# Words in names. A generated kernel's has the operators in it: "cpp_fused__to_copy_add_view_3".
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "convolution", "linear"}
_NAMED = {NORMS: {"norm", "rsqrt"}, SOFTMAX: {"softmax", "exp", "nll", "amax"}}
_LAYOUT = {"to", "copy", "view", "transpose", "permute", "clone", "expand", "t", "unsafe"}
_ROUNDS, _WARM, _LONGEST = 7, 2, 8

Samples = dict[str, list[float]]


def run(settings: Settings) -> Report:
    """Profile each model; under `settings.quick` two tiny ones, uncompiled."""
    tasks = TINY if settings.quick else BY_DEVICE["cpu"]
    calls = [(task.name, settings.quick) for task in tasks]
    found = calls_elsewhere("benchmarks.step_profile:profiled", calls, KEEPS_MEMORY)
    return make_report(dict(zip((name for name, _ in calls), found, strict=True)))


# -- profiling -------------------------------------------------------------------------------------


def profiled(name: str, quick: bool) -> Any:
    """Of each arm of a model the milliseconds of a step by kind, and of the longest kernels."""
    (task,) = (task for task in TASKS if task.name == name)
    config.cpp.enable_kernel_profile = True
    torch._dynamo.config.recompile_limit = 64  # the arms compile the same functions of libraries
    steps = {arm: _started(task, arm, "eager" if quick else "inductor") for arm in ARMS}
    for _ in range(_WARM):
        for step in steps.values():
            step()
    kinds: dict[str, Samples] = {arm: defaultdict(list) for arm in ARMS}
    kernels: dict[str, Samples] = {arm: defaultdict(list) for arm in ARMS}
    for number in range(2 if quick else _ROUNDS):
        for arm in ARMS if number % 2 else reversed(ARMS):
            by_kind, by_name = _kernels(steps[arm])
            began = time.perf_counter()
            steps[arm]()
            by_kind[CLOCK] = (time.perf_counter() - began) * 1e3
            for samples, seen in ((kinds[arm], by_kind), (kernels[arm], by_name)):
                for what, much in seen.items():
                    samples[what].append(much)
    return {arm: [_medians(kinds[arm]), _medians(kernels[arm])] for arm in ARMS}


def _medians(samples: Samples) -> dict[str, float]:
    return {what: median(much) for what, much in samples.items()}


def _started(task: Task, arm: str, emit: str) -> Any:
    (way,) = (way for way in everyones(torch.device("cpu"), emit) if way.name == arm)
    torch.manual_seed(0)
    return task.start(trainer_for(way, emit, torch.device("cpu")), 0).step


def _kernels(step: Any) -> tuple[dict[str, float], dict[str, float]]:
    """The milliseconds of a step's kernels, by kind and by name."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step()
    by_kind, by_name = Counter(dict.fromkeys(KINDS, 0.0)), Counter[str]()
    for event in seen.events() or ():
        if (kind := _kind(event)) is not None:
            by_kind[kind] += event.self_cpu_time_total / 1e3
            name = event.name.partition("cpp_fused_")[2] or event.name
            by_name[f"{OPTIMIZER}: {name}" if kind == OPTIMIZER else name] += (
                event.self_cpu_time_total / 1e3
            )
    return by_kind, by_name


def _kind(event: FunctionEvent) -> str | None:
    """What a kernel is for; None: it is none."""
    name, around = event.name, event
    generated = name.partition("cpp_fused_")[2]
    if not generated and "::" not in name:
        return None
    while around is not None:
        if around.name.startswith("Optimizer."):
            return OPTIMIZER
        around = around.cpu_parent
    words = {word for word in (generated or name.partition("::")[2]).split("_") if word}
    if not generated:
        return ATTENTION if "attention" in words else PRODUCTS if _PRODUCTS & words else OTHERS
    named = (kind for kind, those in _NAMED.items() if those & words)
    return next(named, CASTS if {w for w in words if not w.isdigit()} <= _LAYOUT else REST)


# -- report ---------------------------------------------------------------------------------------


def make_report(found: dict[str, dict[str, list[dict[str, float]]]]) -> Report:
    tables = [table(name, arms) for name, arms in found.items() for table in (_kinds, _longest)]
    return Report(
        title=f"The time of a training step by kind of kernel, on {where(torch.device('cpu'))}",
        notes=paragraphs(__doc__),
        tables=tables,
        verdicts={},
        data={
            "profiled": {name: {a: k for a, (k, _) in arms.items()} for name, arms in found.items()}
        },
    )


def _kinds(name: str, arms: dict[str, list[dict[str, float]]]) -> Table:
    own = {arm: kinds for arm, (kinds, _) in arms.items()}
    rows = [(what, *(f"{one[what]:.1f}" for one in own.values())) for what in (*KINDS, CLOCK)]
    sums = [one[CLOCK] - sum(one[kind] for kind in KINDS) for one in own.values()]
    rows.append(("outside of kernels", *(f"{rest:.1f}" for rest in sums)))
    return Table(f"{name}: ms of a step", ("", *arms), rows)


def _longest(name: str, arms: dict[str, list[dict[str, float]]]) -> Table:
    rows = [
        (arm, kernel[:80], f"{much:.1f}")
        for arm, (_, kernels) in arms.items()
        for kernel, much in Counter(kernels).most_common(_LONGEST)
    ]
    return Table(f"{name}: the longest kernels", ("arm", "kernel", "ms of a step"), rows)
