"""The table of the papers' claims: the frame around the trainings, and what the report says."""

import dataclasses
import functools
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import figures
from benchmarks.gpu.__main__ import ROWS as PAPERS_ROWS
from benchmarks.harness.report import plain
from benchmarks.harness.timing import spans
from benchmarks.harness.ways import Trainer, Way
from benchmarks.papers import report as reports
from benchmarks.papers import rows
from benchmarks.papers.again import SIGNIFICANT, chances, corrected, look_again, off
from benchmarks.papers.report import OFF, Histogram, make_report
from benchmarks.papers.rows import Kept, Row, Store
from benchmarks.papers.rule import compare
from benchmarks.papers.task import FP32, QUALITY, Metrics, OneModel, Outcome, Probe, Task, train
from benchmarks.papers.tasks import AS_AVERAGED, ROWS, TASKS
from benchmarks.papers.tasks.gan import frechet_distance
from mpcompile.observe.record import EXPONENTS
from mpcompile.whole_step.train_step import goes_backward

CPU = torch.device("cpu")
HALF = torch.float16


class Line(OneModel):
    """One linear layer that learns to double its input, clipped to a norm of a quarter."""

    def __init__(self, trainer: Trainer, seed: int) -> None:
        sgd = functools.partial(torch.optim.SGD, lr=0.1)
        super().__init__(trainer, seed, nn.Linear(16, 16), sgd, max_grad_norm=0.25)

    def _draw(self, seed: int) -> Iterator[Sequence[Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield (torch.randn(8, 16, generator=generator),)

    def _loss(self, x: Tensor) -> Tensor:
        return (self._net(x) - 2 * x).square().mean()

    def judge(self) -> Metrics:
        return {"weights": sum(p.sum().item() for p in self._net.parameters())}


class Probed(Line):
    def probe(self) -> Probe:
        return Probe(self._net, tuple(next(self._batches)), lambda result: result.square().mean())


LINE = Task("line", "a line", "drawn", "weights", True, 12, Line)


@pytest.mark.parametrize(
    "way",
    [
        *QUALITY,
        Way("eager", fused=True),
        Way("compiled", compiled=True),
        Way("autocast", torch.bfloat16),
        Way("scaled", HALF, compiled=True, fused=True),
        Way("budget", HALF, compiled=True, fused=True, budget=0.5),
    ],
    ids=lambda way: way.name,
)
def test_every_way_trains_as_a_loop_of_plain_pytorch(way: Way) -> None:
    """To the rounding of BF16, 2^-8, in a dozen steps of at most a tenth of a quarter; the sum of
    the weights moves by no more than 16 times their norm.
    """
    torch.manual_seed(3)
    net = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(3)
    for _ in range(LINE.steps):
        x = torch.randn(8, 16, generator=generator)
        (net(x) - 2 * x).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.25)
        assert norm > 0.25  # clipping is not idle
        optimizer.step()
        optimizer.zero_grad()
    expected = sum(p.sum().item() for p in net.parameters())
    allowed = 16 * 2**-8 * LINE.steps * 0.1 * 0.25
    outcome = train(LINE, way, 3, "aot_eager", CPU)
    assert outcome.metrics["weights"] == pytest.approx(expected, abs=allowed)


def test_only_scaled_fp16_has_a_scale() -> None:
    scaled = [way.name for way in QUALITY if train(LINE, way, 0, "eager", CPU, 1).scales]
    assert scaled == ["FP16 O1", "FP16 O2"]


def test_steps_are_counted_and_losses_averaged() -> None:
    outcome = train(LINE, FP32, 0, "eager", CPU, 3)
    assert len(outcome.curve) == 3
    assert outcome.metrics["last training loss"] == outcome.curve[-1]
    assert spans([1.0, 3.0, 5.0, 7.0], count=2) == [2.0, 6.0]


# -- the rule --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
    metrics: dict[str, float]


def runs(*values: float) -> list[Run]:
    return [Run({"m": value}) for value in values]


@pytest.mark.parametrize(
    ("mixed", "holds"),
    [
        ((1.0, 2.0), True),  # the same
        ((2.0, 3.0), True),  # each as far as the spread of all FP32 seeds, which is 2
        ((3.5, 2.0), False),  # one run too far from its pair
        ((1.0, math.nan), False),
        ((math.nan, 2.0), False),
    ],
)
def test_a_way_holds_within_the_spread_of_all_fp32_seeds(
    mixed: Sequence[float], holds: bool
) -> None:
    found = compare("task", "FP32", {"FP32": runs(1.0, 2.0, 3.0), "low": runs(*mixed)}, {})
    assert found.held == {"low": holds}


# -- the report ------------------------------------------------------------------------------------


def outcomes(*values: float) -> list[Outcome]:
    return [Outcome({"weights": v}, [2.0, 1.0], [(8.0, 1)], 0.0) for v in values]


# As many at 2^-30, which FP16 loses, as at 1; half of all are zero in FP64, too.
SMALL = Histogram([3 * (exponent in (-30, 0)) for exponent in EXPONENTS], 6)


def row_of(unscaled: float) -> Row:
    found = {way.name: outcomes(1.0, 2.0, 3.0) for way in QUALITY}
    found[QUALITY[1].name] = outcomes(unscaled, unscaled, unscaled)
    return found


def test_the_table_marks_what_is_off_and_json_has_no_nan(tmp_path: Path) -> None:
    kept = {"line": Kept("", "here", row_of(math.nan))}
    report = make_report([], [LINE], kept, {}, {"line": SMALL})
    cells = report.tables[0].rows[0]
    assert cells[2] == "2.00 (1.00 to 3.00)"
    assert cells[3] == f"nan{OFF}"
    assert not any(cell.endswith(OFF) for cell in cells[4:])
    assert report.tables[1].rows == [
        ("line", "1", "50.0%", "50%", "0%", "50%", "0%"),
        ("line", "8", "50.0%", "50%", "0%", "50%", "0%"),
    ]
    assert all(report.verdicts.values())  # that it fails without a scale breaks no promise
    _, complete = report.write(tmp_path, "papers_cpu", {})
    text = complete.read_text()
    assert "NaN" not in text
    (run, *_) = json.loads(text)["rows"]["line"]["runs"][QUALITY[1].name]
    assert run["metrics"] == {"weights": None}


def test_histograms_are_of_all_looks() -> None:
    """Each of the five looks counts the gradient of the layer's result, 8 rows of 16."""
    task = dataclasses.replace(LINE, start=Probed)
    found = reports.look(task, CPU)
    assert sum(found.counts) + found.zeros == reports.LOOKS * 8 * 16


def test_figures_are_the_same_for_the_same_numbers(tmp_path: Path) -> None:
    curves = [{"curve": [1.0, None]}, {"curve": [3.0, 1.0]}]
    trained = {TASKS[0].name: {"runs": {way.name: curves for way in QUALITY}}}
    names = ("eager FP32", "compile + autocast", "mpcompile O2")
    timed = {"net": {"seconds": {n: [1.0, 2.0] for n in names}, "saved": dict.fromkeys(names, 8)}}
    for draw, report in (
        (figures.draw_papers, {"rows": trained}),
        (figures.draw_peers, {"rows": timed}),
        (figures.draw_gradients, {"histograms": {"net": vars(SMALL)}}),
    ):
        draw(tmp_path / "figure.svg", report)
        first = (tmp_path / "figure.svg").read_bytes()
        draw(tmp_path / "figure.svg", report)
        assert (tmp_path / "figure.svg").read_bytes() == first


def test_a_fingerprint_is_of_the_files_that_a_task_is_made_of() -> None:
    for task in TASKS:
        names = {path.name for path in rows._sources(task.module, set())}
        assert {"ways.py", f"{task.module.rpartition('.')[2]}.py"} <= names
        assert "report.py" not in names


# -- tasks -----------------------------------------------------------------------------------------


@pytest.mark.slow("a benchmark's own test, which runs it small")
@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")  # eager, on a CPU
@pytest.mark.sampled(3)
@pytest.mark.parametrize("task", ROWS, ids=lambda task: task.name)
def test_every_task_trains_and_is_judged_in_fp16(task: Task) -> None:
    for package in task.needs:
        pytest.importorskip(package)
    (way,) = (way for way in QUALITY if way.name == "FP16 O2")
    outcome = train(task, way, 0, "eager", CPU, 2)
    assert task.metric in outcome.metrics
    assert all(map(math.isfinite, outcome.metrics.values()))
    assert outcome.metrics.keys() >= task.grains.keys()


@pytest.mark.slow("a benchmark's own test, which runs it small")
@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.parametrize("averaged", AS_AVERAGED, ids=lambda task: task.name)
def test_smaller_gradients_are_the_same_training(averaged: Task) -> None:
    """A loss divided by a power of two, and all that gradients are compared with: equal to the bit,
    but for what lies below FP32's normal numbers.
    """
    (plain_task,) = (task for task in TASKS if averaged.name.startswith(f"{task.name}, "))
    expected, found = (train(task, FP32, 0, "eager", CPU, 4) for task in (plain_task, averaged))
    assert found.curve == pytest.approx(expected.curve, rel=1e-6)
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-6)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_the_whole_step_of_every_task_is_asked_for(task: Task) -> None:
    """`mpcompile(function)` compiles one as a whole whose own code goes backward."""
    updates: list[Callable[..., Any]] = []

    class Asked(Trainer):
        def whole(self, update: Any) -> Any:
            updates.append(update)
            return update

    task.start(Asked(FP32, "eager", CPU), 0)
    assert updates
    assert all(map(goes_backward, updates))


@pytest.mark.slow("a benchmark's own test, which runs it small")
@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_the_peers_of_every_task_are_compiled(task: Task) -> None:
    """`nn.Module.compile` leaves a model to eager whose forward is torch's own (torch 2.13)."""
    graphs: list[torch.fx.GraphModule] = []

    def counting(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        graphs.append(gm)
        return gm

    trainer = Trainer(Way("compile FP32", compiled=True), "eager", CPU)
    trainer._emit = counting  # type: ignore[assignment]
    task.start(trainer, 0).step()
    assert len(graphs) >= len(trainer.models)
    if not any(isinstance(m, nn.RNNBase) for model in trainer.models for m in model.modules()):
        # Dynamo breaks graphs at RNNs; elsewhere, every parameter is in one.
        taken = {node.name for gm in graphs for node in gm.graph.nodes if node.op == "placeholder"}
        assert len(taken) > sum(1 for model in trainer.models for _ in model.parameters())


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The (task, device, seeds, ways) of each training that is asked for, none of which is done."""
    asked: list[tuple[Any, ...]] = []

    def train_elsewhere(
        function: str, name: str, kind: str, seeds: int, ways: list[str],
        environment: dict[str, str],
    ) -> Any:  # fmt: skip
        asked.append((name, kind, seeds, *ways))
        return {way: plain(outcomes(1.0)) for way in ways}

    monkeypatch.setattr(rows, "call_elsewhere", train_elsewhere)
    monkeypatch.setattr(rows, "SCRATCH", tmp_path / "scratch")
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    return asked


def test_a_row_is_kept_or_committed_or_trained(
    tmp_path: Path, trained: list[tuple[Any, ...]]
) -> None:
    task = ROWS[-1]
    assert Store("cpu").kept(task) is None
    assert Store("cpu").latest(task) is None
    row = rows.keep(task, CPU)
    assert rows.keep(task, CPU) == Store("cpu").kept(task) == row
    assert trained == [(task.name, "cpu", 3, *(way.name for way in QUALITY))]
    shutil.rmtree(tmp_path / "scratch")
    committed = tmp_path / "papers_cpu.json"
    committed.write_text(json.dumps({"rows": {task.name: plain(row)}}))
    assert Store("cpu").kept(task) == row
    assert Store("cpu", "again").latest(task) is None
    other = dataclasses.replace(row, fingerprint="of other code")
    committed.write_text(json.dumps({"rows": {task.name: plain(other)}}))
    assert Store("cpu").kept(task) is None
    assert Store("cpu").latest(task) == other
    assert not other.is_of_now(task)


def test_a_row_that_lacks_a_package_is_not_trained(
    tmp_path: Path, trained: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report has the one that is committed."""
    lacking = [dataclasses.replace(LINE, name=name, needs=("no_such_package",)) for name in "ab"]
    assert [task.lacking for task in (LINE, *lacking)] == ["", "no_such_package", "no_such_package"]
    committed = plain(Kept("of other code", "there", row_of(1.0), "torch 9, no_such_package 1"))
    (tmp_path / "papers_cpu.json").write_text(json.dumps({"rows": {"b": committed}}))
    monkeypatch.setattr(rows, "ROWS", [ROWS[0], *lacking])
    found = rows.train_rows(rows.FULL, CPU)
    assert [name for name, *_ in trained] == [ROWS[0].name]
    assert list(found) == [ROWS[0].name, "b"]
    assert found["b"].packages == "torch 9, no_such_package 1"
    assert found[ROWS[0].name].packages == f"torch {torch.__version__}"


# -- what is off, again ----------------------------------------------------------------------------


def test_only_what_is_off_is_trained_from_all_seeds(trained: list[tuple[Any, ...]]) -> None:
    task = dataclasses.replace(ROWS[0], metric="weights", grains={})
    row = row_of(math.nan)
    assert off(task, row) == []
    assert look_again(task, Kept("", "here", row), CPU) is None
    row["BF16 O1"] = outcomes(1.0, 2.0, 9.0)
    first = look_again(task, Kept("", "here", row), CPU)
    assert look_again(task, Kept("", "here", row), CPU) == first
    assert trained == [(task.name, "cpu", 10, "BF16 O1")]


@pytest.mark.slow("a benchmark's own test, which runs it small")
def test_a_shift_of_all_seeds_is_no_chance_and_a_single_seed_may_be() -> None:
    """Of 10 and 10 runs there are 184,756 ways to draw ten. If all of one way lie above all of the
    other, 2 of these are as far apart (two-sided).
    """
    full = outcomes(*(float(i) for i in range(10)))
    apart = outcomes(*(float(i + 20) for i in range(10)))
    assert chances(full, apart)["weights"] == pytest.approx(2 / 184_756)
    assert chances(full, full)["weights"] == 1.0
    one = outcomes(*(float(i) for i in (0, 1, 2, 3, 4, 5, 6, 7, 8, 12)))
    assert chances(full, one)["weights"] > SIGNIFICANT


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_run_that_diverged_is_no_chance(value: float) -> None:
    full = outcomes(*(float(i) for i in range(10)))
    diverged = outcomes(*(float(i) for i in range(9)), value)
    assert chances(full, diverged)["weights"] == 0.0


def test_holms_correction() -> None:
    """By hand: 0.01 x 4; 0.02 x 3; 0.03 x 2 = 0.06; 0.04 x 1, but no less than the one before."""
    found = {("a",): 0.04, ("b",): 0.01, ("c",): 0.03, ("d",): 0.02}
    expected = {("a",): 0.06, ("b",): 0.04, ("c",): 0.06, ("d",): 0.06}
    assert corrected(found) == pytest.approx(expected)
    assert corrected({("a",): 0.9, ("b",): 0.8}) == {("a",): 1.0, ("b",): 1.0}


@pytest.mark.slow("a benchmark's own test, which runs it small")
def test_the_report_tells_chance_from_a_shift() -> None:
    base = row_of(1.0) | {FP32.name: outcomes(*(float(i) for i in range(10)))}
    shifted = outcomes(*(float(i + 20) for i in range(10)))
    looked = {"BF16 O1": shifted, "BF16 O2": outcomes(*(float(i) for i in range(10)))}
    first, again = ({"line": Kept("", "here", found)} for found in (base, looked))
    report = make_report([], [LINE], first, again, {})
    told = {claim: held for claim, held in report.verdicts.items() if "ten seeds" in claim}
    assert list(told.values()) == [False, True]
    lines = report.tables[-1].rows
    assert [line[:5] for line in lines] == [
        ("line", "BF16 O1", "weights", "4.5000", "24.5000"),
        ("line", "BF16 O2", "weights", "4.5000", "4.5000"),
    ]


def test_the_frechet_distance_of_two_gaussians() -> None:
    """In one dimension it is (m1 - m2)^2 + (s1 - s2)^2: of the means and the deviations."""
    first = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    # The first one's deviation is the root of 2, with n - 1 in the denominator.
    assert frechet_distance(first, 3 * first + 5) == pytest.approx(25 + (2 * math.sqrt(2)) ** 2)
    assert frechet_distance(first, first) == pytest.approx(0.0, abs=1e-12)
    assert math.isnan(frechet_distance(first, first * math.inf))


def test_a_gpu_runs_every_row() -> None:
    """The pieces don't import the tasks, which need packages that a GPU machine may lack."""
    assert len(ROWS) == PAPERS_ROWS
