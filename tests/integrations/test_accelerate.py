"""A plain Accelerate loop, with `MPCompileAccelerator` and with Accelerate's own; and what ours
does with single objects, its arguments, and its checkpoints.
"""

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
from mpcompile.runtime.records import compiled_in
from mpcompile.scaling.copies import copies_of

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.utils import AutocastKwargs, DistributedType, GradScalerKwargs

from mpcompile.integrations.accelerate import MPCompileAccelerator

# -- loops -----------------------------------------------------------------------------------------


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
    assert any(copies_of(p) for p in mine.model.parameters()) is wrap
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


# -- single objects --------------------------------------------------------------------------------


FP16 = {"dtype": torch.float16, "emit": "eager"}


def by_ours(options: Any = None, **more: Any) -> MPCompileAccelerator:
    return MPCompileAccelerator(mpcompile={**FP16, **(options or {})}, cpu=True, **more)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


# -- one object at a time --------------------------------------------------------------------------


def test_an_optimizer_is_compiled_with_the_options_that_it_shares_with_the_model() -> None:
    told: dict[str, Any] = {"mode": "default", "options": {"epilogue_fusion": False}}
    told |= {"emit": "inductor", "verify": False}
    ours = by_ours(told, compile_optimizers=True).prepare_optimizer(sgd(nn.Linear(4, 4)))
    assert ours.optimizer._emit == MPOptimizer(sgd(nn.Linear(4, 4)), **told)._emit


def test_the_optimizer_may_stand_before_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """An MPOptimizer is made for parameters whose model is compiled already."""
    model, seen = nn.Linear(4, 4), []
    make = MPOptimizer._start

    def start(self: MPOptimizer) -> None:
        seen.append(compiled_in(model))
        make(self)

    monkeypatch.setattr(MPOptimizer, "_start", start)
    by_ours(compile_optimizers=True).prepare(sgd(model), model)
    assert seen == [[model]]


def test_a_model_for_evaluation() -> None:
    accelerator = by_ours()
    for dtype, compiled in ((torch.float32, True), (torch.bfloat16, False)):
        model = accelerator.prepare_model(nn.Linear(4, 4, dtype=dtype), evaluation_mode=True)
        assert bool(compiled_in(model)) is compiled
    with pytest.raises(MPCompileError, match="low dtype is float16"):
        accelerator.prepare_model(nn.Linear(4, 4, dtype=torch.bfloat16))


# -- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"mpcompile": "O2"}, "'O2'"),
        ({"mpcompile": {"levle": "O2"}}, "did you mean 'level'"),
        ({"compile_optimizers": "no"}, "compile_optimizers='no'"),
        ({"mixed_precision": "bf16", "mpcompile": {"dtype": torch.float16}}, "mixed_precision"),
        ({"mixed_precision": "fp8", "mpcompile": {"dtype": torch.float16}}, "mixed_precision"),
        ({"kwargs_handlers": [AutocastKwargs(enabled=False)]}, "AutocastKwargs"),
        (
            {"kwargs_handlers": [GradScalerKwargs()], "mpcompile": {"loss_scale": 8.0}},
            "GradScalerKwargs",
        ),
    ],
)
def test_a_bad_argument_is_refused_at_once(told: dict[str, Any], message: str) -> None:
    with pytest.raises(MPCompileError, match=message):
        MPCompileAccelerator(cpu=True, **told)


def test_the_arguments_of_a_grad_scaler() -> None:
    told = GradScalerKwargs(init_scale=1024, growth_interval=7, growth_factor=4.0)
    accelerator = by_ours(kwargs_handlers=[told])
    first, second = (accelerator.prepare_model(nn.Linear(4, 4)) for _ in range(2))
    scale = loss_scale_of(first)
    assert (scale.value, scale.growth_interval, scale.growth_factor) == (1024.0, 7, 4.0)
    assert scale.backoff_factor == GradScalerKwargs().backoff_factor
    assert loss_scale_of(second) is not scale


def test_a_grad_scaler_that_is_off() -> None:
    accelerator = by_ours(kwargs_handlers=[GradScalerKwargs(enabled=False, init_scale=1024)])
    assert loss_scale_of(accelerator.prepare_model(nn.Linear(4, 4))).kind == "none"


# -- checkpoints -----------------------------------------------------------------------------------


class Two(nn.Module):
    """Two modules that are compiled each by itself; an MPOptimizer steps the first."""

    def __init__(self, a: float, b: float) -> None:
        super().__init__()
        self.a = mpcompile(nn.Linear(4, 4), **FP16, loss_scale=LossScale.dynamic(a))
        self.b = mpcompile(nn.Linear(4, 4), **FP16, loss_scale=LossScale.dynamic(b))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))

    def scales(self) -> list[float]:
        return [loss_scale_of(self.a).value, loss_scale_of(self.b).value]


def test_each_scale_is_saved_whoever_steps_it(tmp_path: Path) -> None:
    def prepared(a: float, b: float) -> tuple[Accelerator, Two]:
        accelerator, model = by_ours(), Two(a, b)
        first = MPOptimizer(sgd(model.a), emit="eager")
        accelerator.prepare(model, first, sgd(model.b))
        (loss := model(torch.ones(2, 4)).sum()).backward()
        assert loss.isfinite()
        return accelerator, model

    accelerator, model = prepared(32.0, 64.0)
    accelerator.save_state(str(tmp_path))
    other, resumed = prepared(2.0, 4.0)
    other.load_state(str(tmp_path))
    assert resumed.scales() == model.scales() == [32.0, 64.0]


@pytest.mark.slow("trains by a trainer of others")
def test_the_next_model_after_free_memory(tmp_path: Path) -> None:
    accelerator = by_ours({"loss_scale": 8.0})
    accelerator.prepare(model := nn.Linear(4, 4), sgd(model))
    accelerator.free_memory()
    accelerator.prepare_model(nn.Linear(4, 4))
    accelerator.save_state(str(tmp_path))
    fresh = by_ours({"loss_scale": 2.0})
    model = fresh.prepare_model(nn.Linear(4, 4))
    fresh.load_state(str(tmp_path))
    assert loss_scale_of(model).value == 8.0


def test_a_plain_accelerators_checkpoint_and_back(tmp_path: Path) -> None:
    plain, mine = Accelerator(cpu=True), by_ours({"loss_scale": 8.0})
    theirs, model = plain.prepare(nn.Linear(4, 4)), mine.prepare(nn.Linear(4, 4))
    plain.save_state(str(tmp_path / "plain"))
    mine.load_state(str(tmp_path / "plain"))
    assert torch.equal(model.weight, theirs.weight)
    assert loss_scale_of(model).value == 8.0
    nn.init.ones_(model.weight)
    mine.save_state(str(tmp_path / "by_ours"))
    plain.load_state(str(tmp_path / "by_ours"))
    assert torch.equal(theirs.weight, torch.ones(4, 4))


def test_another_number_of_compiled_models_is_refused(tmp_path: Path) -> None:
    one, two = by_ours(), by_ours()
    one.prepare(nn.Linear(4, 4))
    one.save_state(str(tmp_path))
    two.prepare(Two(1.0, 1.0))
    with pytest.raises(MPCompileError, match="1 compiled modules, and here are 2"):
        two.load_state(str(tmp_path))
