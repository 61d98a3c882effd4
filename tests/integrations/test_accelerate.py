"""A plain Accelerate loop: with `MPCompileAccelerator`, and with Accelerate's own."""

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import on_each_rank
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mpcompile import (
    LossScale,
    MPCompileError,
    MPOptimizer,
    compiled_plans,
    loss_scale_of,
    mpcompile,
)
from mpcompile.scaling.copies import copies_of

pytest.importorskip("accelerate")
from accelerate import Accelerator
from accelerate.utils import DistributedType

from mpcompile.integrations.accelerate import MPCompileAccelerator

LIMIT, ACCUMULATED = 0.2, 2


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))


def batches() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 16, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=4)


class Loop:
    """The loop of Accelerate's documentation."""

    def __init__(self, accelerator: Accelerator, model: nn.Module, wrapped: bool = False) -> None:
        self.accelerator = accelerator
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        if wrapped:
            optimizer = MPOptimizer(optimizer, emit="eager")
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=8)
        prepared = accelerator.prepare(model, optimizer, batches(), schedule)
        self.model, self.optimizer, self.loader, self.schedule = prepared
        self.losses: list[float] = []
        self.norms: list[float] = []

    def run(self, steps: int, skip: int = 0) -> None:
        for x, y in itertools.islice(iter(self.loader), skip, skip + steps):
            with self.accelerator.accumulate(self.model):
                loss = F.cross_entropy(self.model(x), y)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), LIMIT)
                    self.norms.append(norm.item())
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())


def ours(level: str = "O2", *, wrap: bool = True, **more: Any) -> MPCompileAccelerator:
    options = {"level": level, "dtype": torch.float16, "emit": "eager", "strict": True}
    return MPCompileAccelerator(
        mpcompile={**options, **more.pop("options", {})}, compile_optimizers=wrap, cpu=True,
        gradient_accumulation_steps=ACCUMULATED, **more,
    )  # fmt: skip


def plain(**more: Any) -> Accelerator:
    return Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED, **more)


@pytest.mark.parametrize("wrap", [False, True], ids=["plain", "MPOptimizer"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_it_follows_fp32(level: str, wrap: bool) -> None:
    mine = Loop(ours(level, wrap=wrap), net())
    mine.run(12)
    other = Loop(plain(), net())
    other.run(12)
    assert min(other.norms) > LIMIT
    assert mine.losses == pytest.approx(other.losses, rel=1e-2)
    assert mine.norms == pytest.approx(other.norms, rel=1e-2)
    assert isinstance(mine.optimizer.optimizer, MPOptimizer) is wrap
    assert any(copies_of(p) for p in mine.model.parameters()) is (wrap and level == "O2")
    assert mine.optimizer.param_groups[0]["lr"] == other.optimizer.param_groups[0]["lr"]


def test_values_are_clipped() -> None:
    mine, other = Loop(ours(), net()), Loop(plain(), net())
    assert ACCUMULATED > 1  # gradients are halved by `backward`, in both
    x, y = next(iter(other.loader))
    clipped = []
    for loop in (mine, other):
        loop.accelerator.backward(F.cross_entropy(loop.model(x), y))
        loop.accelerator.clip_grad_value_(loop.model.parameters(), 0.01)
        weight = next(iter(loop.model.parameters()))
        assert float(weight.grad.abs().max()) == pytest.approx(0.01, rel=1e-3)
        clipped.append(weight.grad.float())
    torch.testing.assert_close(*clipped, rtol=2e-2, atol=1e-4)


def scaled() -> dict[str, Any]:
    """A scale that doubles with each second good step: its counters matter, too."""
    return {"loss_scale": LossScale.dynamic(16.0, growth_interval=2)}


@pytest.mark.slow_rows("trains by a trainer of others")
@pytest.mark.parametrize("wrap", [False, True], ids=["plain", "MPOptimizer"])
def test_it_resumes_to_the_bit(wrap: bool, tmp_path: Path) -> None:
    whole = Loop(ours(wrap=wrap, options=scaled()), net())
    whole.run(6)
    whole.accelerator.save_state(str(tmp_path))
    whole.run(6, skip=6)

    second = Loop(ours(wrap=wrap, options=scaled()), net())
    second.accelerator.load_state(str(tmp_path))
    second.run(6, skip=6)
    assert second.losses == whole.losses[6:]
    assert loss_scale_of(whole.model).value == 16.0 * 2**3  # 6 steps of 2 batches
    assert loss_scale_of(second.model).state_dict() == loss_scale_of(whole.model).state_dict()
    for mine, other in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("how", ["argument", "launcher"])
@pytest.mark.parametrize(("word", "dtype"), [("fp16", "f16"), ("bf16", "bf16")])
def test_it_is_told_the_dtype(
    word: str, dtype: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "launcher":
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", word)
    told = word if how == "argument" else None
    accelerator = MPCompileAccelerator(mixed_precision=told, mpcompile={"emit": "eager"}, cpu=True)
    assert (accelerator.mixed_precision, accelerator.scaler) == ("no", None)
    loop = Loop(accelerator, net())
    loop.run(1)
    (plan,) = compiled_plans(loop.model)
    linear = [n.planned.partition("[")[0] for n in plan.nodes if n.op == "aten::linear"]
    assert linear == [dtype, dtype]


@pytest.mark.parametrize("word", ["bf16", "fp8"])
def test_a_word_that_does_not_fit_is_refused(word: str) -> None:
    with pytest.raises(MPCompileError, match="mixed_precision"):
        MPCompileAccelerator(mixed_precision=word, mpcompile={"dtype": torch.float16}, cpu=True)


@pytest.mark.parametrize("engine", ["DEEPSPEED", "FSDP"])
def test_engines_that_replace_parameters_are_refused(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType[engine])
    with pytest.raises(MPCompileError, match=engine):
        MPCompileAccelerator(cpu=True)


# -- Accelerate's own Accelerator ------------------------------------------------------------------


def compiled(**options: Any) -> nn.Module:
    return mpcompile(net(), **{"dtype": torch.float16, "emit": "eager", "level": "O2", **options})


def test_its_own_accelerator_around_a_compiled_model() -> None:
    mine = Loop(plain(), compiled())
    mine.run(12)
    other = Loop(plain(), net())
    other.run(12)
    assert mine.losses == pytest.approx(other.losses, rel=1e-2)
    assert mine.norms == pytest.approx(other.norms, rel=1e-2)


@pytest.mark.parametrize("first", ["mpcompile", "prepare"])
def test_its_own_autocast_is_refused(first: str) -> None:
    accelerator = plain(mixed_precision="bf16")
    if first == "prepare":
        model = accelerator.prepare(net())
        with pytest.raises(MPCompileError, match=r"autocast.*mixed_precision"):
            mpcompile(model)
        return
    loop = Loop(accelerator, compiled())
    with pytest.raises(MPCompileError, match=r"autocast.*mixed_precision"):
        loop.run(1)


# -- several processes -----------------------------------------------------------------------------


def follow_one_process(rank: int, level: str, wrap: bool) -> None:
    """Some steps beside a plain model in FP32 that sees the rows of both ranks."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in names.items()})
    accelerator = ours(level, wrap=wrap)
    assert accelerator.num_processes == 2
    model, reference = net(), net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    plain_one = torch.optim.SGD(reference.parameters(), lr=0.1)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(4):
        x = torch.randn(2, 4, 16)
        with accelerator.accumulate(wrapped):
            accelerator.backward(wrapped(x[rank]).square().mean())
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(wrapped.parameters(), LIMIT)
            optimizer.step()
            optimizer.zero_grad()
        (reference(x.flatten(0, 1)).square().mean() / ACCUMULATED).backward()
        if accelerator.sync_gradients:
            wanted = torch.nn.utils.clip_grad_norm_(reference.parameters(), LIMIT)
            torch.testing.assert_close(norm, wanted, rtol=1e-2, atol=0)
            plain_one.step()
            plain_one.zero_grad()
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-4)


@pytest.mark.slow("trains by a trainer of others")
@pytest.mark.parametrize(("level", "wrap"), [("O1", False), ("O2", True)])
def test_two_processes_follow_one(level: str, wrap: bool) -> None:
    on_each_rank(follow_one_process, level, wrap)
