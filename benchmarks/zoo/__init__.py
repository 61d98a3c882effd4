"""Hugging Face's architectures and timm's, in FP16: gradients against FP64, graphs, fallbacks.

Every model is small, with random weights and biases, and deliberately odd sizes (hidden 36 in three
heads, 101 words, 13 tokens, images of 33 or 65 pixels where the architecture takes them). It takes
one training step for each of seven draws of weights and batch: compiled by torch.compile in FP32,
under torch.autocast with a GradScaler, wholly in FP16 with a GradScaler ("pure half": the
parameters cast, the model run eagerly), and by mpcompile at O1 and O2 with `emit="aot_eager"` and a
plain optimizer. Dropout is off.

The error of a gradient is the norm of its difference from the same model's in FP64, over the norm
of the latter, all parameters together. The worst parameter is measured alike; one whose gradient is
less than 2^-10 of the whole (FP16's rounding) is measured against that part, because exact
arithmetic may make it zero. A ratio is the median over the draws of (error of ours / error of the
peer) within a draw. *Further off* means: in each of the seven draws, by more than roundings to FP32
explain (twice the error of the compiled FP32 model). If neither of two errors tends to be larger,
that happens by chance in one of 128 rows.

Graphs are those that Dynamo made, over all draws. A fault is an error, a graph left in FP32, a
warning of mpcompile's, more graphs than torch.compile makes, a frame left to Python that
torch.compile traces, gradients further off at O1 than autocast's, or at O2 than pure half's, which
stores what O2 stores. How O2 compares with autocast
has its own columns: O2 stores in FP16 what autocast keeps in FP32, such as the
results of norms, but for residual streams.

O1 rounds where autocast does, but for three things: one cast serves all products that read it, so
that their gradients are summed in FP16; a cast comes before a view that repeats the heads of an
attention, so that the gradients of these heads are summed in FP16; and operators between products
have the dtype that the planner gives them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.harness.report import Claims, Report, Settings, Table, paragraphs
from benchmarks.zoo.catalogue import rows_of
from benchmarks.zoo.measure import AUTOCAST, COMPILED, HALF, LEVELS

DEVICES = ("cpu",)
"""How far roundings carry is the same everywhere; a GPU would only launch small kernels."""

DRAWS = 7
QUICK = ("transformers/bert", "timm/vit_tiny")


def run(settings: Settings) -> Report:
    """Measure every model, in as many processes as there are cores; under `settings.quick` two,
    drawn once. Rows are kept in `benchmarks/scratch/` as they come, and a later run at the same
    commit goes on from there.
    """
    return make_report(paragraphs(__doc__), rows_of(DRAWS, QUICK, quick=settings.quick))


# -- report ----------------------------------------------------------------------------------------
# A table for each library, and what its rows bear out.

LEAST = {"transformers": 30, "timm": 25}
"""Architectures of each library that the zoo is to have."""

Row = Mapping[str, Any]

_RATIOS = [
    ("O1", AUTOCAST, "error"), ("O1", AUTOCAST, "worst"), ("O2", AUTOCAST, "error"),
    ("O2", AUTOCAST, "worst"), ("O2", HALF, "error"), ("O2", HALF, "worst"),
]  # fmt: skip


def make_report(notes: Sequence[str], rows: Sequence[Row]) -> Report:
    """The whole report."""
    return Report(
        title="A zoo of architectures in FP16",
        notes=[*notes, _o2_and_autocast(rows)],
        tables=[_table(library, rows) for library in LEAST] + _findings(rows),
        verdicts=dict(_verdicts(rows)),
        data={"rows": list(rows)},
    )


def _o2_and_autocast(rows: Sequence[Row]) -> str:
    near, both = _near(rows, "O2", AUTOCAST)
    ratios = [ratio_to(row, "O2", AUTOCAST, "error") for row in rows if "arms" in row]
    known = sorted(ratio for ratio in ratios if ratio is not None)
    if not known:
        return "O2 and autocast never ran both."
    return (
        f"O2's gradients are further off than autocast's in {both - near} of {both} models: "
        f"{median(known):.2f}x as far in the median of the models, {known[-1]:.2f}x at most."
    )


def _of(library: str, rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["name"].startswith(f"{library}/")]


def _table(library: str, rows: Sequence[Row]) -> Table:
    def cells(row: Row) -> tuple[str, ...]:
        name = row["name"].partition("/")[2]
        if "died" in row:
            return (name, *("-" for _ in columns[1:]))
        arms = row["arms"]
        graphs = (str(arms[arm].get("graphs", "-")) for arm in (COMPILED, *LEVELS))
        error = arms[AUTOCAST].get("error")
        ratios = (ratio_to(row, *which) for which in _RATIOS)
        return (
            name,
            row["kind"],
            " / ".join(graphs),
            f"{median(error):.1e}" if error else "-",
            *("-" if ratio is None else f"{ratio:.2f}x" for ratio in ratios),
        )

    columns = ("model", "kind", f"graphs: {COMPILED} / O1 / O2", "autocast's error",
               *(f"{level} over {peer}" + (", worst" if measure == "worst" else "")
                 for level, peer, measure in _RATIOS))  # fmt: skip
    return Table(library, columns, [cells(row) for row in _of(library, rows)])


def _findings(rows: Sequence[Row]) -> list[Table]:
    """Rows with faults, and arms of others that don't run."""
    found = [(row["name"], fault) for row in rows for fault in faults(row)]
    found += [
        (row["name"], f"a peer's: {arm} fails: {row['arms'][arm]['failed']}")
        for row in rows
        for arm in (COMPILED, AUTOCAST, HALF)
        if "failed" in row.get("arms", {}).get(arm, {})
    ]
    return [Table("Faults", ("model", "what"), found)] if found else []


def _verdicts(rows: Sequence[Row]) -> Claims:
    for library, wanted in LEAST.items():
        number = len(_of(library, rows))
        yield f"at least {wanted} architectures of {library}: {number}", number >= wanted
    comparable = [row for row in rows if not peer_fails(row)]
    sound = sum(not faults(row) for row in comparable)
    claim = "models without a fault, of those that torch.compile trains"
    yield f"{claim}: {sound} of {len(comparable)}", sound == len(comparable)
    for level, peer in (("O1", AUTOCAST), ("O2", HALF), ("O2", AUTOCAST)):
        near, both = _near(comparable, level, peer)
        claim = f"{level}'s gradients no further off than {peer}'s"
        yield f"{claim}: {near} of {both}", near == both


def _near(rows: Sequence[Row], level: str, peer: str) -> tuple[int, int]:
    """In how many rows the level isn't further off, and how many have both."""
    both = [
        row for row in rows
        if "arms" in row and all("error" in row["arms"][arm] for arm in (level, peer))
    ]  # fmt: skip
    return sum(not further_off(row, level, peer) for row in both), len(both)


# -- faults ----------------------------------------------------------------------------------------
# What is wrong with a row of the zoo.

PEER = {"O1": AUTOCAST, "O2": HALF}
"""Whose gradients each level's may not be further off than."""


def peer_fails(row: Mapping[str, Any]) -> str:
    """Why plain torch.compile doesn't train the model; "" if it does."""
    failed: str = row.get("arms", {}).get(COMPILED, {}).get("failed", "")
    return failed


def ratio_to(row: Mapping[str, Any], level: str, peer: str, measure: str) -> float | None:
    """Of the errors ("error" or "worst"), the median over the draws; None where one didn't run."""
    ours, theirs = (row["arms"][arm].get(measure) for arm in (level, peer))
    if ours is None or theirs is None:
        return None
    return median(a / b for a, b in zip(ours, theirs, strict=True))


def further_off(row: Mapping[str, Any], level: str, peer: str, measure: str = "error") -> bool:
    """In each draw, by more than FP32 rounds: two runs that round to FP16 at the same places differ
    by as much as each is off in FP32. Where an arm didn't run: no.
    """
    arms = row["arms"]
    draws = [arms[arm].get(measure, ()) for arm in (level, peer, COMPILED)]
    if not all(draws):
        return False
    return all(ours > theirs + 2 * fp32 for ours, theirs, fp32 in zip(*draws, strict=True))


def faults(row: Mapping[str, Any]) -> list[str]:
    """In words; none where plain torch.compile fails, too."""
    if "died" in row:
        return [f"the process died: {row['died']}"]
    if peer_fails(row):
        return []
    return [fault for level in LEVELS for fault in _faults(row, level)]


def _faults(row: Mapping[str, Any], level: str) -> list[str]:
    arms, peer = row["arms"], PEER[level]
    ours = arms[level]
    if "failed" in ours:
        return [f"{level} fails: {ours['failed']}"]
    found = [f"{level} leaves a graph in FP32: {reason}" for reason in ours["left"]]
    found += [f"{level} warns: {message}" for message in ours["warned"]]
    found += [f"{level}: the gradient of {name} is zero" for name in ours.get("dead", ())]
    graphs, plain = ours["graphs"], arms[COMPILED]["graphs"]
    if graphs > plain:
        found.append(f"{level} makes {graphs} graphs, torch.compile {plain}")
    left = _names(ours["frames"]) - _names(arms[COMPILED]["frames"])
    found += [f"{level} leaves {frame} to Python, torch.compile doesn't" for frame in sorted(left)]
    for measure, what in (("error", "gradients"), ("worst", "the worst parameter's gradients")):
        if further_off(row, level, peer, measure):
            found.append(f"{level}: {what} further off than {peer}'s")
    return found


def _names(frames: Iterable[str]) -> set[str]:
    """Of the functions, without the reasons: "forward (model.py:12)"."""
    return {frame.partition(": ")[0] for frame in frames}
