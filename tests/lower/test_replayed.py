"""CUDA graphs on a machine without any: what becomes one, and results that outlive a replay. And
what `compile_inference` returns: Inductor's own callable, and what it needs to live.
"""

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._dynamo.utils import counters
from torch._inductor.output_code import CompiledFxGraph
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mpcompile import MPOptimizer, ir, train_step
from mpcompile.devices.registry import capabilities
from mpcompile.ir import aten
from mpcompile.lower import inference
from mpcompile.lower.inference import outliving, replays
from mpcompile.whole_step import one_graph

GPU, HOST = torch.device("cuda", 0), torch.device("cpu")


@pytest.mark.parametrize(
    ("mode", "options", "device", "wanted"),
    [
        ("reduce-overhead", None, GPU, True),
        ("max-autotune", None, GPU, True),
        ("max-autotune-no-cudagraphs", None, GPU, False),
        (None, None, GPU, False),
        (None, {"triton.cudagraphs": True}, GPU, True),
        ("reduce-overhead", {"triton.cudagraphs": False}, GPU, False),
        ("reduce-overhead", None, HOST, False),
    ],
)
def test_what_is_replayed(mode: Any, options: Any, device: torch.device, wanted: bool) -> None:
    assert replays(mode, options, device) is wanted


def test_copies_share_memory_as_the_results_do() -> None:
    memory, given = torch.zeros(2, 3), torch.zeros(4)

    def run(values: list[Any]) -> Sequence[Any]:
        memory.add_(1.0)
        return memory, memory.t()[1:], 7, given, memory

    kept = [outliving(run, (True, True, True, False, True))([]) for _ in range(3)]
    for i, (whole, part, number, own, again) in enumerate(kept):
        assert whole.tolist() == [[i + 1.0] * 3] * 2
        assert (part.shape, part.stride()) == ((2, 2), (1, 3))
        part[0, 1] = -1.0  # row 1, column 1
        assert whole[1, 1] == -1.0 == again[1, 1]
        assert number == 7
        assert own is given
    assert memory.tolist() == [[3.0] * 3] * 2


def replaying(graph: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of `compile_inference`: a function that returns the same memory in each call."""
    places: list[Any] = []

    def run(values: list[Any]) -> Sequence[Any]:
        results = graph(*values)
        given = {x.data_ptr() for x in values if isinstance(x, torch.Tensor)}
        if not places:
            places.extend(x if x.data_ptr() in given else torch.empty_like(x) for x in results)
        for place, result in zip(places, results, strict=True):
            place.copy_(result)
        return places

    return run


def test_a_loop_that_collects_what_whole_steps_return(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(capabilities(HOST)), "cuda_graphs", True)
    monkeypatch.setattr(one_graph, "compile_inference", replaying)
    torch.manual_seed(0)
    model = nn.Linear(16, 8)
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = MPOptimizer(sgd, max_grad_norm=1.0, emit="eager")
    step = train_step(model, optimizer, F.cross_entropy, level="O2", mode="reduce-overhead")
    x, y = torch.randn(64, 16), torch.randint(8, (64,))
    kept, seen = [], []
    for _ in range(4):
        kept.append((step(x, y), optimizer.grad_norm, optimizer.skipped))
        seen.append([value.item() for value in kept[-1]])
    assert seen == [[value.item() for value in values] for values in kept]
    losses, norms, _ = zip(*seen, strict=True)
    assert len(set(losses)) == len(set(norms)) == 4


# -- what Inductor compiled ------------------------------------------------------------------------


def doubled(mode: FakeTensorMode) -> tuple[fx.GraphModule, torch.Tensor]:
    """A graph that returns (x + x,), and the x that it is compiled for."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    with mode:
        x.meta["val"] = value = torch.empty(8)
    total = graph.call_function(aten.add.Tensor, (x, x))
    ir.refresh(total)
    graph.output((total,))
    return fx.GraphModule({}, graph), value


def compiled() -> Any:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    gm, value = doubled(mode)
    return inference.compile_inference(
        gm, [value], mode, static=(), shares_memory=False, patches={}
    )


@pytest.mark.slow("compiles by Inductor")
def test_what_inductor_compiled_lives_as_long_as_its_function() -> None:
    """A `CompiledFxGraph` that is collected deletes the partitions that a function with CUDA graphs
    calls: `'Runner' object has no attribute 'partitions'`, in the first step.
    """
    run = compiled()
    inner = weakref.ref(run.owner)
    gc.collect()
    assert run.func == inner().current_callable
    (total,) = run([torch.ones(8)])
    assert total.tolist() == [2.0] * 8
    del run
    gc.collect()
    assert inner() is None


def test_a_second_process_finds_the_function_in_torchs_cache() -> None:
    """And calls it without AOTAutograd's wrapper, as the first one does."""
    compiled()  # as in an earlier process
    counters.clear()
    run = compiled()
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
    assert isinstance(run.owner, CompiledFxGraph)
    (total,) = run([torch.ones(8)])
    assert total.tolist() == [2.0] * 8
