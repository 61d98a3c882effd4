"""Bytes kept between forward and backward, counted in the programs that torch.compile parts.

Every arm goes the way it goes in training: Dynamo, AOTAutograd, Inductor's passes on the joint
graph and its min-cut partitioner. Only code generation is left out: in its place stands a function
that reads from the partitioned forward what it hands to the backward. So a model of any size is
counted in seconds; its parameters are memory that nothing touches, its activations are never
allocated.

What is counted: see `mpcompile/inspect/saved_bytes.py`. A model in half precision has its low
weights as parameters, which exist anyway. A copy of an input that the graph makes itself (a weight
cast to the low dtype) does count, and has a column of its own.

Without a GPU, peers are traced on the CPU, and our passes plan as for a GPU that has a kernel for
everything: a CPU's plan is another one (its attention is written out, for one thing), made for the
CPU's speed. What remains different: padding, and whatever else needs a GPU to be asked.

For a GPT small enough to run, the same arms run op by op as well, and saved-tensor hooks say what
autograd really holds.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

if __package__ in (None, ""):  # started as a file: `python benchmarks/saved_bytes.py`
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor, fx, nn
from torch._functorch import config as functorch
from torch._inductor import compile_fx

from benchmarks.harness import Report, Settings, Table, environment
from benchmarks.models import GPT2, BERTEncoder, Sample, ViT, resnet50
from mpcompile import MPOptimizer, backend, mpcompile
from mpcompile.demo.model import GPT, GPTConfig
from mpcompile.inspect.saved_bytes import Saved, counter
from mpcompile.state import copies

LOW = torch.bfloat16
OVER_HALF = 1.02
FULL_SHARE = 0.01
FUSED_OVER_AUTOCAST = 0.5
BUDGET = 0.5
LISTED = 0.002
SHOWN = 4


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
    sample: Sample
    head: bool = False

    @property
    def ways(self) -> tuple[Way, ...]:
        if not self.head:
            return WAYS
        return (*WAYS, *WITH_HEAD, *(way.at(BUDGET) for way in BUDGETED))


def _tokens(batch: int, length: int, vocab: int, classes: int) -> Sample:
    return Sample((batch, length), (batch, length), classes, vocab)


def _images(batch: int, size: int = 224, classes: int = 1000) -> Sample:
    return Sample((batch, 3, size, size), (batch,), classes)


# No dropout: every arm would keep the same masks, a byte for each element. (And a CPU has no fused
# kernel for attention with dropout.)
STILL: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0}
CASES = (
    Case("GPT-2 124M, B16 T1024", functools.partial(GPT2, **STILL),
         _tokens(16, 1024, 50257, 50257), head=True),
    Case("BERT-large, B32 T512", functools.partial(BERTEncoder, **STILL),
         _tokens(32, 512, 30522, 2)),
    Case("ViT-B/16, B128", ViT, _images(128)),
    Case("ResNet-50, B256", resnet50, _images(256)),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Work:
    """What is counted: models too large to run here, and a GPT that runs."""

    cases: tuple[Case, ...] = CASES
    run: GPTConfig = GPTConfig(vocab=4099, context=128, width=256, layers=4, heads=4)
    batch: int = 8


TINY = Work(
    cases=(
        Case("GPT-2, tiny", functools.partial(GPT2, vocab=61, context=16, width=32, layers=1,
             heads=2, **STILL), _tokens(2, 16, 61, 61), head=True),
    ),
    run=GPTConfig(vocab=61, context=16, width=32, layers=1, heads=2),
    batch=2,
)  # fmt: skip


def run(settings: Settings) -> Report:
    """Count everything; under `settings.quick` tiny models."""
    return measure(TINY if settings.quick else Work(), settings.device)


def measure(work: Work, device: torch.device) -> Report:
    """Count each model under each way, then run the GPT that is small enough."""
    record = environment(device)
    counted = {
        case.name: {way.name: count(case, way, device) for way in case.ways} for case in work.cases
    }
    size = work.run
    small = Case(
        f"GPT, B{work.batch} T{size.context} D{size.width} L{size.layers} V{size.vocab}",
        lambda: GPT(size),
        _tokens(work.batch, size.context, size.vocab, size.vocab),
    )
    held: dict[str, int] = {}
    counted[small.name] = {}
    for way in WAYS:
        counted[small.name][way.name], held[way.name] = count_and_hold(small, way, device)
    tables = [_table(name, found, held if name == small.name else None)
              for name, found in counted.items()]  # fmt: skip
    lists = [t for name, found in counted.items() for t in _lists(name, found)]
    return Report(
        name=f"saved_bytes_{device.type}",
        title="Bytes saved for backward",
        notes=_notes(work, device),
        tables=[*tables, *lists],
        verdicts=_verdicts(work, counted, counted[small.name], held),
        data={
            "bytes": {
                name: {way: _totals(saved) for way, saved in found.items()}
                for name, found in counted.items()
            },
            "held_by_autograd": held,
            "saved": {
                name: {
                    way: [dataclasses.asdict(g) for g in groups(saved)]
                    for way, saved in found.items()
                }
                for name, found in counted.items()
            },
        },
        environment=record,
    )


# -- counting -------------------------------------------------------------------------------------


class _Counted(Exception):
    """The program was counted; running it was not asked for."""


def count(case: Case, way: Way, device: torch.device) -> list[Saved]:
    """What the partitioned forward of this model saves; the program is compiled but never run."""
    with torch.device("meta"):
        model = case.build()
    model = model.to_empty(device=device)
    found: list[Saved] = []
    with (
        _planned_for_gpu() if device.type == "cpu" else contextlib.nullcontext(),
        _prepared(model, way, found, runs=False) as dtype,
        contextlib.suppress(_Counted),
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
    held: dict[int, int] = {}
    alive: list[Tensor] = []  # so that no address is used twice

    with _prepared(model, way, found, runs=True):
        _loss(model, way, batch)  # compiles, and makes the working copies
        low = [c.tensor for p in model.parameters() for c in copies.copies_of(p).values()]
        inputs = (*model.parameters(), *model.buffers(), *batch, *low)
        resident = {t.untyped_storage().data_ptr() for t in inputs}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in resident:
                held[storage.data_ptr()] = storage.nbytes()
                alive.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            _loss(model, way, batch)
    return found, sum(held.values())


def _planned_for_gpu() -> contextlib.AbstractContextManager[Any]:
    """Our passes take the tensors, wherever they are, for a GPU's."""
    gpu = torch.device("cuda")
    return backend.adjusted(
        lambda config: dataclasses.replace(
            config, device=gpu, profile=None, has_kernel=lambda node: True
        )
    )


def _loss(model: nn.Module, way: Way, batch: Sequence[Tensor]) -> Tensor:
    device = batch[0].device.type
    with torch.autocast(device, LOW) if way.autocast else contextlib.nullcontext():
        loss: Tensor = model(*batch)
    return loss


@contextlib.contextmanager
def _prepared(
    model: nn.Module, way: Way, found: list[Saved], *, runs: bool
) -> Iterator[torch.dtype]:
    """Compile the model for a call inside; yields the dtype that its FP32 inputs should have."""
    optimizer = None  # alive until the model was called
    if way.level:
        smaller = {"fuse_head": way.fused, "recompute": way.recompute}
        mpcompile(model, dtype=LOW, level=way.level, strict=True, **smaller)
        if way.stepped:
            optimizer = MPOptimizer(torch.optim.AdamW(model.parameters()))
    else:
        model.to(LOW) if way.half else model
        model.compile()
    torch._dynamo.reset()
    # Inductor as it is, from its passes on the joint graph to the point where it makes code.
    counting = functools.partial(compile_fx.compile_fx, inner_compile=_counter(found, runs))
    partitioner = {"activation_memory_budget": way.budget}
    if way.recompute and not way.level:
        partitioner["ban_recompute_materialized_backward"] = False
    with (
        mock.patch.object(compile_fx, "compile_fx", counting),
        functorch.patch(enable_autograd_cache=False, **partitioner),
    ):
        yield LOW if way.half else torch.float32
    del optimizer
    torch._dynamo.reset()


def _counter(found: list[Saved], runs: bool) -> Callable[..., Any]:
    """In place of Inductor's code generation."""
    count = counter(found)

    def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        counted = count(gm, example_inputs, **kwargs)

        def call(args: list[Any]) -> Any:
            raise _Counted

        call._boxed_call = True  # type: ignore[attr-defined]
        return counted if runs else call

    return compile_graph


# -- sums -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Group:
    """Saved tensors that are alike."""

    count: int
    op: str
    module: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    copied: bool


def groups(saved: Sequence[Saved]) -> list[Group]:
    """By operator, module, shape and dtype, the largest first."""
    found = [
        Group(number, one.op, one.module, one.shape, _short(one.dtype), number * one.bytes,
              one.copied)
        for one, number in collections.Counter(saved).items()
    ]  # fmt: skip
    return sorted(found, key=lambda group: -group.bytes)


def _short(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return re.sub(r"^(bfloat|float|uint|int)", lambda m: m[0].replace("loat", ""), name)


def _place(group: Group) -> str:
    return f"{group.count} {group.op}" + (f" in {group.module}" if group.module else "")


def _totals(saved: Sequence[Saved]) -> dict[str, int]:
    return {
        "all": sum(s.bytes for s in saved),
        "fp32": sum(s.bytes for s in saved if s.dtype is torch.float32),
        "copies": sum(s.bytes for s in saved if s.copied),
    }


def excess(ours: Sequence[Saved], theirs: Sequence[Saved]) -> list[tuple[Group, int, int]]:
    """Where two programs differ, copies of inputs aside: one of the tensors (its `op` names
    several), and how many more of its size and dtype the first saves, in number and in bytes; the
    largest difference first.
    """

    def alike(one: Saved) -> tuple[int, torch.dtype]:
        return (one.bytes, one.dtype)

    mine, others = (
        collections.Counter(alike(one) for one in side if not one.copied) for side in (ours, theirs)
    )
    found = []
    for key in mine.keys() | others.keys():
        more = mine[key] - others[key]
        if more:
            side = ours if more > 0 else theirs
            example = groups([one for one in side if alike(one) == key and not one.copied])
            group = dataclasses.replace(example[0], op=", ".join(map(_place, example[:SHOWN])))
            found.append((group, more, more * key[0]))
    return sorted(found, key=lambda entry: -abs(entry[2]))


# -- tables ---------------------------------------------------------------------------------------


def _notes(work: Work, device: torch.device) -> list[str]:
    del work
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
        f"The lists name what one arm saves and pure half does not (and with a minus the reverse), "
        f"matched by size and dtype, and what O2 saves in FP32, down to {LISTED:.1%} of the total.",
    ]


def _table(name: str, found: dict[str, list[Saved]], held: dict[str, int] | None) -> Table:
    totals = {way: _totals(saved) for way, saved in found.items()}
    unit, label = (1e9, "GB") if max(t["all"] for t in totals.values()) > 1e8 else (1e6, "MB")

    def row(way: str) -> tuple[str, ...]:
        total = totals[way]
        budget = way.partition(", budget")[1:] if ", budget" in way else ("", "")
        against = (base.name + "".join(budget) for base in (HALF, AUTOCAST))
        return (
            way,
            f"{total['all'] / unit:.3f}",
            f"{total['fp32'] / unit:.3f}",
            f"{total['fp32'] / total['all']:.1%}",
            f"{total['copies'] / unit:.3f}",
            *(f"{total['all'] / totals[base]['all']:.3f}x" for base in against),
            *([f"{held[way] / unit:.3f}"] if held else []),
        )

    columns = ["", f"saved, {label}", f"of it FP32, {label}", "share", f"copies of inputs, {label}",
               "over pure half", "over autocast"]  # fmt: skip
    return Table(name, (*columns, *(["held, " + label] if held else [])), [*map(row, totals)])


def _lists(name: str, found: dict[str, list[Saved]]) -> Iterator[Table]:
    columns = ("computed by", "tensors", "shape", "dtype", "MB")
    for way in (O1, O2, STEPPED, *WITH_HEAD):
        if way.name not in found:
            continue
        least = LISTED * _totals(found[way.name])["all"]
        rows = [
            (group.op, f"{more:+d}", str(list(group.shape)), group.dtype, f"{bytes_ / 1e6:+.1f}")
            for group, more, bytes_ in excess(found[way.name], found[HALF.name])
            if abs(bytes_) >= least
        ]
        if rows:
            yield Table(f"{name}: {way.name} beyond pure half", columns, rows)
    full = [s for s in found[STEPPED.name] if s.dtype is torch.float32]
    rows = [
        (_place(g), str(g.count), str(list(g.shape)), g.dtype,
         f"{g.bytes / 1e6:.1f}")
        for g in groups(full) if g.bytes >= LISTED * _totals(found[STEPPED.name])["all"]
    ]  # fmt: skip
    if rows:
        yield Table(f"{name}: FP32 in {STEPPED.name}", columns, rows)


def _verdicts(
    work: Work,
    counted: dict[str, dict[str, list[Saved]]],
    small: dict[str, list[Saved]],
    held: dict[str, int],
) -> dict[str, bool]:
    verdicts = {}
    for name, found in counted.items():
        ours, half = (_totals(found[way.name]) for way in (STEPPED, HALF))
        over = ours["all"] / half["all"]
        verdicts[f"{name}: O2 saves at most {OVER_HALF}x pure half: {over:.3f}x"] = (
            over <= OVER_HALF
        )
        share = ours["fp32"] / ours["all"]
        verdicts[f"{name}: FP32 under {FULL_SHARE:.0%} of O2's bytes: {share:.1%}"] = (
            share < FULL_SHARE
        )
    for case in work.cases:
        for way in (w for w in WITH_HEAD if case.head):
            found = counted[case.name]
            ours, theirs = (_totals(found[w.at(BUDGET).name]) for w in (way, AUTOCAST))
            over = ours["all"] / theirs["all"]
            claim = f"{case.name}: {way.name} at most {FUSED_OVER_AUTOCAST}x autocast, both at"
            verdicts[f"{claim} budget {BUDGET:g}: {over:.3f}x"] = over <= FUSED_OVER_AUTOCAST
    apart = max(abs(held[way] / _totals(saved)["all"] - 1) for way, saved in small.items())
    verdicts[f"counted and held bytes agree within 1%: {apart:.2%}"] = apart < 0.01
    return verdicts


if __name__ == "__main__":
    from benchmarks.__main__ import main

    sys.exit(main(["run", "saved_bytes", *sys.argv[1:]]))
