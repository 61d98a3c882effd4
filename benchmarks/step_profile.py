"""Where the time of a training step on a CPU goes, by kind of kernel: ours beside the peer's.

The models, their batches and the step are those of `real_models`, in BF16. All arms of a model are
in one process; in each round each of them does one step under torch's profiler, for which Inductor
names its kernels, and one without it, of which the clock, the system's time and the page faults
are read. Numbers are medians over the rounds. Time under the profiler is that of a kernel itself;
as kernels run on all threads at once, it compares with the clock.

Kinds, the first that fits. *Optimizer*: all within its step. *Products*: matrix products and
convolutions, and torch's fused attention, forward and backward. *Casts*: a generated kernel that
does nothing but round, widen or lay out. *Norms*, *softmax and loss*, *the rest*: a generated
kernel by the operators in its name. *torch's others*: its own operators aside from these. *Outside
of kernels* is what the clock shows beyond their sum: Python, Dynamo's guards, autograd.
"""

from __future__ import annotations

import resource
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
from benchmarks.harness.ways import AUTOCAST, PIECES, everyones, trainer_for
from benchmarks.papers.task import Task
from benchmarks.real_models import BY_DEVICE, TASKS, TINY

DEVICES = ("cpu",)
NEEDS = ("timm", "transformers")
ARMS = (AUTOCAST, *PIECES)

OPTIMIZER, PRODUCTS, CASTS, NORMS = "optimizer", "products", "casts", "norms"
SOFTMAX, REST, OTHERS = "softmax and loss", "the rest", "torch's others"
KINDS = (PRODUCTS, CASTS, NORMS, SOFTMAX, REST, OTHERS, OPTIMIZER)
CLOCK, SYSTEM, FAULTS = "clock, ms", "system's time, ms", "page faults"

# Words in names. A generated kernel's has the operators in it: "cpp_fused__to_copy_add_view_3".
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "convolution", "linear", "attention"}
_NAMED = {NORMS: {"norm", "rsqrt"}, SOFTMAX: {"softmax", "exp", "nll", "amax"}}
_LAYOUT = {"to", "copy", "view", "transpose", "permute", "clone", "expand", "t", "unsafe"}
_ROUNDS, _WARM = 9, 3


def run(settings: Settings) -> Report:
    """Profile each model; under `settings.quick` two tiny ones, uncompiled."""
    tasks = TINY if settings.quick else BY_DEVICE["cpu"]
    calls = [(task.name, settings.quick) for task in tasks]
    found = calls_elsewhere("benchmarks.step_profile:profiled", calls)
    return make_report(dict(zip((name for name, _ in calls), found, strict=True)))


# -- profiling -------------------------------------------------------------------------------------


def profiled(name: str, quick: bool) -> Any:
    """Of each arm of a model the milliseconds of a step by kind, and what was read beside them."""
    (task,) = (task for task in TASKS if task.name == name)
    config.cpp.enable_kernel_profile = True
    torch._dynamo.config.recompile_limit = 64  # the arms compile the same functions of libraries
    steps = {arm: _started(task, arm, "eager" if quick else "inductor") for arm in ARMS}
    for _ in range(_WARM):
        for step in steps.values():
            step()
    read: dict[str, dict[str, list[float]]] = {arm: defaultdict(list) for arm in ARMS}
    for number in range(2 if quick else _ROUNDS):
        for arm in ARMS if number % 2 else reversed(ARMS):
            with profile(activities=[ProfilerActivity.CPU]) as seen:
                steps[arm]()
            by_kind = Counter(dict.fromkeys(KINDS, 0.0))
            for event in seen.events() or ():
                if (kind := _kind(event)) is not None:
                    by_kind[kind] += event.self_cpu_time_total / 1e3
            for what, much in {**by_kind, **_beside(steps[arm])}.items():
                read[arm][what].append(much)
    return {arm: {w: median(samples) for w, samples in own.items()} for arm, own in read.items()}


def _started(task: Task, arm: str, emit: str) -> Any:
    (way,) = (way for way in everyones(torch.device("cpu"), emit) if way.name == arm)
    torch.manual_seed(0)
    return task.start(trainer_for(way, emit, torch.device("cpu")), 0).step


def _beside(step: Any) -> dict[str, float]:
    """Read around one step without the profiler."""
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    step()
    clock, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    return {
        CLOCK: clock * 1e3,
        SYSTEM: (after.ru_stime - before.ru_stime) * 1e3,
        FAULTS: after.ru_minflt - before.ru_minflt,
    }


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
    if not generated:
        return PRODUCTS if _PRODUCTS & {*name.partition("::")[2].split("_")} else OTHERS
    words = {word for word in generated.split("_") if word and not word.isdigit()}
    named = (kind for kind, those in _NAMED.items() if those & words)
    return next(named, CASTS if words <= _LAYOUT else REST)


# -- report ---------------------------------------------------------------------------------------


def make_report(found: dict[str, dict[str, dict[str, float]]]) -> Report:
    return Report(
        title=f"The time of a training step by kind of kernel, on {where(torch.device('cpu'))}",
        notes=paragraphs(__doc__),
        tables=[_table(name, arms) for name, arms in found.items()],
        verdicts={},
        data={"profiled": found},
    )


def _table(name: str, arms: dict[str, dict[str, float]]) -> Table:
    rows = [(what, *(f"{own[what]:.1f}" for own in arms.values())) for what in (*KINDS, CLOCK)]
    sums = {arm: sum(own[kind] for kind in KINDS) for arm, own in arms.items()}
    rows.append(
        ("outside of kernels, ms", *(f"{own[CLOCK] - sums[arm]:.1f}" for arm, own in arms.items()))
    )
    rows += [(what, *(f"{own[what]:.0f}" for own in arms.values())) for what in (SYSTEM, FAULTS)]
    return Table(f"{name}: ms of a step", ("", *arms), rows)
