"""Models that people train: a whole training step against torch.compile and autocast.

One step is forward, loss, backward, AdamW and `zero_grad`. The peers are torch.compile in FP32 and
under autocast, with the fused AdamW, and with a GradScaler where the low dtype is FP16: on a CPU it
is BF16. O1 has the same fused AdamW, all others an `MPOptimizer`. On a CPU the models are those of
transformers, which compute their own loss, and of timm; on a GPU, where these may not be installed,
the same networks from plain torch.nn. The first step is the one that compiles; the first arm of a
model also fills Inductor's caches for the others.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness.report import Report, Settings, paragraphs, where
from benchmarks.harness.ways import AUTOCAST, COMPILED, OURS, Trainer
from benchmarks.models import GPT2, BERTEncoder, Sample, ViT, pixels, resnet50, tokens
from benchmarks.papers.task import Metrics, OneModel, Task
from benchmarks.peers import Work, make_report, measure_all, measure_some
from benchmarks.zoo.timm_models import timm

ARMS = (COMPILED, AUTOCAST, *OURS)


def run(settings: Settings) -> Report:
    """Measure each model; under `settings.quick` two tiny ones, twice, without compiling."""
    device = settings.device
    work = quick() if settings.quick else full(device)
    title = f"Models that people train, on {where(device)}"
    return make_report(title, work, measure_all(work, device), paragraphs(__doc__), asked=None)


def full(device: torch.device) -> Work:
    """All models of a device. What is measured is kept until all are."""
    names = tuple(task.name for task in BY_DEVICE[device.type])
    return Work(rounds=12, seconds=1.0, resumes=True, module=__name__, tasks=names, arms=ARMS)


def keep(kind: str, number: int) -> None:
    """Measure one model, to be taken up by the benchmark."""
    device = torch.device(kind)
    work = full(device)
    measure_some(dataclasses.replace(work, tasks=(work.tasks[number],)), device)


def quick() -> Work:
    """A smoke test."""
    names = tuple(task.name for task in TINY)
    return Work(
        "eager", rounds=2, seconds=0.0, processes=False, module=__name__, tasks=names, arms=ARMS
    )


# -- tasks -----------------------------------------------------------------------------------------
# The models, on a CPU as their libraries make them, each with one batch. All is drawn at random.
#
# Shapes: B examples, T tokens. Dropout is off: every arm would draw the same masks.

Batch = Mapping[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


class _Training(OneModel):
    """The step of a script that someone would write for the model: AdamW, one batch.

    Args:
        loss: of the model and a batch; it calls the model.
    """

    def __init__(
        self, trainer: Trainer, seed: int, build: Callable[[], nn.Module],
        draw: Callable[[], Batch], loss: Loss,
    ) -> None:  # fmt: skip
        self._drawn, self._of = draw, loss
        super().__init__(trainer, seed, build(), functools.partial(torch.optim.AdamW, lr=1e-4))

    def _draw(self, seed: int) -> Iterator[Sequence[Batch]]:
        batch = {name: x.to(self._device) for name, x in self._drawn().items()}
        return itertools.repeat((batch,))

    def _loss(self, batch: Batch) -> Tensor:
        return self._of(self._net, batch)

    def judge(self) -> Metrics:
        """Nothing is learned from one batch."""
        return {}


def _task(name: str, build: Callable[[], nn.Module], draw: Callable[[], Batch], loss: Loss) -> Task:
    return Task(
        name=name, claim="", data="random", metric="", higher=False, steps=1,
        start=lambda trainer, seed: _Training(trainer, seed, build, draw, loss),
    )  # fmt: skip


# -- language --------------------------------------------------------------------------------------


def of_transformers(model: str, config: str, **sizes: Any) -> nn.Module:
    import transformers

    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**sizes))
    return made.train()


def _own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The one that the library computes, inside of its model."""
    loss: Tensor = model(**batch).loss
    return loss


def _tokens(batch: int, length: int, vocab: int) -> Batch:
    tokens = torch.randint(vocab, (batch, length))
    return {"input_ids": tokens, "labels": tokens}


def _gpt2(batch: int, length: int, **sizes: Any) -> Task:
    settings = {
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False, **sizes,
    }  # fmt: skip
    build = functools.partial(of_transformers, "GPT2LMHeadModel", "GPT2Config", **settings)
    draw = functools.partial(_tokens, batch, length, sizes.get("vocab_size", 50257))
    return _task(f"GPT-2 124M, B{batch} T{length}", build, draw, _own_loss)


def _llama(batch: int, length: int, **sizes: Any) -> Task:
    """0.1B parameters: 12 layers of width 768, 12 heads, SwiGLU of 2048, 32000 tokens."""
    settings = {
        "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
        "num_attention_heads": 12, "vocab_size": 32000, "use_cache": False, **sizes,
    }  # fmt: skip
    build = functools.partial(of_transformers, "LlamaForCausalLM", "LlamaConfig", **settings)
    draw = functools.partial(_tokens, batch, length, settings["vocab_size"])
    return _task(f"Llama-like 0.1B, B{batch} T{length}", build, draw, _own_loss)


def _bert(name: str, batch: int, length: int, **sizes: Any) -> Task:
    settings = {
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 2, **sizes,
    }  # fmt: skip
    model = "BertForSequenceClassification"
    build = functools.partial(of_transformers, model, "BertConfig", **settings)

    def draw() -> Batch:
        tokens = torch.randint(sizes.get("vocab_size", 30522), (batch, length))
        return {"input_ids": tokens, "labels": torch.randint(2, (batch,))}

    return _task(f"{name}, B{batch} T{length}", build, draw, _own_loss)


# -- images ----------------------------------------------------------------------------------------


def _image_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["images"]), batch["labels"])


def of_timm(model: str, **sizes: Any) -> nn.Module:
    made: nn.Module = timm().create_model(model, **sizes)
    return made.train()


def _images(name: str, model: str, batch: int, size: int, **sizes: Any) -> Task:
    def draw() -> Batch:
        images = torch.randn(batch, 3, size, size)
        return {"images": images, "labels": torch.randint(1000, (batch,))}

    build = functools.partial(of_timm, model, **sizes)
    return _task(f"{name}, B{batch}, {size} px", build, draw, _image_loss)


# -- without their libraries -----------------------------------------------------------------------


def _by_itself(name: str, build: Callable[[], nn.Module], sample: Sample) -> Task:
    """The same network from plain torch.nn, whose call returns the loss."""

    def draw() -> Batch:
        x, wanted = sample.draw(torch.device("cpu"))
        return {"x": x, "targets": wanted}

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        found: Tensor = model(batch["x"], batch["targets"])
        return found

    return _task(name, build, draw, loss)


BY_DEVICE = {
    "cpu": (
        _gpt2(2, 256),
        _bert("BERT-base", 8, 128),
        _images("ResNet-50", "resnet50", 8, 160),
        _images("ViT-S/16", "vit_small_patch16_224", 8, 224),
        _llama(2, 256),
    ),
    # Those whose steps `gpu_traffic` counts. A machine with a GPU may lack transformers and timm.
    "cuda": (
        _by_itself("GPT-2 124M, B16 T1024", GPT2,
                   tokens(16, 1024, 50257, 50257)),
        _by_itself("BERT-large, B32 T512", BERTEncoder,
                   tokens(32, 512, 30522, 2)),
        _by_itself("ResNet-50, B256, 224 px", resnet50, pixels(256)),
        _by_itself("ViT-B/16, B128, 224 px", ViT, pixels(128)),
    ),
}  # fmt: skip
"""Device type -> what is timed there: what a step of some seconds, or of some 100 ms, holds."""

TINY = (
    _gpt2(1, 8, n_layer=1, n_embd=16, n_head=2, vocab_size=31, n_positions=8),
    _images("ResNet", "resnet18", 2, 32, num_classes=1000),
)
"""For a smoke test."""

TASKS: tuple[Task, ...] = (*BY_DEVICE["cpu"], *BY_DEVICE["cuda"], *TINY)
