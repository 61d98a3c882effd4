"""What the backward reads: low results of a softmax, inputs as they were before a write, what is
computed again.
"""

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import leaf
from graphs import Stage, ran_twice
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import mpcompile
from mpcompile import MPCompileError
from mpcompile.demo.train import bytes_saved_for_backward
from mpcompile.devices.cpu import CPU
from mpcompile.ir import aten
from mpcompile.passes.graph.replace_operators import narrow_softmax
from mpcompile.passes.joint.kept_for_backward import keep_written_inputs

# -- narrow_softmax --------------------------------------------------------------------------------


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


def qkv() -> tuple[Tensor, ...]:
    return leaf(2, 9, 8), leaf(2, 9, 8), leaf(2, 9, 8)


def test_applies() -> None:
    stage = ran_twice(narrow_softmax, attention, *qkv(), level="O2")
    stage.expect_text("""\
k: f32[2, 9, 8] = input
q: f32[2, 9, 8] = input
v: f32[2, 9, 8] = input
v_f16: f16[2, 9, 8] = to(v, f16)
q_f16: f16[2, 9, 8] = to(q, f16)
k_f16: f16[2, 9, 8] = to(k, f16)
transpose: f16[2, 8, 9] = transpose(k_f16, -1, -2)
matmul: f16[2, 9, 9] = matmul(q_f16, transpose)
matmul_f32: f32[2, 9, 9] = to(matmul, f32)
softmax_low: f16[2, 9, 9] = mpcompile::softmax_low(matmul_f32, -1, f16, False)
matmul_1: f16[2, 9, 8] = matmul(softmax_low, v_f16)
matmul_1_f32: f32[2, 9, 8] = to(matmul_1, f32)
return matmul_1_f32
""")


@pytest.mark.parametrize(
    "program",
    [
        lambda x, w: F.linear(x, w).softmax(-1),  # the caller reads the FP32 one
        lambda x, w: (lambda p: (F.linear(p, w), p.log()))(F.linear(x, w).softmax(-1)),
        lambda x, w: F.linear(F.linear(x, w).softmax(-1, dtype=torch.float64).float(), w),
        lambda x, w: F.linear(F.log_softmax(F.linear(x, w), -1), w),
    ],
    ids=["returned", "read twice", "in FP64", "log_softmax"],
)
def test_leaves_others_alone(program: Any) -> None:
    stage = Stage(narrow_softmax, program, leaf(4, 8), leaf(8, 8), level="O2")
    assert not stage.run()


def test_o1_keeps_the_fp32_result() -> None:
    assert not Stage(narrow_softmax, attention, *qkv(), level="O1").run()


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_operator_is_torchs_softmax_rounded(dim: int, safe: bool, dtype: torch.dtype) -> None:
    """Against FP64, the backward from a result that was rounded."""
    x = (3 * torch.randn(5, 6, 7)).requires_grad_()
    if safe:
        with torch.no_grad():
            x[0, :, 0] = x[:, 0, 0] = x[0, 0, :] = float("-inf")
    exact = x.detach().double().requires_grad_()
    softmax = aten._safe_softmax.default if safe else torch.softmax
    wanted = softmax(exact, dim)
    got = torch.ops.mpcompile.softmax_low(x, dim, dtype, safe)
    assert got.dtype is dtype
    tolerance = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=1e-7)
    weights = torch.randn_like(x)
    (got.float() * weights).sum().backward()
    (wanted * weights.double()).sum().backward()
    assert x.grad.dtype is torch.float32
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=0.02, atol=tolerance)


def test_only_the_low_result_is_saved() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        torch.ops.mpcompile.softmax_low(x, -1, torch.float16, False)
    assert [(t.dtype, tuple(t.shape)) for t in saved] == [(torch.float16, (64, 64))]


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
