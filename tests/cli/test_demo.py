"""The demo's text, its model, its measurements, and short runs of the whole."""

import io
import itertools
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from mpcompile import MPCompileWarning, cli
from mpcompile.demo import GPT, GPTConfig, corpus, text_batches
from mpcompile.demo import run as demo_run
from mpcompile.demo.run import DemoResult, DemoSettings, run
from mpcompile.demo.train import Trainee, bytes_saved_for_backward
from mpcompile.devices.cpu import CPU

TINY = GPTConfig(context=16, width=32, layers=1, heads=2)


def tokens(*shape: int) -> Tensor:
    return torch.randint(TINY.vocab, shape)


# -- text ------------------------------------------------------------------------------------------


def test_the_text_is_english() -> None:
    assert len(corpus()) > 300_000
    assert bytes(corpus().tolist()).decode().count(" the ") > 1000


def test_batches_are_windows_and_their_next_bytes() -> None:
    stream = torch.arange(100)
    for idx, targets in itertools.islice(text_batches(stream, batch=4, context=8, seed=0), 50):
        assert idx.shape == targets.shape == (4, 8)
        torch.testing.assert_close(targets, idx + 1)
        torch.testing.assert_close(idx - idx[:, :1], torch.arange(8).expand(4, 8))
        assert idx.is_contiguous()


def test_every_place_of_the_text_can_come() -> None:
    seen = torch.zeros(12, dtype=torch.bool)
    batches = text_batches(torch.arange(12), batch=4, context=3, seed=0)
    for idx, targets in itertools.islice(batches, 50):
        seen[idx] = seen[targets] = True
    assert seen.all()


def test_the_seed_decides_the_batches() -> None:
    text = tokens(500)

    def first(seed: int) -> list[tuple[Tensor, Tensor]]:
        return list(itertools.islice(text_batches(text, batch=2, context=8, seed=seed), 3))

    torch.testing.assert_close(first(seed=5), first(seed=5), atol=0, rtol=0)
    assert not torch.equal(first(seed=5)[0][0], first(seed=6)[0][0])


def test_too_little_text() -> None:
    with pytest.raises(ValueError, match="8 tokens are too few for a context of 8"):
        next(text_batches(torch.arange(8), batch=1, context=8, seed=0))


# -- model -----------------------------------------------------------------------------------------


def test_a_fresh_model_knows_nothing() -> None:
    model = GPT(TINY)
    idx = tokens(4, TINY.context)
    assert model.logits(idx).shape == (4, TINY.context, TINY.vocab)
    loss = model(idx, tokens(4, TINY.context))
    assert loss.shape == ()
    assert loss.item() == pytest.approx(math.log(TINY.vocab), abs=0.1)


def test_no_byte_sees_a_later_one() -> None:
    model = GPT(TINY)
    idx = tokens(1, TINY.context)
    changed = idx.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % TINY.vocab
    torch.testing.assert_close(model.logits(idx)[0, :10], model.logits(changed)[0, :10])
    assert not torch.allclose(model.logits(idx)[0, 10:], model.logits(changed)[0, 10:])


def test_a_block_adds_to_the_residual_stream() -> None:
    block = GPT(TINY).blocks[0]
    x = torch.randn(2, 5, TINY.width)
    nn.init.zeros_(block.down.weight)
    torch.testing.assert_close(block(x) - x, block.attention(block.norm1(x)))


def test_positions_matter() -> None:
    model = GPT(TINY)
    with torch.no_grad():  # larger weights, so that attention is far from uniform
        for weight in model.parameters():
            weight.mul_(4 if weight.dim() == 2 else 1)
    idx = torch.tensor([[1, 2, 3]])
    assert not torch.allclose(model.logits(idx)[0, -1], model.logits(idx[:, [1, 0, 2]])[0, -1])


def test_the_head_is_tied_and_the_angles_are_not_saved() -> None:
    model = GPT(TINY)
    assert model.head.weight is model.tokens.weight
    assert not any("rotary" in name for name in model.state_dict())
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == 256 * 32 + (4 + 8) * 32 * 32 + 3 * 2 * 32


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match="width 32 does not divide into 3 heads"):
        GPTConfig(width=32, heads=3)


# -- measurements ----------------------------------------------------------------------------------


def test_bytes_saved_for_backward_counts_each_storage_once_and_no_parameters() -> None:
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False))
    x = torch.randn(2, 8)
    with bytes_saved_for_backward(model) as saved:
        model(x).sum()
    # The input of the first linear; the ReLU's result, saved by the ReLU and the second linear.
    assert sum(saved.values()) == 4 * (2 * 8 + 2 * 16)


def test_the_median_leaves_the_warm_up_out() -> None:
    trainee = Trainee("x", GPT(TINY), steps=9, lr=1e-3)
    trainee.seconds = [9.0, 5.0, 5.0, 5.0, 5.0, 1.0, 2.0, 3.0, 4.0]
    assert (trainee.first_step, trainee.median) == (9.0, 2.5)
    trainee.seconds = [9.0, 5.0, 1.0]
    assert trainee.median == 3.0


def test_training_learns_and_the_clock_runs() -> None:
    start = time.perf_counter()
    trainee = Trainee("x", GPT(TINY), steps=30, lr=1e-2)
    idx, targets = tokens(4, 16), tokens(4, 16)
    trainee.step_and_measure_memory(idx, targets)
    rates = []
    for _ in range(29):
        rates.append(trainee.optimizer.param_groups[0]["lr"])
        trainee.step(idx, targets)
    assert trainee.losses[-1] < trainee.losses[0] - 1
    assert len(trainee.seconds) == 30
    assert min(trainee.seconds) > 0
    assert sum(trainee.seconds) < time.perf_counter() - start
    assert rates[:3] == pytest.approx([1e-2 * 2 / 3, 1e-2, 1e-2])  # it rises, and falls to its end
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert 0 < rates[-1] < 1e-4
    assert trainee.memory > 4 * (4 * 16 * 32)  # more than one residual stream


# -- the whole -------------------------------------------------------------------------------------


def ran(out: io.StringIO | None = None, **settings: Any) -> DemoResult:
    """A run of a tiny model on the CPU, which writes to `out`."""
    made = DemoSettings(emit="eager", device="cpu", model=TINY, **settings)
    return run(made, Console(file=out or io.StringIO(), width=140))


@pytest.mark.parametrize(
    ("dtype", "level"), [("bfloat16", "O1"), ("float16", "O1"), ("float16", "O2")]
)
def test_a_short_run(dtype: str, level: str, tmp_path: Path) -> None:
    out = io.StringIO()
    result = ran(out, steps=4, dtype=dtype, level=level, dump=tmp_path)
    assert result.mixed.train_loss == pytest.approx(result.full.train_loss, abs=0.02)
    assert result.fault is None
    assert (result.loss_scale is None) is (dtype == "bfloat16")
    assert result.full.memory_kind == "saved for backward"
    assert result.mixed.memory < result.full.memory
    (dump,) = result.dumps
    assert (tmp_path / dump.relative_to(tmp_path) / "plan.json").is_file()
    text = out.getvalue()
    said = [line.partition(":")[0] for line in text.splitlines() if line.startswith("step ")]
    assert said == [f"step {n}" for n in (1, 2, 3, 4)]  # in a file, whose end nobody waits for
    assert "About 0.0 minutes to go." in text
    assert result.mixed.name == f"{dtype[0].upper()}{'F' if dtype[0] == 'b' else 'P'}16 {level}"
    for row in ("training loss", "memory, MiB", "matmuls", "loss scale", "dump"):
        assert row in text


@pytest.mark.parametrize(("loss", "said"), [
    (1.97, None),
    (2.03, None),
    (1.95, "training loss of BF16 O1 is 1.9500 and that of FP32 2.0000: .* within 2%"),
    (2.05, "training loss of BF16 O1 is 2.0500"),
    (math.nan, "training loss of BF16 O1 is nan: it should be a finite number"),
    (math.inf, "training loss of BF16 O1 is inf"),
])  # fmt: skip
def test_losses_apart_make_the_exit_status_1(
    loss: float, said: str | None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    full, mixed = (Trainee(n, GPT(TINY), steps=2, lr=1.0) for n in ("FP32", "BF16 O1"))
    full.losses, mixed.losses = [2.0], [loss]
    result = DemoResult(full, mixed, None, 0, low="", dumps=[])
    monkeypatch.setattr("mpcompile.cli.machine.run_demo", lambda settings, console: result)
    # 0.03 of 2 is 1.5%, 0.05 is 2.5%.
    assert cli.main(["demo", "--device", "cpu"]) == (0 if said is None else 1)
    error = capsys.readouterr().err
    assert re.search(said, error) if said else error == ""


def test_a_model_of_nan_ends_in_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo_run, "LEARNING_RATE", math.inf)
    with pytest.warns(MPCompileWarning, match="since training call 2 .* a loss .* is nan"):
        result = ran(steps=3, dtype="bf16", dump=tmp_path)
    assert result.fault == "the training loss of FP32 is nan: it should be a finite number"


def test_where_all_is_fp32_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CPU, "has_units", lambda *_: False)
    monkeypatch.chdir(tmp_path)
    assert ran(steps=2).mixed.name == "FP32 O1"
    assert list(tmp_path.iterdir()) == []  # nothing is written unasked


@pytest.mark.slow("whole commands")
def test_the_same_seed_gives_the_same_fp32_run(tmp_path: Path) -> None:
    seeds = (0, 0, 1)
    first, again, other = (ran(steps=2, seed=s, dump=tmp_path).full.losses for s in seeds)
    assert first == again != other


@pytest.mark.sweep("the demo through Inductor, as the command runs it")
def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["demo", "--steps", "8", "--device", "cpu", "--dump", str(tmp_path)]) == 0
    assert "BF16 O1" in capsys.readouterr().out
    assert list(tmp_path.glob("*/plan.json"))
