"""Bytes that a training step on a CPU reads and writes, by cause, and its peak: counted, not timed.

The models, their batches and the step are those of `real_models`, in BF16. Forward and backward go
all of Inductor's way up to and including its scheduler, on a CPU that has AMX-BF16 by name; the
kernels that it planned are counted instead of generated, so the numbers are the same on every
machine. A kernel's bytes are each buffer that it reads or writes, once: Inductor's own count, which
of a fused attention sees operands and results only. The optimizer is not counted: it is the same
for the peer and for O1; an `MPOptimizer` reads low gradients and writes low copies.

Causes, the first that fits. *Weights' casts*: a kernel that does nothing but round weights (or the
batch) or lay them out, in the forward or again in the backward. *Gradients' casts*: one that does
nothing but widen what leaves the backward. *Logits and loss*: a kernel with a value over the
vocabulary, products aside. *Attention*: of a module whose class is called so, its projections
aside. *Products*: matrix products and convolutions. *The rest*: norms, activations, residuals,
embeddings, pools.

*Peak* is the most that lies in memory beyond weights, batch and optimizer's state, by Inductor's
estimate for each graph in the order of its kernels (`estimate_peak_memory`); *saved* is what the
backward is given of it.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._inductor import memory
from torch._inductor.fx_utils import count_flops_fx
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import BaseSchedulerNode
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from benchmarks.harness.processes import calls_elsewhere
from benchmarks.harness.report import Claims, Report, Settings, Table, paragraphs, plain
from benchmarks.harness.scheduled import is_kernel, moved, origins, plan_only
from benchmarks.harness.ways import AUTOCAST, GENERATED, PIECES, everyones, trainer_for
from benchmarks.real_models import BY_DEVICE, TASKS, TINY
from mpcompile.devices import cpu

DEVICES = ("cpu",)
NEEDS = ("timm", "transformers")
REPORT = "cpu_traffic"  # the same on every machine
ARMS = (AUTOCAST, PIECES[0], GENERATED, PIECES[1])
FLAGS = {
    "architecture": "x86_64",
    **dict.fromkeys(("avx2", "avx512_f", "avx512_bf16", "amx_bf16", "amx_tile"), True),
}
"""Of the CPU that is planned for."""

WEIGHTS, GRADIENTS, LOGITS = "weights' casts", "gradients' casts", "logits and loss"
ATTENTION, PRODUCTS, REST = "attention", "products", "the rest"
CAUSES = (WEIGHTS, GRADIENTS, LOGITS, ATTENTION, PRODUCTS, REST)
MOST_PEAK = 1.01
"""Of the peer's peak."""

_LAYOUT = {"convert_element_type", "permute", "view", "reshape", "clone", "expand", "_to_copy", "t"}


@dataclasses.dataclass
class Count:
    """What one arm's forward and backward ask for.

    Attributes:
        bytes: by cause.
        kernels: how many.
        peak, saved: bytes.
    """

    bytes: dict[str, int]
    kernels: int
    peak: int
    saved: int


def run(settings: Settings) -> Report:
    """Count each model; under `settings.quick` two tiny ones."""
    names = [task.name for task in (TINY if settings.quick else BY_DEVICE["cpu"])]
    quiet = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "MPCOMPILE_PROFILE": ""}
    calls = [(name, arm) for name in names for arm in ARMS]
    found: dict[str, dict[str, Count]] = {name: {} for name in names}
    answers = calls_elsewhere("benchmarks.cpu_traffic:counted", calls, quiet)
    for (name, arm), answer in zip(calls, answers, strict=True):
        found[name][arm] = Count(**answer)
    return make_report(found)


# -- counting -------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Graph:
    """One that Inductor scheduled, and that was called.

    Attributes:
        kernels: the cause of each, and its bytes.
        peak, given, left: bytes: the most that lies there at once; what a backward gets of its
            forward; what is there afterwards.
    """

    backward: bool
    kernels: list[tuple[str, int]]
    peak: int
    given: int
    left: int


def counted(name: str, arm: str) -> Any:
    """Two steps of a model in this process; the second one is counted."""
    (task,) = (task for task in TASKS if task.name == name)
    (way,) = (way for way in everyones(torch.device("cpu"), "inductor") if way.name == arm)
    if way.level:
        way = dataclasses.replace(way, options={**way.options, "verify": False})
    torch._dynamo.reset()
    torch.manual_seed(0)
    called: list[_Graph] = []
    trainer = trainer_for(way, "inductor", torch.device("cpu"))

    def planned(graph: GraphLowering) -> Callable[[], None]:
        seen = None if graph.is_inference else _graph(graph, _vocabulary(trainer.models[0]))
        return lambda: called.append(seen) if seen is not None else None

    plan_only(planned)
    with mock.patch.object(cpu, "cpu_flags", return_value=FLAGS), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what runs are numbers that nobody set
        training = task.start(trainer, 0)
        training.step()
        called.clear()
        training.step()
    return plain(_summed(called))


def _summed(called: Sequence[_Graph]) -> Count:
    forwards = [graph for graph in called if not graph.backward]
    backwards = [graph for graph in reversed(called) if graph.backward]
    peak = 0
    for at, (forward, backward) in enumerate(zip(forwards, backwards, strict=True)):
        left = sum(graph.left for graph in forwards[:at])
        kept = sum(graph.given for graph in backwards[:at])
        done = sum(graph.left for graph in backwards[at + 1 :])
        peak = max(peak, left + forward.peak, kept + done + backward.peak)
    kernels = [kernel for graph in called for kernel in graph.kernels]
    return Count(
        bytes={cause: sum(size for why, size in kernels if why == cause) for cause in CAUSES},
        kernels=len(kernels),
        peak=peak,
        saved=sum(graph.given for graph in backwards),
    )


def _vocabulary(model: nn.Module) -> int:
    """Words that a language model tells apart; 0 of any other."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return 0 if head is None else int(head.weight.shape[0])


def _graph(graph: GraphLowering, vocabulary: int) -> _Graph:
    planned = graph.scheduler
    with V.set_graph_handler(graph):
        inputs = OrderedSet(graph.graph_inputs)
        freeable = memory.get_freeable_input_buf(planned.nodes, inputs)
        outputs = OrderedSet(graph.get_output_names())
        memory.assign_memory_planning_info_for_scheduler_buffers(planned.nodes, planned.name_to_buf)
        peak, live = memory.estimate_peak_memory(planned.nodes, freeable, outputs)
        kernels = [
            (_cause(node, graph, vocabulary), _bytes(node))
            for node in planned.nodes
            if is_kernel(node)
        ]
    given = sum(one.mpi_buffer.size_free for one in freeable.values())
    return _Graph(bool(graph.is_backward), kernels, peak, given, live[-1])


def _bytes(node: BaseSchedulerNode) -> int:
    return int(node.get_read_write_buffers_sizes()) if node.is_extern() else moved(node)


def _cause(node: BaseSchedulerNode, graph: GraphLowering, vocabulary: int) -> str:
    """Why a kernel is there; see above."""
    reads = {dep.name for dep in node.read_writes.reads}
    written = set(node.get_buffer_names())
    calls = origins(node)
    product = node.is_extern() and any(count_flops_fx(call) for call in calls)
    if not node.is_extern() and {_base(call) for call in calls} <= _LAYOUT:
        if all(name.startswith("primals") for name in reads):
            return WEIGHTS
        if graph.is_backward and written & set(graph.get_output_names()):
            return GRADIENTS
    if product and not any(_is_inside_of_attention(call) for call in calls):
        return PRODUCTS
    if vocabulary and any(_is_over(name, vocabulary, graph) for name in reads | written):
        return LOGITS
    return ATTENTION if any(_is_inside_of_attention(call) for call in calls) else REST


def _base(call: fx.Node) -> str:
    """The operator's name without its overload."""
    return str(getattr(call.target, "__name__", call.target)).partition(".")[0]


def _is_inside_of_attention(call: fx.Node) -> bool:
    """Whether the innermost module that the call, or the one it is the backward of, is part of is
    an attention: not its projections, which are modules of their own.
    """
    stack = call.meta.get("nn_module_stack") or call.meta.get("fwd_nn_module_stack") or {}
    *_, (_, kind) = [("", ""), *stack.values()]
    return "attention" in str(getattr(kind, "__name__", kind)).rpartition(".")[2].lower()


def _is_over(name: str, vocabulary: int, graph: GraphLowering) -> bool:
    buffer = graph.try_get_buffer(name)
    size = [] if buffer is None else buffer.maybe_get_size() or []
    return bool(size) and size[-1] == vocabulary


# -- report ---------------------------------------------------------------------------------------


def make_report(found: dict[str, dict[str, Count]]) -> Report:
    return Report(
        title="A training step on a CPU, by bytes",
        notes=paragraphs(__doc__),
        tables=[_sums(found), *(_causes(name, arms) for name, arms in found.items())],
        verdicts=dict(_verdicts(found)),
        data={"counted": plain(found)},
    )


def _sums(found: dict[str, dict[str, Count]]) -> Table:
    rows = []
    for name, arms in found.items():
        peer = arms[AUTOCAST]
        for arm, count in arms.items():
            whole, theirs = sum(count.bytes.values()), sum(peer.bytes.values())
            rows.append(
                (
                    name, arm, _mb(whole), f"{whole / theirs:.2f}x", str(count.kernels),
                    _mb(count.saved), f"{count.saved / peer.saved:.2f}x",
                    _mb(count.peak), f"{count.peak / peer.peak:.2f}x",
                )
            )  # fmt: skip
    columns = (
        "", "arm", "moved, MB", "of the peer's", "kernels", "saved, MB", "of the peer's",
        "estimated peak, MB", "of the peer's",
    )  # fmt: skip
    return Table("Forward and backward", columns, rows)


def _causes(name: str, arms: dict[str, Count]) -> Table:
    rows = [
        (cause, *(_mb(count.bytes[cause]) for count in arms.values()))
        for cause in CAUSES
        if any(count.bytes[cause] for count in arms.values())
    ]
    return Table(f"{name}: MB by cause", ("", *arms), rows)


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f}"


def _verdicts(found: dict[str, dict[str, Count]]) -> Claims:
    for name, arms in found.items():
        peer = arms[AUTOCAST]
        for arm, count in arms.items():
            if arm != AUTOCAST:
                whole = sum(count.bytes.values()) / sum(peer.bytes.values())
                claim = f"{name}: {arm} moves no more bytes than {AUTOCAST}"
                yield f"{claim}: {whole:.3f}x", whole <= 1
                peak = count.peak / peer.peak
                claim = f"{name}: {arm}'s estimated peak is at most {MOST_PEAK}x that of {AUTOCAST}"
                yield f"{claim}: {peak:.3f}x", peak <= MOST_PEAK
