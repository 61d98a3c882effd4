"""Planning time: what our passes take of the cold compile of a deep transformer.

A 24-layer GPT in BF16, forward and backward by Inductor with empty caches. `plan` is the pass that
makes the minimum cut; the others capture, classify, rewrite and check.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch._inductor.utils import fresh_cache

from benchmarks.harness.report import Report, Settings, Table, plain
from benchmarks.harness.timing import idle_wait, seconds_of
from mpcompile import compiled_plans, mpcompile
from mpcompile.demo.gpt import GPT, GPTConfig

LEVELS = ("O1", "O2")
SHARE = 0.05


@dataclasses.dataclass(frozen=True)
class Work:
    """What is compiled."""

    model: GPTConfig = GPTConfig(vocab=512, context=64, width=64, layers=24, heads=2)
    emit: str = "inductor"


TINY = Work(GPTConfig(vocab=61, context=16, width=32, layers=1, heads=2), emit="eager")


def run(settings: Settings) -> Report:
    """Compile once at each level; under `settings.quick` a tiny model, without Inductor."""
    work = TINY if settings.quick else Work()
    found = {level: _compile(work, level, settings.device) for level in LEVELS}
    return Report(
        title="What planning takes of a cold compile",
        notes=[
            f"A GPT of {work.model.layers} layers, width {work.model.width}, in BF16; seconds from "
            "the first call to the end of its backward, caches empty. One run for each level."
        ],
        tables=[_table(found)],
        verdicts={
            f"{level}: plan takes at most {SHARE:.0%} of the cold compile: "
            f"{one['plan'] / one['cold']:.2%}": one["plan"] <= SHARE * one["cold"]
            for level, one in found.items()
        },
        data={"work": plain(work), "seconds": found},
    )


def _compile(work: Work, level: str, device: torch.device) -> dict[str, float]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = GPT(work.model).to(device)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "level": level, "emit": work.emit}
    mpcompile(model, strict=True, **options)
    tokens = torch.randint(work.model.vocab, (2, work.model.context)).to(device)
    with fresh_cache():
        cold = seconds_of(lambda: model(tokens, tokens).backward(), idle_wait(device))
    (plan,) = compiled_plans(model)
    capture, spent = plan.seconds["capture"], sum(plan.seconds.values())
    return {
        "capture": capture, "passes": spent - capture, "plan": plan.seconds["plan"], "cold": cold
    }  # fmt: skip


def _table(found: dict[str, dict[str, float]]) -> Table:
    columns = ("level", "capture, s", "all passes, s", "of them plan, s", "cold compile, s")
    rows = [
        (level, *(f"{one[key]:.2f}" for key in ("capture", "passes", "plan")), f"{one['cold']:.0f}")
        for level, one in found.items()
    ]
    return Table("Cold compile", columns, rows)
