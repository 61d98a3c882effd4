"""Training parity on real data: FP16 and BF16, O1 and O2, against the spread of FP32 seeds.

Two trainings, each from three seeds (a seed sets the initial weights and the order of the data): a
small convolutional net on scikit-learn's digits, and a small GPT on the text of Python's own
documentation. The FP32 runs are plain eager PyTorch. The mixed runs differ from them in one line,
`mpcompile(model, ...)`: same seeds, same optimizer, same loop. Everything is judged by the same
eager FP32 forward on data held out from training.

The rule: S is the spread of a metric, its largest value over the FP32 seeds less its smallest (for
an accuracy at least one test image). A mixed precision passes if the mean over its seeds is at most
S away from the FP32 mean ("off the mean"), and no single run is more than S away from the FP32 run
of its seed ("off the seed", the worst of them).
"""

from __future__ import annotations

from benchmarks.harness.record import environment
from benchmarks.harness.report import Report, Settings, paragraphs

from .report import make_report
from .tasks import TASKS
from .training import train_all

__all__ = ["run"]


def run(settings: Settings) -> Report:
    """Train everything; under `settings.quick` three steps of one seed, without compiling."""
    device, quick = settings.device, settings.quick
    record = environment(device)
    seeds = range(1 if quick else 3)
    tasks = [make(3 if quick else steps, device) for make, steps in TASKS]
    emit = "eager" if quick else "inductor"
    results = {task.name: train_all(task, seeds, emit, device) for task in tasks}
    steps = ", ".join(f"{task.steps} ({task.name})" for task in tasks)
    how = (
        f"Steps: {steps}. Seeds: {', '.join(map(str, seeds))}. Mixed runs were emitted with "
        f"`{emit}`. Loss scale and skipped steps are those at the end; BF16 needs no scale."
    )
    notes = [*paragraphs(__doc__), how]
    return make_report(f"parity_{device.type}", notes, tasks, results, record)
