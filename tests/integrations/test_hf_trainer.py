"""Hugging Face's Trainer that compiles, beside the plain one in FP32."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mpcompile import (
    LossScale,
    MPCompileError,
    MPOptimizer,
    compiled_plans,
    loss_scale_of,
    mpcompile,
)
from mpcompile.scaling.copies import copies_of

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("accelerate")
from small_gpt import gpt, rows
from transformers import Trainer, TrainingArguments

from mpcompile.integrations.huggingface import MPCompileMixin, MPCompileTrainer

REST = pytest.mark.sweep("the rest of a matrix of trainings")

# torch warns, while Dynamo traces transformers, of what transformers does.
pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 6


def trainer(
    folder: Path, cls: type[Trainer] = MPCompileTrainer, *, mixed: Any = None, **more: Any
) -> Trainer:
    """A trainer of `STEPS` steps that logs each; `mixed` is what is passed to mpcompile."""
    own = {k: more.pop(k) for k in ("model", "model_init", "compile_optimizers") if k in more}
    if "model" not in own and "model_init" not in own:
        own["model"] = gpt()
    if issubclass(cls, MPCompileTrainer):
        usual = {"emit": "eager", "strict": True}
        own["mpcompile"] = mixed if isinstance(mixed, str) else {**usual, **(mixed or {})}
    arguments: dict[str, Any] = {
        "max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 3e-3,
        "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True,
        "disable_tqdm": True, "max_grad_norm": 0.5,
    }  # fmt: skip
    args = TrainingArguments(output_dir=str(folder), **{**arguments, **more})
    return cls(args=args, train_dataset=rows(32, 1), eval_dataset=rows(8, 2), **own)


def logged(trained: Trainer, what: str) -> list[float]:
    return [entry[what] for entry in trained.state.log_history if what in entry]


HALF = {"dtype": torch.float16}
WAYS = {
    "O1": ({**HALF, "level": "O1"}, False),
    "O1, MPOptimizer": ({**HALF, "level": "O1"}, True),
    "O2": ({**HALF, "level": "O2"}, False),
    "O2, MPOptimizer": ({**HALF, "level": "O2"}, True),
    "O2 in BF16, MPOptimizer": ({"dtype": torch.bfloat16, "level": "O2"}, True),
    "O2, MPOptimizer, gradient_checkpointing": ({**HALF, "level": "O2"}, True),
}


@pytest.fixture(scope="module")
def fp32(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """What a plain Trainer does: it accumulates, evaluates, and clips at each step."""
    plain = trainer(tmp_path_factory.mktemp("fp32"), Trainer, **_ALL)
    plain.train()
    assert min(logged(plain, "grad_norm")) > plain.args.max_grad_norm
    return plain


_ALL = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2}


SAMPLE = ("O1", "O2, MPOptimizer", "O2, MPOptimizer, gradient_checkpointing")
EACH = [pytest.param(way, marks=[] if way in SAMPLE else REST) for way in WAYS]


@pytest.mark.slow("trains by the Trainer of transformers")
@pytest.mark.parametrize("way", EACH)
def test_it_follows_the_plain_trainer(way: str, fp32: Trainer, tmp_path: Path) -> None:
    options, compiled = WAYS[way]
    more = {**_ALL, "gradient_checkpointing": "gradient_checkpointing" in way}
    ours = trainer(tmp_path, mixed=options, compile_optimizers=compiled, **more)
    ours.train()
    assert ours.model.is_gradient_checkpointing is more["gradient_checkpointing"]
    near = 2e-3 if options["dtype"] is torch.float16 else 2e-2
    for what, tolerance in (("loss", near), ("eval_loss", near), ("grad_norm", 10 * near)):
        expected = logged(fp32, what)
        assert len(expected) >= 3
        assert logged(ours, what) == pytest.approx(expected, rel=tolerance)
    assert isinstance(ours.optimizer.optimizer, MPOptimizer) is compiled
    assert any(copies_of(p) for p in ours.model.parameters()) is compiled
    assert {p.dtype for p in ours.model.parameters()} == {torch.float32}


@pytest.mark.slow("trains by the Trainer of transformers")
def test_a_bf16_model(fp32: Trainer, tmp_path: Path) -> None:
    """`from_pretrained(dtype=torch.bfloat16)`: masters are the MPOptimizer's, and what is saved is
    BF16.
    """
    saving = {"save_strategy": "steps", "save_steps": 3}
    model = gpt().to(torch.bfloat16)
    ours = trainer(tmp_path, model=model, compile_optimizers=True, **_ALL, **saving)
    ours.train()
    assert logged(ours, "loss") == pytest.approx(logged(fp32, "loss"), rel=2e-2)
    assert isinstance(ours.optimizer.optimizer, MPOptimizer)
    for p in model.parameters():
        master = ours.optimizer.state[p]["master"]
        assert master.dtype is torch.float32
        assert torch.equal(master.to(torch.bfloat16), p)
    second = trainer(tmp_path, model=gpt().to(torch.bfloat16), compile_optimizers=True, **_ALL)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for p, q in zip(model.parameters(), second.model.parameters(), strict=True):
        mine, theirs = ours.optimizer.state[p]["master"], second.optimizer.state[q]["master"]
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.slow("trains by the Trainer of transformers")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "MPOptimizer"])
def test_it_resumes_to_the_bit(compiled: bool, tmp_path: Path) -> None:
    def made() -> Trainer:
        # The scale doubles with each second good step: its counters matter, too.
        options = {**HALF, "level": "O2", "loss_scale": LossScale.dynamic(16.0, growth_interval=2)}
        saving = {"save_strategy": "steps", "save_steps": 3}
        return trainer(tmp_path, mixed=options, compile_optimizers=compiled, **saving)

    whole, second = made(), made()
    whole.train()
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert loss_scale_of(whole.model).value == 16.0 * 2 ** (STEPS // 2)
    assert loss_scale_of(second.model).state_dict() == loss_scale_of(whole.model).state_dict()
    for mine, other in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert logged(second, "loss") == logged(whole, "loss")


@pytest.mark.slow("trains by the Trainer of transformers")
def test_a_checkpoint_of_a_plain_trainer_is_taken_up(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 3}
    plain = trainer(tmp_path, Trainer, **saving)
    plain.train()
    ours = trainer(tmp_path, mixed=HALF, compile_optimizers=True, **saving)
    ours.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert logged(ours, "loss") == pytest.approx(logged(plain, "loss"), rel=2e-3)


@pytest.mark.slow("trains by the Trainer of transformers")
@pytest.mark.parametrize(("word", "dtype"), [("fp16", "float16"), ("bf16", "bfloat16")])
def test_the_arguments_name_the_dtype(word: str, dtype: str, tmp_path: Path) -> None:
    ours = trainer(tmp_path, max_steps=1, **{word: True})
    ours.train()
    assert ours.accelerator.scaler is None
    assert not ours.accelerator.native_amp
    low = {
        n.planned
        for plan in compiled_plans(ours.model)
        for n in plan.nodes
        if n.op == "aten::addmm"
    }
    assert {p.partition("[")[0] for p in low} == {"f16" if word == "fp16" else "bf16"}
    assert getattr(ours.args, word)  # the arguments stay as they were given
    assert ours.args.mixed_precision == word


@pytest.mark.slow("trains by the Trainer of transformers")
def test_a_plain_trainers_own_autocast_is_refused(tmp_path: Path) -> None:
    model = mpcompile(gpt(), dtype=torch.float16, emit="eager")
    plain = trainer(tmp_path, Trainer, model=model, bf16=True)
    with pytest.raises(MPCompileError, match=r"autocast.*bf16"):
        plain.train()


@pytest.mark.slow("trains by the Trainer of transformers")
def test_a_model_compiled_before_is_taken_as_it_is(tmp_path: Path) -> None:
    model = mpcompile(gpt(), dtype=torch.float16, emit="eager", level="O2")
    scale = loss_scale_of(model)
    trainer(tmp_path, model=model, mixed={"level": "O1"}, max_steps=1).train()
    assert loss_scale_of(model) is scale
    assert {plan.level for plan in compiled_plans(model)} == {"O2"}


@pytest.mark.slow("trains by the Trainer of transformers")
def test_model_init(tmp_path: Path) -> None:
    ours = trainer(tmp_path, model_init=gpt, mixed=HALF, max_steps=1)
    ours.train()
    assert compiled_plans(ours.model)
    assert math.isfinite(ours.evaluate()["eval_loss"])


def test_the_mixin_comes_first() -> None:
    class Own(Trainer):
        pass

    class First(MPCompileMixin, Own):
        pass

    class Cooperating(Own, MPCompileTrainer):
        pass

    for cls in (First, Cooperating):
        assert cls._save_scaler is MPCompileMixin._save_scaler
    with pytest.raises(MPCompileError, match=r"Last.*mixin first"):

        class Last(Own, MPCompileMixin):
            pass


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"mixed": "O2"}, "mpcompile='O2'"),
        ({"compile_optimizers": "no"}, "compile_optimizers='no'"),
        ({"mixed": HALF, "bf16": True}, "mixed_precision='bf16'.* name one"),
        ({"torch_compile": True}, "torch_compile"),
        ({"bf16_full_eval": True}, "bf16_full_eval"),
    ],
)
def test_a_bad_argument_is_refused_at_once(
    told: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(MPCompileError, match=message):
        trainer(tmp_path, **told)


def test_data_parallel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    with pytest.raises(MPCompileError, match="torchrun --nproc_per_node=2"):
        trainer(tmp_path)
