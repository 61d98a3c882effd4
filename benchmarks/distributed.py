"""Collectives and bytes that a training step sends, counted on two CPU processes.

Each arm trains the same small GPT-2 on two processes that talk through gloo: under
DistributedDataParallel, and with `fully_shard` on each layer and on the model. The peer is
torch.compile with autocast and a GradScaler. Two more rows for each engine are the same without
torch.compile, and what a user of PyTorch would write to send FP16: a communication hook for DDP, a
`MixedPrecisionPolicy` for FSDP2. Ours is `mpcompile` around what
the engine made, at O1 and O2, with AdamW as it is or in an `MPOptimizer`; everything in FP16.

Whatever sends leaves an event in the profiler with its size and its dtype: DDP's reducer in C++,
FSDP, a norm over shards, and what we add (`sent_in`). An event that is
not understood is an error, and so are ranks or steps that differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import pickle
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness.report import Claims, Report, Settings, Table, paragraphs, plain
from benchmarks.harness.ways import AutocastTrainer, Trainer, Way
from benchmarks.models import GPT2, Sample, tokens

DEVICES = ("cpu",)  # two processes with one GPU each: more than a machine of ours has


def run(settings: Settings) -> Report:
    """Count every arm; under `settings.quick` a tiny model."""
    work = TINY if settings.quick else WORK
    found = measure_all(work, ARMS)
    return Report(
        title="What a training step sends",
        notes=[*paragraphs(__doc__), *_notes(work)],
        tables=[_table(engine, clips, found) for engine in (DDP, FSDP) for clips in (False, True)],
        verdicts=dict(verdicts(found)),
        data={"counted": plain(found)},
    )


# -- arms ------------------------------------------------------------------------------------------
# The trainings that are compared: an engine, and how its gradients become a step.

LOW = torch.float16
NORM = 1.0  # gradients are clipped to it
BUCKET = 1  # MB of DDP's buckets: the least that Dynamo's splits of a graph allow
DDP, FSDP = "DDP", "FSDP2"
EAGER = "autocast + GradScaler"
AUTOCAST = "compile + autocast + GradScaler"  # the peer
LOW_PEER = {
    DDP: "autocast + GradScaler, fp16_compress_hook",
    FSDP: "MixedPrecisionPolicy(FP16, FP16) + GradScaler",
}
OURS = {
    f"{level}{how}": (level, bool(how)) for level in ("O1", "O2") for how in ("", ", MPOptimizer")
}

Step = Callable[[Sequence[Tensor]], None]


@dataclasses.dataclass(frozen=True)
class Work:
    """What is trained.

    Attributes:
        warm: steps before the ones that are counted; in them DDP makes its buckets and the loss
            scale is found.
        steps: counted; each must send the same.
    """

    model: Callable[[], nn.Module]
    sample: Sample
    warm: int = 2
    steps: int = 2


@dataclasses.dataclass(frozen=True)
class Arm:
    """One training."""

    engine: str
    way: str
    clips: bool

    @property
    def name(self) -> str:
        return f"{self.engine}, {self.way}" + (", clipped" if self.clips else "")

    def start(self, work: Work) -> Step:
        """Make model and optimizer, the same on all ranks; return one step of training."""
        torch.manual_seed(0)
        trainer = _trainer(self.way)
        model = trainer.model(_distributed(self, work.model()))
        adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
        parameters = [*model.parameters()]
        optimizer = trainer.optimizer(adamw, parameters, NORM if self.clips else None)

        def step(batch: Sequence[Tensor]) -> None:
            with trainer.forward():
                loss = model(*batch)
            trainer.backward(loss)
            trainer.update(optimizer)

        return step


class _ByPolicy(AutocastTrainer):
    """FSDP2 casts what autocast would; the gradients have a GradScaler."""

    def forward(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()


def _trainer(way: str) -> Trainer:
    cpu = torch.device("cpu")
    if way in OURS:
        level, generated = OURS[way]
        return Trainer(Way(way, LOW, level, generated=generated), "eager", cpu)
    peer = Way(way, LOW, compiled=way == AUTOCAST)
    return (_ByPolicy if way == LOW_PEER[FSDP] else AutocastTrainer)(peer, "aot_eager", cpu)


def _distributed(arm: Arm, model: nn.Module) -> nn.Module:
    if arm.engine == DDP:
        wrapped = DistributedDataParallel(model, bucket_cap_mb=BUCKET)
        if arm.way == LOW_PEER[DDP]:
            wrapped.register_comm_hook(None, fp16_compress_hook)
        return wrapped
    low = arm.way == LOW_PEER[FSDP]
    policy = MixedPrecisionPolicy(LOW, LOW) if low else MixedPrecisionPolicy()
    layers: Any = model.layers
    for layer in layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


ARMS = tuple(
    Arm(engine, way, clips)
    for engine in (DDP, FSDP)
    for clips in (False, True)
    for way in (AUTOCAST, EAGER, LOW_PEER[engine], *OURS)
)

WORK = Work(
    functools.partial(GPT2, vocab=1024, context=16, width=128, layers=4, heads=4),
    tokens(1, 16, 1024, 1024),
)
TINY = Work(
    functools.partial(GPT2, vocab=64, context=8, width=32, layers=1, heads=2), tokens(2, 8, 64, 64)
)


# -- counting --------------------------------------------------------------------------------------
# What a process sends through gloo, counted from the profiler's events.
#
# Whatever sends something (DDP's reducer in C++, FSDP's all-gathers, DTensor's functional
# collectives, a user's own call) goes through an operator `c10d::...`, which names the
# collective, and makes gloo send, which leaves an event `gloo:...` with the size and the dtype.
# The profiler records both, on all threads, and changes nothing. If the two lists don't match, or
# hold something that has no line below, that is an error: nothing goes by uncounted.


@dataclasses.dataclass(frozen=True, order=True)
class Collective:
    """One collective.

    Attributes:
        kind: "all-reduce", "all-gather", "reduce-scatter", "broadcast" or "barrier".
        dtype: of what was sent, as in "FP16".
        bytes: that each rank sends where the ranks form a ring, as NCCL's do for large messages.
    """

    kind: str
    dtype: str
    bytes: float


# Operator -> what it is, gloo's name for what it does then, and how many times a rank sends the
# tensor that gloo's event shows, for n ranks in a ring. The tensor is the whole one, but a shard
# for an all-gather. (Read in torch 2.13: gloo has no reduce-scatter of its own.)
_Times = Callable[[int], float]
_KINDS: dict[str, tuple[str, str, _Times]] = {
    "c10d::allreduce_": ("all-reduce", "gloo:all_reduce", lambda n: 2 * (n - 1) / n),
    "c10d::allgather_": ("all-gather", "gloo:all_gather", lambda n: n - 1),
    "c10d::_allgather_base_": ("all-gather", "gloo:all_gather", lambda n: n - 1),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", "gloo:all_reduce", lambda n: (n - 1) / n),
    "c10d::broadcast_": ("broadcast", "gloo:broadcast", lambda n: 1),
    "c10d::barrier": ("barrier", "gloo:barrier", lambda n: 0),
}

_DTYPES = {
    "float": ("FP32", 4), "c10::Half": ("FP16", 2), "c10::BFloat16": ("BF16", 2),
    "double": ("FP64", 8), "int": ("int32", 4), "long int": ("int64", 8),
    "unsigned char": ("uint8", 1),
}  # fmt: skip


@contextlib.contextmanager
def sent_in(ranks: int) -> Iterator[list[Collective]]:
    """Everything that this process, one of `ranks`, sends inside, in the order in which it began;
    the list is filled at the end.

    Raises:
        RuntimeError: something was sent that is not understood.
    """
    sent: list[Collective] = []
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        yield sent
        # Gloo's thread ends its event after those that wait for it go on.
        time.sleep(0.2)
    assert profiler.profiler is not None
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda e: e.start_ns())
    asked = [e.name() for e in events if e.name().startswith("c10d::")]
    done = [e for e in events if e.name().startswith("gloo:")]
    names = [e.name() for e in done]
    if any(name not in _KINDS for name in asked) or [_KINDS[a][1] for a in asked] != names:
        raise RuntimeError(f"can't tell what was sent: asked for {asked}, gloo did {names}")
    sent.extend(_collective(a, event, ranks) for a, event in zip(asked, done, strict=True))


def _collective(operator: str, event: Any, ranks: int) -> Collective:
    kind, _, times = _KINDS[operator]
    if kind == "barrier":
        return Collective(kind, "", 0)
    dtype, size = _DTYPES[event.dtypes()[0]]
    return Collective(kind, dtype, times(ranks) * size * math.prod(event.shapes()[0]))


# -- measure ---------------------------------------------------------------------------------------
# Two processes that train every arm and count what they send.

RANKS = 2
_PATIENCE = timedelta(minutes=5)


@dataclasses.dataclass(frozen=True)
class Counted:
    """What one rank sends.

    Attributes:
        step: the collectives of one step, sorted: every counted step sent these.
        start: those of all steps before it, beyond what as many such steps send.
    """

    step: list[Collective]
    start: int

    @property
    def sent(self) -> float:
        """The bytes of one step."""
        return sum(one.bytes for one in self.step)


def measure_all(work: Work, arms: Sequence[Arm]) -> dict[str, Counted]:
    """Train every arm on two processes; arm -> what each of them sent.

    Raises:
        RuntimeError: the ranks, or the steps of an arm, did not send the same.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes = (folder, work, tuple(arms))
        multiprocessing.spawn(_rank, processes, nprocs=RANKS)  # type: ignore[no-untyped-call]
        found = [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(RANKS)]
    for name, counted in found[0].items():
        if any(other[name] != counted for other in found):
            raise RuntimeError(f"{name}: the ranks sent different collectives")
    first: dict[str, Counted] = found[0]
    return first


def _rank(rank: int, folder: str, work: Work, arms: Sequence[Arm]) -> None:
    torch.set_num_threads(1)
    # A device profile would leave products of this size in FP32.
    os.environ["MPCOMPILE_PROFILE"] = "none"
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, store=store, timeout=_PATIENCE)
    found = {arm.name: _count(arm, work, rank) for arm in arms}
    Path(folder, str(rank)).write_bytes(pickle.dumps(found))
    dist.barrier()
    # Not through the interpreter's end, where gloo's threads may abort the process
    # (github.com/pytorch/pytorch/issues/190489; read in torch 2.13).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _count(arm: Arm, work: Work, rank: int) -> Counted:
    torch._dynamo.reset()
    train = arm.start(work)
    torch.manual_seed(1 + rank)  # each rank has batches of its own
    steps = []
    for _ in range(work.warm + work.steps):
        batch = work.sample.draw(torch.device("cpu"))
        with sent_in(RANKS) as sent:
            train(batch)
        steps.append(sorted(sent))  # those that run at the same time may begin in any order
    begun, (step, *others) = steps[: work.warm], steps[work.warm :]
    if any(other != step for other in others):
        raise RuntimeError(f"{arm.name}: steps sent different collectives: {step}, {others}")
    return Counted(step, sum(map(len, begun)) - work.warm * len(step))


# -- report ----------------------------------------------------------------------------------------
# What each arm sends beside its peer, and verdicts.


def _notes(work: Work) -> list[str]:
    parameters = sum(p.numel() for p in work.model().parameters())
    return [
        f"For each step and each of {RANKS} ranks. The model has {parameters:,} parameters, "
        f"{4 * parameters / 1e6:.3f} MB in FP32; DDP's buckets are of {BUCKET} MB. MB are 10^6 "
        "bytes, and are what a rank sends where the ranks form a ring, as NCCL's do: for n ranks "
        "2(n - 1)/n of a tensor that is all-reduced, (n - 1)/n of one that is gathered or "
        "reduce-scattered. The number of DDP's buckets depends on the order in which gradients "
        "arrive, which may differ between an eager and a compiled model. The start is what the "
        f"first {work.warm} steps send beyond as many later ones."
    ]


def _table(engine: str, clips: bool, found: Mapping[str, Counted]) -> Table:
    arms = [arm for arm in ARMS if (arm.engine, arm.clips) == (engine, clips)]
    peer = found[Arm(engine, AUTOCAST, clips).name]
    rows = []
    for arm in arms:
        counted = found[arm.name]
        rows.append((
            arm.way, str(len(counted.step)), f"{counted.sent / 1e6:.3f}",
            f"{counted.sent / peer.sent:.3f}x", _parts(counted), f"{counted.start:+d}",
        ))  # fmt: skip
    how = "the norm clipped" if clips else "no clipping"
    columns = ("arm", "collectives", "MB", "over the peer", "of which", "start")
    return Table(f"{engine}, {how}", columns, rows)


def _parts(counted: Counted) -> str:
    """What the step consists of: "4 all-reduce FP32 (3.714 MB)"."""
    kinds = Counter((c.kind, c.dtype) for c in counted.step)
    parts = []
    for (kind, dtype), times in sorted(kinds.items()):
        sent = sum(c.bytes for c in counted.step if (c.kind, c.dtype) == (kind, dtype))
        size = f"{sent / 1e6:.3f} MB" if sent >= 1000 else f"{sent:.0f} B"
        parts.append(f"{times} {kind} {dtype} ({size})")
    return ", ".join(parts)


def verdicts(found: Mapping[str, Counted]) -> Claims:
    """Never more collectives or bytes than the peer."""
    for arm in ARMS:
        if arm.way not in OURS:
            continue
        counted, peer = found[arm.name], found[Arm(arm.engine, AUTOCAST, arm.clips).name]
        share = round(counted.sent / peer.sent, 3)
        fits = len(counted.step) <= len(peer.step) and share <= 1.0
        claim = f"{arm.name}: at most {len(peer.step)} collectives and 1x the bytes"
        yield f"{claim}: {len(counted.step)}, {share:.3f}x", fits
