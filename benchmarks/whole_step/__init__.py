"""A training step compiled as a whole, against pieces, and against what torch compiles of it.

A step is forward, loss, backward, the optimizer's step and zero_grad; DCGAN's has two backwards
and two optimizers. The peer is what a user of torch would write: torch.compile of the model,
autocast, GradScaler (in FP16) and fused AdamW. "torch.compile(train_step)" is in FP32, with
`torch._dynamo.config.trace_autograd_ops`: forward and backward become one graph, and torch leaves
the graph at each `optimizer.step()`, which becomes another (so AdamW is not the fused one, which
torch doesn't trace). Ours are "pieces", `mpcompile(model)`, and "whole", `mpcompile(train_step)`,
both with an MPOptimizer. Everything runs in one thread.

Without its graphs: the same step when each call of a compiled graph returns at once what it
returned before. What remains is Python, Dynamo's guards, the autograd engine, and all that is not
compiled: of the peer, its fused AdamW and GradScaler. Medians of steps of one arm after the other.

Held: parameters, buffers, optimizer state and working copies. Peak: that, and the most that one
step allocates beyond what is there when it begins; on a CPU by the profiler's record of each
allocation of a tensor's memory, on CUDA by `torch.cuda.max_memory_allocated`. A CPU's operators
take scratch memory of their own (oneDNN's), which is in neither.

Starts are those of fresh processes, from the first compiling call to the end of the third step (in
FP16 the first one searches for the loss scale, so a whole step is compiled in the second): *cold*
with empty caches, *warm* with those that the cold one has left.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from benchmarks.harness.report import Report, Settings, Table, paragraphs, plain, where
from benchmarks.harness.timing import Ratio, how_compared, ratio, summarize
from benchmarks.whole_step import measure
from benchmarks.whole_step.tasks import TINY, Work, work_for


def run(settings: Settings) -> Report:
    """Measure every task; under `settings.quick` tiny ones, without Inductor and starts."""
    device = settings.device
    work = TINY if settings.quick else work_for(device)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows, starts = measure.measure_all(work, device)
    finally:
        torch.set_num_threads(threads)
    return make_report(rows, starts, work, device)


# -- report ----------------------------------------------------------------------------------------
# Ratios to the peer, verdicts and tables.

_MB = 1e6


def make_report(
    rows: Mapping[str, measure.Row],
    starts: Mapping[str, Mapping[str, measure.Started]],
    work: Work,
    device: torch.device,
) -> Report:
    """The whole report."""
    ratios = {name: over_peer(row) for name, row in rows.items()}
    tables = [_summary(ratios)]
    tables += [_table(name, row, ratios[name]) for name, row in rows.items()]
    if starts:
        tables.append(_starts(starts))
    return Report(
        title=f"A training step compiled as a whole, on {where(device)}",
        notes=[*paragraphs(__doc__), _how(work), *_remarks(rows)],
        tables=tables,
        verdicts=_verdicts(rows, ratios),
        data={
            "rounds": work.rounds,
            "steps": {task.name: task.steps for task in work.tasks},
            "rows": plain(rows),
            "ratios": plain(ratios),
            "starts": starts,
        },
    )


def over_peer(row: measure.Row) -> dict[str, Ratio]:
    """For each arm that was timed how many times faster than the peer it is; {} without a peer."""
    if measure.PEER not in row.seconds:
        return {}
    return {
        arm: ratio(row.seconds[measure.PEER], samples)
        for arm, samples in row.seconds.items()
        if arm != measure.PEER
    }


def _how(work: Work) -> str:
    return (
        f"All arms in one process. {how_compared(work.rounds, 'the arm')} The loss is that of step "
        f"{measure.WARM_UP} on a batch that stays the same. MB are 10^6 bytes."
    )


def _remarks(rows: Mapping[str, measure.Row]) -> list[str]:
    """What is not whole and why, what is left out, and how often torch left the graph."""
    remarks = [
        f"{name}: {arm} is not whole: {why}."
        for name, row in rows.items()
        for arm, why in row.left.items()
    ]
    remarks += [
        f"{name}: {arm} takes {seconds:.1f} s a step; left out."
        for name, row in rows.items()
        for arm, seconds in row.slow.items()
    ]
    remarks += [
        f"{name}: {arm} can't run here, torch says: {error}."
        for name, row in rows.items()
        for arm, error in row.refused.items()
    ]
    remarks += [
        f"{name}: {arm} does not train: its optimizer never got a gradient; left out."
        for name, row in rows.items()
        for arm in row.untrained
    ]
    broken = ", ".join(f"{row.graphs} ({name})" for name, row in rows.items())
    return [*remarks, f"Graphs that Dynamo makes of {measure.PLAIN}: {broken}."]


def _summary(ratios: Mapping[str, Mapping[str, Ratio]]) -> Table:
    arms = [arm for arm in measure.ARMS if arm != measure.PEER]
    rows = [
        (name, *(f"{by_arm[arm].paired:.2f}x" if arm in by_arm else "" for arm in arms))
        for name, by_arm in ratios.items()
    ]
    return Table("How many times faster than the peer", ("", *arms), rows)


def _table(name: str, row: measure.Row, ratios: Mapping[str, Ratio]) -> Table:
    lines = [
        (
            arm,
            summarize(row.seconds[arm]).text(digits=3),
            str(ratios.get(arm, "")),
            f"{row.bare[arm] * 1e3:.3f}" if arm in row.bare else "",
            f"{row.held[arm] / _MB:.2f}",
            f"{(row.held[arm] + row.peak[arm]) / _MB:.2f}",
            f"{row.losses[arm][-1]:.4f}",
        )
        for arm in measure.ARMS
        if arm in row.seconds
    ]
    columns = ("arm", "step, ms", "peer over it", "without its graphs, ms", "held, MB", "peak, MB",
               "loss")  # fmt: skip
    return Table(name, columns, lines)


def _starts(starts: Mapping[str, Mapping[str, measure.Started]]) -> Table:
    arms = [arm for arm in measure.ARMS if arm != measure.EAGER]
    rows = [
        (name, *("{cold:.1f} / {warm:.1f}".format(**found[a]) if a in found else "" for a in arms))
        for name, found in starts.items()
    ]
    return Table("Starts, cold / warm, in seconds", ("", *arms), rows)


def _verdicts(
    rows: Mapping[str, measure.Row], ratios: Mapping[str, Mapping[str, Ratio]]
) -> dict[str, bool]:
    verdicts = {}
    for name, row in rows.items():
        for arm in measure.WHOLE:
            if (found := ratios[name].get(arm)) is not None:
                claim = f"{name}: {arm} takes no longer than the peer: {found}"
                verdicts[claim] = found.paired >= 1
                ours, theirs = (row.held[a] + row.peak[a] for a in (arm, measure.PEER))
                claim = (
                    f"{name}: {arm} needs no more memory than the peer: {ours / theirs:.2f} of it"
                )
                verdicts[claim] = ours <= theirs
    return verdicts
