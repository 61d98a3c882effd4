"""Models in evaluation: a whole generation of text, and forwards of one sample and of eight.

No gradients, `model.eval()`. The peers are plain PyTorch in FP32, and `torch.compile` in FP32 and
under autocast; ours is O1. Generation is greedy, by `generate()` of transformers with its growing
cache, compiled for sizes that change; its time is that of all tokens and of the prompt.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import timing
from benchmarks.harness.report import Report, Settings, Table, paragraphs, plain, where
from benchmarks.real_models import of_timm, of_transformers
from mpcompile import mpcompile

DEVICES = ("cpu",)
NEEDS = ("timm", "transformers")

EAGER, COMPILED, AUTOCAST, OURS = "eager FP32", "compile FP32", "compile + autocast", "mpcompile O1"
ARMS = (EAGER, COMPILED, AUTOCAST, OURS)


@dataclasses.dataclass(frozen=True)
class Served:
    """A model, and what is asked of it.

    Attributes:
        ask: of the model and the sample.
        dynamic: whether sizes change from call to call.
    """

    name: str
    build: Callable[[], nn.Module]
    draw: Callable[[], Tensor]
    ask: Callable[[nn.Module, Tensor], object]
    dynamic: bool = False


@dataclasses.dataclass(frozen=True)
class Work:
    models: Sequence[Served]
    rounds: int
    emit: str = "inductor"


def _generation(batch: int, prompt: int, new: int, **sizes: int) -> Served:
    """GPT-2 124M, but for the sizes that are given."""

    def ask(model: Any, tokens: Tensor) -> object:
        return model.generate(
            tokens, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
        )

    build = functools.partial(of_transformers, "GPT2LMHeadModel", "GPT2Config", **sizes)
    draw = functools.partial(torch.randint, sizes.get("vocab_size", 50257), (batch, prompt))
    return Served(f"GPT-2, B{batch}, {prompt} + {new} tokens", build, draw, ask, dynamic=True)


def _bert(batch: int) -> Served:
    build = functools.partial(of_transformers, "BertForSequenceClassification", "BertConfig")
    draw = functools.partial(torch.randint, 30522, (batch, 128))
    return Served(f"BERT-base, B{batch} T128", build, draw, lambda model, x: model(x).logits)


def _image(name: str, model: str, batch: int, size: int) -> Served:
    build = functools.partial(of_timm, model)
    draw = functools.partial(torch.randn, batch, 3, size, size)
    return Served(f"{name}, B{batch}, {size} px", build, draw, lambda model, x: model(x))


WORK = Work(
    (
        _generation(1, 32, 20),
        *(_bert(batch) for batch in (1, 8)),
        *(_image("ResNet-50", "resnet50", batch, 224) for batch in (1, 8)),
        *(_image("ViT-S/16", "vit_small_patch16_224", batch, 224) for batch in (1, 8)),
    ),
    rounds=15,
)
TINY = Work(
    (_generation(1, 4, 3, n_layer=1, n_embd=16, n_head=2, vocab_size=31, n_positions=16),),
    rounds=2, emit="eager",
)  # fmt: skip


def run(settings: Settings) -> Report:
    """Time each model; under `settings.quick` a tiny one, without Inductor."""
    device, work = settings.device, TINY if settings.quick else WORK
    samples = {served.name: _timed(served, work, device) for served in work.models}
    columns = ("model", *ARMS)
    times = [
        (name, *(timing.summarize(arms[a]).text() for a in ARMS)) for name, arms in samples.items()
    ]
    ratios = {
        name: {peer: timing.ratio(arms[peer], arms[OURS]) for peer in ARMS[:-1]}
        for name, arms in samples.items()
    }
    over = [(name, *map(str, found.values())) for name, found in ratios.items()]
    return Report(
        title=f"Models in evaluation, on {where(device)}",
        notes=[*paragraphs(__doc__), timing.how_compared(work.rounds)],
        tables=[
            Table("mpcompile O1: how many times as fast as", columns[:-1], over),
            Table("A call, ms", columns, times),
        ],
        verdicts={
            f"{name}: as fast as torch.compile in FP32, within this run's interval: {one}": (
                one.high >= 1
            )
            for name, found in ratios.items()
            for one in [found[COMPILED]]
        },
        data={"rounds": work.rounds, "seconds": samples, "ratios": plain(ratios)},
    )


def _timed(served: Served, work: Work, device: torch.device) -> dict[str, list[float]]:
    """Seconds per call of each arm, a sample a round."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    sample = served.draw().to(device)
    weights = served.build().state_dict()

    def made(name: str) -> nn.Module:
        model = served.build().to(device).eval()
        model.load_state_dict(weights)
        if name == OURS:
            dynamic = served.dynamic or None
            mpcompile(
                model, dtype=timing.auto_or(torch.bfloat16, device), emit=work.emit, dynamic=dynamic
            )
        elif name != EAGER:
            model.compile(backend=work.emit, dynamic=served.dynamic or None)
        return model

    def arm(name: str) -> timing.Arm:
        model = made(name)
        autocast = functools.partial(torch.autocast, device.type, torch.bfloat16)

        def step() -> None:
            with torch.no_grad(), autocast(enabled=name == AUTOCAST):
                served.ask(model, sample)

        return timing.Arm(name, step)

    arms = [arm(name) for name in ARMS]
    for one in arms:  # compile, for the first sizes and for those that come later
        for _ in range(3):
            one.step()
    return timing.take_turns(arms, rounds=work.rounds, steps=2, wait=timing.idle_wait(device))
