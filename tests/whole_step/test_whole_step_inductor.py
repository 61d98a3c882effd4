"""What Inductor makes of whole steps: a graph for each phase, results and inputs that share memory,
LSTMs, and the memory that micro-batches take. The other files compile without it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from whole_steps import Run, Setting, agree, agree_left, batches, gan, gan_calls, net

from benchmarks.harness.peak import peak_bytes
from benchmarks.models import Tagger
from mpcompile import MPOptimizer, mpcompile, train_step
from mpcompile.whole_step import one_graph
from mpcompile.whole_step.forward import ExtraInputs

Step = Callable[..., Any]
O2 = Setting("O2", torch.float16, True, "inductor")
O1 = Setting("O1", torch.float16, False, "inductor")
O2_BF16 = Setting("O2", torch.bfloat16, True, "inductor")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many inputs each graph has that Inductor gets."""
    found: list[int] = []
    own = one_graph._by_inductor

    def by_inductor(graph: Any, *rest: Any) -> Any:
        found.append(len(graph.graph.find_nodes(op="placeholder")))
        return own(graph, *rest)

    monkeypatch.setattr(one_graph, "_by_inductor", by_inductor)
    return found


@pytest.mark.sweep("two networks under Inductor")
@pytest.mark.parametrize("bad", ["d", "g"])
def test_each_network_of_a_gan_is_a_graph(bad: str, graphs: list[int]) -> None:
    assert agree(gan(False), gan_calls(5, bad), O2).scale.skipped_steps == 1
    assert len(graphs) == 2


@pytest.mark.slow("compiles by Inductor")
@pytest.mark.parametrize("setting", [O2, O1], ids=str)
@pytest.mark.parametrize("written", [False, True])
def test_results_and_inputs_share_memory(setting: Setting, written: bool) -> None:
    stats: dict[bool, torch.Tensor] = {}

    def program(run: Run) -> Step:
        model = run.model(net())
        optimizer = run.sgd(model.parameters())
        forward = run.forward(lambda x: model(x))
        mine = stats.setdefault(run.whole, torch.zeros(2, 16))
        first, flat = mine[0], mine.view(-1)

        def step(x: torch.Tensor, same: torch.Tensor, y: torch.Tensor) -> Any:
            logits = forward(x + same)
            loss = F.cross_entropy(logits, y)
            loss.backward()
            if written:
                first.add_(x.mean(0))
            optimizer.step()
            optimizer.zero_grad()
            return loss, logits, logits.view(-1), x, x[0], flat * 2, first

        return step

    calls = [(x, x.view(8, 16), y) for x, y, _ in batches(3)]
    if written:
        agree_left(program, calls, setting, "memory that two of its inputs share")
    else:
        agree(program, calls, setting)
    torch.testing.assert_close(stats[True], stats[False])
    assert bool(stats[True][0].any()) == written


@pytest.mark.slow("compiles by Inductor")
def test_an_lstm() -> None:
    tokens = [torch.randint(0, 16, (2, 4, 8)) for _ in range(3)]

    def program(run: Run) -> Step:
        model = run.model(Tagger(vocab=16, width=16))
        return run.usual(run.forward(lambda x, y: model(x, y)), run.sgd(model.parameters()))

    calls, tolerance = [(x, y) for x, y in tokens], {"rtol": 2e-2, "atol": 2e-3}
    # Torch asks the same before it calls oneDNN's kernel: a CPU without AVX512 has none in BF16.
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        agree(program, calls, O2_BF16, **tolerance)
    else:
        agree_left(program, calls, O2_BF16, "would be unrolled over time", **tolerance)


@pytest.mark.slow("compiles by Inductor")
def test_micro_batches_need_memory_for_one_of_them(graphs: list[int]) -> None:
    def peak(accumulate: int, whole: bool = True) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(16, 16), nn.GELU())))
        optimizer = MPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        options: Any = {"dtype": torch.bfloat16, "recompute": True}
        step = train_step(model, optimizer, F.mse_loss, accumulate=accumulate, **options)
        if not whole:
            mpcompile(model, **options)
            step = Run.usual(lambda x, y: F.mse_loss(model(x), y), optimizer)
        x, y = torch.randn(4096, 16), torch.randn(4096, 16)
        for _ in range(3):
            step(x, y)
        assert not whole or step.left is None  # type: ignore[attr-defined]
        return peak_bytes(lambda: step(x, y), torch.device("cpu"))

    of_one = peak(1)
    assert peak(4) < 0.4 * of_one
    assert len(graphs) == 4 + 1
    assert of_one < 1.01 * peak(1, whole=False)


def test_what_a_step_replaces_is_told_from_what_stays() -> None:
    """A graph that CUDA records would read what was replaced."""
    held, stays, replaced = ExtraInputs(), torch.zeros(1), torch.zeros(1)
    assert [held.add(stays), held.add_fresh(replaced), held.add(stays)] == [0, 1, 0]
    assert held.fresh == {1}
