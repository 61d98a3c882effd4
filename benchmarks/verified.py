"""A cold first step with the compiled code compared with its graph, and without: time and memory.

The models and the step are those of `real_models`, at O1: forward, loss, backward, fused AdamW and
`zero_grad`. Each start is a fresh process with empty caches; the ways take turns. *Cold step*: from
the call that compiles to the end of the step, without what any compiler imports. *Peak*: the most
memory that the process held resident from its start (VmHWM), the compiler in this process and the
model included. *Live* is the most that a step holds later, without verification: weights, the
optimizer's state, and what torch's profiler sees allocated. A ratio is the median of those within a
round. For that of *cold* Inductor's time counts as the same in both ways, its median over all
starts: it varies more from start to start than comparing takes. Not so where something was cured,
which is compiled again. *Compared* is what the plan says after that step.

Where g++ miscopies tiles, every kernel is compiled with a flag (`GCC_FLAG`). What that costs is
timed on the first of the models, compiled with and without it, whether this g++ needs it or not.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import compilation_time_metrics

from benchmarks.harness.peak import peak_bytes
from benchmarks.harness.processes import starts
from benchmarks.harness.report import Claims, Report, Settings, Table, paragraphs, plain
from benchmarks.harness.timing import Arm, idle_wait, seconds_of, take_turns
from benchmarks.harness.timing import ratio as ratio_of
from benchmarks.harness.ways import Trainer, Way, trainer_for
from benchmarks.papers.task import Training
from benchmarks.real_models import BY_DEVICE, TASKS, TINY
from mpcompile import compiled_plans
from mpcompile.devices.cxx import GCC_FLAG

DEVICES = ("cpu",)
MOST = 1.08
"""Times as long as without: what comparing may take of a cold step (`verify/first_call.py`)."""


FLAGGED, UNFLAGGED = "with the flag", "without"
LOST = 0.98
"""Of the speed without the flag, what is to be left with it."""


@dataclasses.dataclass
class Starts:
    """First steps of one model, by round.

    Attributes:
        cold: seconds.
        inductor: seconds of these in which Inductor made and compiled code.
        peak: bytes.
        live: bytes; of those without verification.
        said: what the plan says was compared in the last one.
    """

    cold: list[float] = dataclasses.field(default_factory=list)
    inductor: list[float] = dataclasses.field(default_factory=list)
    peak: list[int] = dataclasses.field(default_factory=list)
    live: list[int] = dataclasses.field(default_factory=list)
    said: list[str] = dataclasses.field(default_factory=list)


def run(settings: Settings) -> Report:
    """Start with each model; under `settings.quick` with one tiny one, once."""
    device = settings.device
    names = [task.name for task in (TINY[:1] if settings.quick else BY_DEVICE[device.type])]
    rounds = 1 if settings.quick else 2
    found = {name: {True: Starts(), False: Starts()} for name in names}
    for name, ways in found.items():
        for _ in range(rounds):
            for verify, first in ways.items():
                one = "benchmarks.verified:first_step", name, device.type, verify
                ((cold, inductor, peak, live, first.said),) = starts(1, *one)
                first.cold.append(cold)
                first.inductor.append(inductor)
                first.peak.append(peak)
                first.live.append(live)
    flag = flag_cost(names[0], device, rounds=2 if settings.quick else 30)
    return Report(
        title="What it costs to compare compiled code with its graph",
        notes=[*paragraphs(__doc__), f"Rounds: {rounds}."],
        tables=[_table(found)],
        verdicts=dict(_verdicts(found)) | _flag_verdict(names[0], flag),
        data={
            "models": {
                name: {"verified": plain(ways[True]), "not verified": plain(ways[False])}
                for name, ways in found.items()
            },
            "flag": flag,
        },
    )


def first_step(name: str, kind: str, verify: bool) -> tuple[float, float, int, int, list[str]]:
    """What the fresh process does: seconds, those of Inductor, the process's peak, what is live
    without verification (bytes), and what the plan says was compared.
    """
    device = torch.device(kind)
    training, trainer = _training(name, device, {"verify": verify})
    torch.compile(nn.Identity())(torch.zeros(1, device=device))
    compilation_time_metrics.clear()
    seconds, peak = seconds_of(training.step, idle_wait(device)), _peak()
    plans = compiled_plans(trainer.models[0])
    said = [plan.verification.text() for plan in plans if plan.verification is not None]
    inductor = sum(compilation_time_metrics["fx_codegen_and_compile"])
    return seconds, inductor, peak, 0 if verify else _live(training, trainer, device), said


def _live(training: Training, trainer: Trainer, device: torch.device) -> int:
    """Bytes that are live at most while a step runs."""
    model = trainer.models[0]
    kept = [*model.parameters(), *model.buffers(), *trainer.kept()]
    present = sum(x.nbytes for x in kept)
    return present + peak_bytes(training.step, device)


def flag_cost(name: str, device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step of a model that is compiled with the flag, and without."""
    arms = []
    for arm, flags in {FLAGGED: f"off {GCC_FLAG}", UNFLAGGED: "off"}.items():
        options = {"options": {"cpp.enable_floating_point_contract_flag": flags}}
        training, _ = _training(name, device, options)
        for _ in range(3):
            training.step()
        arms.append(Arm(arm, training.step))
    return take_turns(arms, rounds=rounds, steps=1, wait=idle_wait(device))


def _training(
    name: str, device: torch.device, options: Mapping[str, Any]
) -> tuple[Training, Trainer]:
    """One of the models at O1 in training, and what trains it."""
    torch.manual_seed(0)
    (task,) = (task for task in TASKS if task.name == name)
    way = Way("O1", "auto", level="O1", fused=True, options=options)
    trainer = trainer_for(way, "inductor", device)
    return task.start(trainer, 0), trainer


def _peak() -> int:
    """Bytes, of this process since it began."""
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


# -- report ----------------------------------------------------------------------------------------


def ratio(ways: Mapping[bool, Starts], of: str) -> float:
    """How many times as much with as without: the median of those within a round."""
    pairs = zip(getattr(ways[True], of), getattr(ways[False], of), strict=True)
    return statistics.median(ours / theirs for ours, theirs in pairs)


def alike(ways: Mapping[bool, Starts]) -> Mapping[bool, Starts]:
    """The same starts with cold steps in which Inductor took as long in both ways."""
    if any("cured" in text for text in ways[True].said):
        return ways
    same = statistics.median([s for starts in ways.values() for s in starts.inductor])
    return {
        verify: dataclasses.replace(
            of, cold=[same + cold - s for cold, s in zip(of.cold, of.inductor, strict=True)]
        )
        for verify, of in ways.items()
    }


def _table(found: Mapping[str, Mapping[bool, Starts]]) -> Table:
    rows = []
    for name, ways in found.items():
        cells = [name]
        for of, unit, digits in (("cold", 1.0, 1), ("peak", 2.0**30, 2)):
            for verify in (False, True):
                middle = statistics.median(getattr(ways[verify], of)) / unit
                cells.append(f"{middle:.{digits}f}")
            cells.append(f"{ratio(alike(ways), of):.2f}x")
        cells.append(f"{statistics.median(ways[False].live) / 2**30:.2f}")
        rows.append([*cells, "; ".join(ways[True].said)])
    columns = [
        f"{what}{how}"
        for what, unit in (("cold", ", s"), ("peak", ", GiB"))
        for how in (f" without{unit}", f" with{unit}", ": times")
    ]
    return Table(
        "First steps without and with verification",
        ["model", *columns, "live, GiB", "compared"],
        rows,
    )


def _verdicts(found: Mapping[str, Mapping[bool, Starts]]) -> Claims:
    for name, ways in found.items():
        cold = ratio(alike(ways), "cold")
        claim = f"{name}: a cold step takes at most {MOST}x of that without"
        yield f"{claim}: {cold:.3f}x", cold <= MOST
        pairs = zip(ways[True].peak, ways[False].peak, ways[False].live, strict=True)
        more = statistics.median((ours - theirs) / live for ours, theirs, live in pairs)
        yield f"{name}: a peak is higher by what is live at most: {more:.2f} of it", more <= 1


def _flag_verdict(name: str, seconds: Mapping[str, list[float]]) -> dict[str, bool]:
    speed = ratio_of(seconds[UNFLAGGED], seconds[FLAGGED])
    claim = f"{name}: a step {FLAGGED} is at least {LOST}x as fast as {UNFLAGGED}: {speed}"
    return {claim: speed.paired >= LOST}
