"""The benchmark of whole training steps: one tiny run, and what it measures with."""

import dataclasses

import pytest
import torch
from torch import Tensor

from benchmarks import whole_step
from benchmarks.harness.peak import peak_bytes
from benchmarks.harness.report import Settings
from benchmarks.whole_step import (
    ARMS,
    EAGER,
    OURS,
    PEER,
    PIECES,
    PLAIN,
    WHOLE,
    Row,
    Trainee,
    make_report,
    measure_all,
    over_peer,
)
from benchmarks.whole_step.bare import Graphs
from benchmarks.whole_step.tasks import CPU as AT_FULL_SIZE
from benchmarks.whole_step.tasks import TINY, dcgan

CPU = torch.device("cpu")
MLP = TINY.tasks[0]


def parameters(trainee: Trainee) -> list[Tensor]:
    return [p.detach().clone() for model in trainee.models for p in model.parameters()]


@pytest.mark.sweep("runs a benchmark, small")
def test_whole_step_tiny() -> None:
    threads = torch.get_num_threads()
    report = whole_step.run(Settings(CPU, quick=True))
    assert torch.get_num_threads() == threads
    rows = report.data["rows"]
    assert rows.keys() == {"MLP 8, FP16", "LSTM tagger, BF16"}
    for row in rows.values():
        assert row["losses"].keys() == set(ARMS)
        full = row["losses"][EAGER]
        for arm in set(ARMS) - set(row["untrained"]):
            assert row["losses"][arm] == pytest.approx(full, rel=0.02)
            assert len(row["seconds"][arm]) == TINY.rounds
            assert row["held"][arm] >= row["held"][EAGER]
            assert row["peak"][arm] > 0
        assert row["left"] == {}
    assert len(report.verdicts) == 2 * 2 * len(WHOLE)
    assert report.data["ratios"]["MLP 8, FP16"].keys() == set(ARMS) - {PEER}


@pytest.mark.slow("a benchmark's own test, which runs it small")
def test_both_models_of_a_gan_learn_alike_in_pieces_and_under_the_peer() -> None:
    task = dcgan("DCGAN", 2, 2, 1, "BF16")
    losses, moved = {}, {}
    for arm in (EAGER, PEER, PIECES[1]):
        trainee = Trainee(task, arm, "BF16", "eager", CPU)
        before = parameters(trainee)
        losses[arm] = trainee.warm_up()
        assert trainee.trains()
        moved[arm] = [p - q for p, q in zip(parameters(trainee), before, strict=True)]
    for arm in losses:
        assert losses[arm] == pytest.approx(losses[EAGER], rel=0.02)
        for ours, full in zip(moved[arm], moved[EAGER], strict=True):
            assert 0 < ours.norm() == pytest.approx(float(full.norm()), rel=0.3)


@pytest.mark.slow("a benchmark's own test, which runs it small")
def test_held_is_masters_two_moments_a_counter_and_copies() -> None:
    held = {}
    for arm in (EAGER, PIECES[0], PIECES[1]):
        trainee = Trainee(MLP, arm, "FP16", "eager", CPU)
        trainee.warm_up()
        held[arm] = trainee.held_bytes()
    weights, biases = 8 * 8 + 8 * 10, 8 + 10
    assert held[EAGER] == held[PIECES[0]] == 3 * 4 * (weights + biases) + 4 * 4
    assert held[PIECES[1]] == held[EAGER] + 2 * (weights + biases)


def test_the_peak_is_what_is_there_at_once() -> None:
    kept: list[Tensor] = []

    def step() -> None:
        kept.clear()  # what the step before has left: 400 bytes
        first = torch.ones(1000)
        second = torch.ones(500)
        del first, second
        kept.append(torch.ones(100))

    assert peak_bytes(step, CPU) == 4 * 1500 - 400


@pytest.mark.slow("a benchmark's own test, which runs it small")
def test_a_whole_step_whose_graph_does_nothing() -> None:
    trainee = Trainee(MLP, WHOLE[1], "FP16", "eager", CPU)
    trainee.warm_up()
    assert trainee.left is None
    graphs = Graphs(trainee.step)
    assert graphs.whole == 1
    before = parameters(trainee)
    with graphs.do_nothing():
        assert trainee.step() == trainee.step()
        assert all(map(torch.equal, parameters(trainee), before))
    trainee.step()
    assert not any(map(torch.equal, parameters(trainee), before))


@pytest.mark.sweep("runs a benchmark, small")
@pytest.mark.parametrize("arm", [PEER, PLAIN, PIECES[1]])
def test_a_step_in_pieces_whose_graphs_do_nothing(arm: str) -> None:
    """The loss is the one before, although the models have different inputs."""
    trainee = Trainee(MLP, arm, "FP16", "inductor", CPU)
    trainee.warm_up()
    graphs = Graphs(trainee.step)
    assert graphs.whole == 0
    with graphs.do_nothing():
        first = trainee.step().clone()
        for model in trainee.models:
            for p in model.parameters():
                p.data.mul_(100)
        assert trainee.step() == first
    assert trainee.step() != first


def test_what_is_not_whole_or_not_timed_is_said_and_without_a_peer_there_is_no_ratio() -> None:
    row = Row(
        losses={arm: [1.0] for arm in ARMS}, seconds={EAGER: [1.0]}, held={EAGER: 1},
        peak={EAGER: 1}, slow={PEER: 100.0}, left={WHOLE[0]: "it won't"}, untrained=[PLAIN],
    )  # fmt: skip
    report = make_report({"a row": row}, {}, TINY, CPU)
    for remark in (
        f"a row: {WHOLE[0]} is not whole: it won't.",
        f"a row: {PEER} takes 100.0 s a step; left out.",
        f"a row: {PLAIN} does not train",
    ):
        assert remark in report.markdown({})
    assert report.data["ratios"] == {"a row": {}}
    assert report.verdicts == {}


def test_ratios_are_over_the_peer() -> None:
    found = over_peer(Row(seconds={EAGER: [1.0, 4.0], PEER: [2.0, 8.0]}))
    assert [(arm, r.paired) for arm, r in found.items()] == [(EAGER, 2.0)]


@pytest.mark.sweep("runs a benchmark, small")
def test_a_peer_that_torch_refuses_to_run_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """An LSTM under autocast, where oneDNN has none in that dtype; of ours it is an error."""
    warm_up, refused = Trainee.warm_up, [PEER]

    def refusing(trainee: Trainee) -> list[float]:
        if trainee.arm in refused:
            raise RuntimeError("could not create a primitive")
        return warm_up(trainee)

    monkeypatch.setattr(Trainee, "warm_up", refusing)
    work = dataclasses.replace(TINY, tasks=TINY.tasks[:1])
    (row,) = measure_all(work, CPU)[0].values()
    assert row.refused == {PEER: "could not create a primitive"}
    assert row.seconds.keys() == set(ARMS) - {PEER}
    refused.append(WHOLE[0])
    with pytest.raises(RuntimeError, match="could not create"):
        measure_all(work, CPU)


def test_a_start_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_step, "work_for", lambda device: TINY)
    assert whole_step.first_steps("MLP 8, FP16", WHOLE[0], "cpu") > 0


def test_each_arm_of_a_start_is_timed_in_processes_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(number: int, function: str, *arguments: str) -> list[float]:
        assert (number, function) == (2, "benchmarks.whole_step:first_steps")
        assert arguments == ("a row", arguments[1], "cpu")
        return [float(OURS.index(arguments[1])), 9.0]

    monkeypatch.setattr(whole_step, "starts", run)
    found = whole_step.measure_starts("a row", OURS[:2], CPU)
    assert list(found.values()) == [{"cold": cold, "warm": 9.0} for cold in (0.0, 1.0)]


def test_starts_are_of_rows_that_exist() -> None:
    started = [task for task in AT_FULL_SIZE.tasks if task.starts]
    assert all(f"{task.name}, {task.dtypes[0]}" in AT_FULL_SIZE.rows for task in started)
    assert started
