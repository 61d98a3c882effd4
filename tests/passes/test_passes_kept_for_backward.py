"""What the backward reads: inputs as they were before a write, what is computed again."""

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import mpcompile
from mpcompile import MPCompileError
from mpcompile.demo.train import bytes_saved_for_backward
from mpcompile.devices.cpu import CPU
from mpcompile.ir import aten
from mpcompile.passes.joint.kept_for_backward import keep_written_inputs

# -- keep_written_inputs ---------------------------------------------------------------------------

saving_less = functools.partial(checkpoint, use_reentrant=False)


def program(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Reads x, writes it, and recomputes in the backward from what it had read."""
    before = torch.cos(x)
    narrow = before.half()
    x.relu_()

    def inner(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return F.layer_norm((p @ weight.half()).float(), (8,)) * q

    return saving_less(inner, narrow, before)  # type: ignore[no-any-return]


def gradient(run: Any) -> torch.Tensor:
    torch.manual_seed(0)
    weight, x = (torch.randn(8, 8) * 0.4).requires_grad_(), torch.randn(2, 4, 8)
    result = run(weight, x)
    (result * torch.linspace(-1, 1.5, result.numel()).view(result.shape)).sum().backward()
    assert float(x.min()) >= 0  # the write came out
    return weight.grad


HALF = {"dtype": torch.float16, "loss_scale": 1024.0}


@pytest.mark.slow_rows("compiles by Inductor, or a deep model", but=3)
@pytest.mark.parametrize(
    "how",
    [
        {"emit": "eager", **HALF}, {"emit": "aot_eager", **HALF},
        {"emit": "aot_eager", "level": "O0"}, {"emit": "inductor", **HALF},
    ],
)  # fmt: skip
def test_gradients(how: dict[str, Any]) -> None:
    run = mpcompile.mpcompile(program, **how)
    wanted = gradient(program)
    assert float((gradient(run) - wanted).norm()) < 1e-2 * float(wanted.norm())


# -- the pass by itself ---------------------------------------------------------------------------


def forward_graph(keeps: str) -> fx.Graph:
    """X is written; kept is x, a view of it, its cosine, or another input."""
    graph = fx.Graph()
    with FakeTensorMode():
        value, other, cosine = torch.empty(2, 4), torch.empty(2, 4), torch.empty(2, 4)
        view = value.t()
    nodes = {name: graph.placeholder(name) for name in ("x", "other")}
    nodes["x"].meta["val"], nodes["other"].meta["val"] = value, other
    for name, target, result in (("view", aten.t.default, view), ("cos", aten.cos.default, cosine)):
        nodes[name] = graph.call_function(target, (nodes["x"],))
        nodes[name].meta["val"] = result
    graph.call_function(aten.copy_.default, (nodes["x"], nodes["cos"]))
    graph.output((nodes["cos"], nodes[keeps]))
    return graph


@pytest.mark.parametrize("keeps", ["x", "view", "cos", "other"])
def test_what_shares_memory_with_a_written_input_is_copied(keeps: str) -> None:
    """Anything else is left alone."""
    graph = forward_graph(keeps)
    before = str(graph)
    assert keep_written_inputs(graph, fx.Graph(), 1) == (keeps in ("x", "view"))
    if keeps in ("cos", "other"):
        assert str(graph) == before
        return
    ((clone,), (write,)) = (
        graph.find_nodes(op="call_function", target=target)
        for target in (aten.clone.default, aten.copy_.default)
    )
    assert clone.next is write
    assert graph.output_node().args[0][1] is clone  # type: ignore[index]
    assert not keep_written_inputs(graph, fx.Graph(), 1)


# -- recomputing -----------------------------------------------------------------------------------


WIDTH, BATCH = 64, 128


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.25), nn.Linear(2 * WIDTH, WIDTH),
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8),
    )  # fmt: skip


def train_once(net: nn.Module, x: torch.Tensor, **options: Any) -> int:
    """One step from seed 1; returns the bytes kept for its backward, parameters left out."""
    mpcompile.mpcompile(net, dtype=torch.bfloat16, strict=True, **options)
    net(x)  # compiles
    torch.manual_seed(1)
    with bytes_saved_for_backward(net) as held:
        loss = net(x).square().mean()
    loss.backward()
    return sum(n for at, n in held.items() if at != x.untyped_storage().data_ptr())


@pytest.mark.slow("compiles by Inductor, or a deep model")
@pytest.mark.parametrize("asked", [False, True])
def test_activations_and_norms_are_computed_again(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory is asked for, and on a CPU always."""
    stores, recomputes = model(), model()
    x = torch.randn(BATCH, WIDTH)
    kept = train_once(recomputes, x, recompute=asked)
    monkeypatch.setattr(CPU, "recomputes", False)
    stored = train_once(stores, x)
    # What GELU and dropout make is BATCH x 2 WIDTH in BF16, what the norm makes half of that.
    assert stored - kept >= 2 * (2 * WIDTH) * BATCH
    for ours, theirs in zip(recomputes.parameters(), stores.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=2e-2, atol=1e-5)


@pytest.mark.slow("compiles by Inductor, or a deep model")
def test_a_graph_that_is_left_computes_them_again_where_it_is_asked_to() -> None:
    x = torch.randn(BATCH, WIDTH)
    stored, kept = (train_once(model(), x, level="O0", recompute=r) for r in (False, True))
    assert stored - kept >= 4 * (2 * WIDTH) * BATCH


def test_it_is_inductors() -> None:
    with pytest.raises(MPCompileError, match=r"recompute=True is Inductor's"):
        mpcompile.mpcompile(copy.deepcopy(model()), recompute=True, emit="eager")
    with pytest.raises(MPCompileError, match=r"recompute='yes': use True or False"):
        mpcompile.mpcompile(model(), recompute="yes")
