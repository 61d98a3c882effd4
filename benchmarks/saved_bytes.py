"""Bytes kept between forward and backward, counted in the programs that torch.compile parts.

Every arm goes the way it goes in training: Dynamo, AOTAutograd, Inductor's passes on the joint
graph and its min-cut partitioner. Only code generation is left out: in its place stands a function
that reads from the partitioned forward what it hands to the backward. So a model of any size is
counted in seconds; its parameters are memory that nothing touches, its activations are never
allocated.

What is counted: see `mpcompile/planner/partitioned.py`. A model in half precision has its low
weights as parameters, which exist anyway. A copy of an input that the graph makes itself (a weight
cast to the low dtype) does count, and has a column of its own.

Without a GPU, peers are traced on the CPU, and our passes plan as for a GPU that has a kernel for
everything: a CPU's plan is another one (its attention is written out, for one thing), made for the
CPU's speed. What remains different: padding, and whatever else needs a GPU to be asked.

For a GPT small enough to run, the same arms run op by op as well, and saved-tensor hooks say what
autograd really holds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._functorch import config as functorch
from torch._inductor import compile_fx

from benchmarks import models
from benchmarks.harness.report import Claims, Report, Settings, Table
from mpcompile import MPOptimizer, mpcompile
from mpcompile.capture.pipeline import Planned
from mpcompile.compiler import backend
from mpcompile.compiler.plan_graph import Facts, plan_graph
from mpcompile.demo.gpt import GPT, GPTConfig
from mpcompile.demo.train import bytes_saved_for_backward
from mpcompile.devices.cpu import CPU
from mpcompile.planner.partitioned import Saved, saved_by
from mpcompile.scaling import copies
from mpcompile.settings import Settings as CompileSettings
from mpcompile.verify import first_call

LOW = torch.bfloat16


def run(settings: Settings) -> Report:
    """Count everything; under `settings.quick` tiny models."""
    device = settings.device
    work = TINY if settings.quick else Work()
    saved, held = count_all(work, device)
    return Report(
        title="Bytes saved for backward",
        notes=_notes(device),
        tables=[
            _table(name, found, held if name == work.small.name else None)
            for name, found in saved.items()
        ],
        verdicts=dict(_verdicts(work, saved, held)),
        data={
            "bytes": {
                name: {way: totals(found) for way, found in ways.items()}
                for name, ways in saved.items()
            },
            "held_by_autograd": held,
        },
    )


# -- count -----------------------------------------------------------------------------------------
# What partitioned programs save, and what autograd's hooks see.


def count_all(
    work: Work, device: torch.device
) -> tuple[dict[str, dict[str, list[Saved]]], dict[str, int]]:
    """Count each model under each way, then run the GPT that is small enough.

    Returns:
        Model -> way -> what the forward saves; the small model that runs comes last. And way ->
        bytes that autograd holds, of the small model.
    """
    saved = {
        case.name: {way.name: count(case, way, device) for way in case.ways} for case in work.cases
    }
    held = {}
    small = saved[work.small.name] = {}
    for way in WAYS:
        small[way.name], held[way.name] = count_and_hold(work.small, way, device)
    return saved, held


class _NotRun(Exception):
    """The program was counted; running it was not asked for."""


def count(case: Case, way: Way, device: torch.device) -> list[Saved]:
    """What the partitioned forward of this model saves; the program is compiled but never run."""
    with torch.device("meta"):
        model = case.build()
    model = model.to_empty(device=device)
    found: list[Saved] = []
    with (
        planned_for_gpu() if device.type == "cpu" else contextlib.nullcontext(),
        prepared(model, way, found, runs=False) as dtype,
        contextlib.suppress(_NotRun),
    ):
        _loss(model, way, case.sample.empty(device, dtype))
    if not found:
        raise RuntimeError(f"{case.name}, {way.name}: no forward was partitioned")
    return found


def count_and_hold(case: Case, way: Way, device: torch.device) -> tuple[list[Saved], int]:
    """The same, and the bytes that saved-tensor hooks see when the program runs, op by op."""
    torch.manual_seed(0)
    model = case.build().to(device)
    batch = case.sample.draw(device)
    found: list[Saved] = []
    with prepared(model, way, found, runs=True):
        _loss(model, way, batch)  # compiles, and makes the working copies
        low = [c.tensor for p in model.parameters() for c in copies.copies_of(p).values()]
        exist_anyway = {tensor.untyped_storage().data_ptr() for tensor in (*batch, *low)}
        with bytes_saved_for_backward(model) as held:
            _loss(model, way, batch)
    return found, sum(size for address, size in held.items() if address not in exist_anyway)


@contextlib.contextmanager
def planned_for_gpu() -> Iterator[None]:
    """Our passes take the tensors, wherever they are, for a GPU's."""

    def planned(
        gm: fx.GraphModule, inputs: Any, facts: Facts, settings: CompileSettings
    ) -> Planned:
        gpu = dataclasses.replace(
            facts.target, device=torch.device("cuda"), profile=None, has_kernel=lambda node: True
        )
        return plan_graph(gm, inputs, dataclasses.replace(facts, target=gpu), settings)

    with (
        mock.patch.object(backend, "plan_graph", planned),
        mock.patch.object(CPU, "recomputes", False),
    ):
        yield


def _loss(model: nn.Module, way: Way, batch: Sequence[Tensor]) -> Tensor:
    kind = batch[0].device.type
    with torch.autocast(kind, LOW) if way.autocast else contextlib.nullcontext():
        loss: Tensor = model(*batch)
    return loss


@contextlib.contextmanager
def prepared(
    model: nn.Module, way: Way, found: list[Saved], *, runs: bool
) -> Iterator[torch.dtype]:
    """Compile the model for a call inside; yields the dtype that its FP32 inputs should have."""
    optimizer = None  # alive until the model was called
    if way.level:
        smaller = {"fuse_head": way.fused, "recompute": way.recompute}
        mpcompile(
            model, dtype=LOW, level=way.level, strict=True, verify=False, **smaller
        )  # nothing is run, so there is nothing to verify
        if way.stepped:
            optimizer = MPOptimizer(torch.optim.AdamW(model.parameters()))
    else:
        model.to(LOW) if way.half else model
        model.compile()
    torch._dynamo.reset()
    # Inductor as it is, from its passes on the joint graph to the point where it makes code.
    counting = functools.partial(compile_fx.compile_fx, inner_compile=_counter(found, runs))
    partitioner: dict[str, Any] = {"activation_memory_budget": way.budget}
    if way.recompute and not way.level:
        partitioner["ban_recompute_materialized_backward"] = False
    with (
        mock.patch.object(compile_fx, "compile_fx", counting),
        mock.patch.object(first_call, "compile_fx", counting),
        functorch.patch(enable_autograd_cache=False, **partitioner),
    ):
        yield LOW if way.half else torch.float32
    del optimizer
    torch._dynamo.reset()


def _counter(found: list[Saved], runs: bool) -> Callable[..., Any]:
    """In place of Inductor's code generation."""

    def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        if not (kwargs.get("is_backward") or kwargs.get("is_inference")):
            found.extend(saved_by(gm))

        def call(args: list[Any]) -> Any:
            if not runs:
                raise _NotRun
            inputs = list(args)
            args.clear()
            return gm(*inputs)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    return compile_graph


# -- cases -----------------------------------------------------------------------------------------
# What is counted: the ways to train, the models and their batches.

BUDGET = 0.5
"""The partitioner's activation_memory_budget in the arms that have one."""


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to train a model.

    Attributes:
        level: mpcompile's; "": a peer.
        autocast, half: what the peer does.
        stepped: an `MPOptimizer` holds the parameters, so the model reads its low copies.
        fused: with the head and its loss fused.
        recompute: `recompute=True`; a peer gets the setting of torch's that it stands for.
        budget: the partitioner's activation_memory_budget; 1: it minimises bytes at no recompute
            of products.
    """

    name: str
    level: str = ""
    autocast: bool = False
    half: bool = False
    stepped: bool = False
    fused: bool = False
    recompute: bool = False
    budget: float = 1.0

    def at(self, budget: float) -> Way:
        return dataclasses.replace(self, name=f"{self.name}, budget {budget:g}", budget=budget)


FP32 = Way("compile FP32")
AUTOCAST = Way("compile + autocast", autocast=True)
HALF = Way("pure half", half=True)
O1 = Way("mpcompile O1", level="O1")
O2 = Way("mpcompile O2", level="O2")
STEPPED = Way("mpcompile O2, MPOptimizer", level="O2", stepped=True)
PEER_RECOMPUTES = dataclasses.replace(AUTOCAST, name=f"{AUTOCAST.name}, recompute", recompute=True)
RECOMPUTES = dataclasses.replace(STEPPED, name=f"{STEPPED.name}, recompute", recompute=True)
FUSED = dataclasses.replace(STEPPED, name=f"{STEPPED.name}, fused head", fused=True)
LEAST = dataclasses.replace(FUSED, name=f"{FUSED.name}, recompute", recompute=True)

WAYS = (FP32, AUTOCAST, PEER_RECOMPUTES, HALF, O1, O2, STEPPED, RECOMPUTES)
WITH_HEAD = (FUSED, LEAST)
BUDGETED = (AUTOCAST, PEER_RECOMPUTES, HALF, STEPPED, *WITH_HEAD)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its batch.

    Attributes:
        head: a large head and its loss: the arms that fuse them, and those under a budget.
    """

    name: str
    build: Callable[[], nn.Module]
    sample: models.Sample
    head: bool = False

    @property
    def ways(self) -> tuple[Way, ...]:
        if not self.head:
            return WAYS
        return (*WAYS, *WITH_HEAD, *(way.at(BUDGET) for way in BUDGETED))


# Without dropout, whose masks would be a byte for each element. (And a CPU has no fused kernel for
# attention with dropout.)
CASES = (
    Case("GPT-2 124M, B16 T1024", models.GPT2,
         models.tokens(16, 1024, 50257, 50257), head=True),
    Case("BERT-large, B32 T512", models.BERTEncoder,
         models.tokens(32, 512, 30522, 2)),
    Case("ViT-B/16, B128", models.ViT, models.pixels(128)),
    Case("ResNet-50, B256", models.resnet50, models.pixels(256)),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Work:
    """What is counted: models too large to run here, and a GPT that runs."""

    cases: tuple[Case, ...] = CASES
    run: GPTConfig = GPTConfig(vocab=4099, context=128, width=256, layers=4, heads=4)
    batch: int = 8

    @property
    def small(self) -> Case:
        """The GPT that runs."""
        size = self.run
        return Case(
            f"GPT, B{self.batch} T{size.context} D{size.width} L{size.layers} V{size.vocab}",
            lambda: GPT(size),
            models.tokens(self.batch, size.context, size.vocab, size.vocab),
        )


TINY = Work(
    cases=(
        Case("GPT-2, tiny", functools.partial(models.GPT2, vocab=61, context=16, width=32, layers=1,
             heads=2), models.tokens(2, 16, 61, 61), head=True),
    ),
    run=GPTConfig(vocab=61, context=16, width=32, layers=1, heads=2),
    batch=2,
)  # fmt: skip


# -- report ----------------------------------------------------------------------------------------
# Totals beside those of pure half, and verdicts.

OVER_HALF = 1.02
FULL_SHARE = 0.01
FUSED_OVER_AUTOCAST = 0.5


def _notes(device: torch.device) -> list[str]:
    return [
        "GB are 10^9 bytes. Counted in the forward that torch.compile's partitioner makes, before "
        "code generation: each tensor returned for the backward's sake, once for each storage; "
        "inputs of the graph (parameters, buffers, the batch, an MPOptimizer's low copies) do not "
        "count. Copies of inputs, such as a weight cast to the low dtype, are part of the total. "
        "The low dtype is BF16; pure half is the model and its images in it, compiled.",
        f"Traced on {device.type}"
        + (", with mpcompile's passes told that it is a GPU." if device.type == "cpu" else ".")
        + " No dropout, whose masks every arm would keep. Budget: the partitioner's "
        "activation_memory_budget. Recompute: `recompute=True`, and for the peer the setting of "
        "torch's own partitioner that it stands for (ban_recompute_materialized_backward=False).",
        "The last model is planned for the device that it runs on, op by op: `held` is what "
        "saved-tensor hooks see.",
    ]


def _table(name: str, found: dict[str, list[Saved]], held: dict[str, int] | None) -> Table:
    sums = {way: totals(saved) for way, saved in found.items()}
    unit, label = (1e9, "GB") if max(t["all"] for t in sums.values()) > 1e8 else (1e6, "MB")

    def row(way: str) -> tuple[str, ...]:
        total = sums[way]
        budget = way.partition(", budget")[1:] if ", budget" in way else ("", "")
        against = (base.name + "".join(budget) for base in (HALF, AUTOCAST))
        return (
            way,
            f"{total['all'] / unit:.3f}",
            f"{total['fp32'] / unit:.3f}",
            f"{total['fp32'] / total['all']:.1%}",
            f"{total['copies'] / unit:.3f}",
            *(f"{total['all'] / sums[base]['all']:.3f}x" for base in against),
            *([f"{held[way] / unit:.3f}"] if held else []),
        )

    columns = ["", f"saved, {label}", f"of it FP32, {label}", "share", f"copies of inputs, {label}",
               "over pure half", "over autocast"]  # fmt: skip
    return Table(name, (*columns, *(["held, " + label] if held else [])), [*map(row, sums)])


def _verdicts(work: Work, saved: dict[str, dict[str, list[Saved]]], held: dict[str, int]) -> Claims:
    for name, found in saved.items():
        ours, half = (totals(found[way.name]) for way in (STEPPED, HALF))
        over = ours["all"] / half["all"]
        yield f"{name}: O2 saves at most {OVER_HALF}x pure half: {over:.3f}x", over <= OVER_HALF
        share = ours["fp32"] / ours["all"]
        yield f"{name}: FP32 under {FULL_SHARE:.0%} of O2's bytes: {share:.1%}", share < FULL_SHARE
    for case in work.cases:
        for way in (w for w in WITH_HEAD if case.head):
            found = saved[case.name]
            ours, theirs = (totals(found[w.at(BUDGET).name]) for w in (way, AUTOCAST))
            over = ours["all"] / theirs["all"]
            claim = f"{case.name}: {way.name} at most {FUSED_OVER_AUTOCAST}x autocast, both at"
            yield f"{claim} budget {BUDGET:g}: {over:.3f}x", over <= FUSED_OVER_AUTOCAST
    small = saved[work.small.name]
    apart = max(abs(held[way] / totals(one)["all"] - 1) for way, one in small.items())
    yield f"counted and held bytes agree within 1%: {apart:.2%}", apart < 0.01


def totals(saved: Sequence[Saved]) -> dict[str, int]:
    """Bytes: all, those in FP32, those of copies of inputs."""
    return {
        "all": sum(s.bytes for s in saved),
        "fp32": sum(s.bytes for s in saved if s.dtype is torch.float32),
        "copies": sum(s.bytes for s in saved if s.copied),
    }
