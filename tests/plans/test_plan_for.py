"""Plans for GPUs that aren't there: what they say, what they leave alone, and what users hear."""

import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from module_of import module_of
from small_calls import Calls, X, in_two_graphs, net
from torch import nn
from versions import since

import mpcompile
from mpcompile import MPCompileError, Policy
from mpcompile.devices.gpus import GPUS
from mpcompile.errors import CannotRewrite
from mpcompile.profile import store
from mpcompile.rules import kernels
from mpcompile.scaling import guard, parameters

plan_for = functools.partial(mpcompile.plan_for, device="h100")


def decided(planned: Any) -> dict[str, str]:
    return {n.name: n.precision for n in planned.nodes}


PRODUCTS = {
    f"aten::{name}"
    for name in ("linear", "matmul", "addmm", "conv2d", "conv_transpose1d", "gru_cell")
}


# -- what the plan says ----------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", GPUS)
def test_every_gpu(gpu: str) -> None:
    planned = plan_for(net(), X, device=gpu)
    (plan,) = planned.graphs
    assert (plan.dtype, plan.device, plan.scaled) == ("float16", "cuda:0", True)
    assert decided(planned)["linear"] == ("FULL" if gpu == "p100" else "LOW")
    assert planned.gpu is GPUS[gpu]


def test_without_units_a_named_dtype_still_runs_low() -> None:
    assert decided(plan_for(net(), X, device="p100", dtype=torch.float16))["linear"] == "LOW"


def test_the_profile_is_that_of_the_gpus_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hopper has a built-in one, from a data sheet. Were it measured, so small a product wouldn't
    be worth its casts.
    """
    monkeypatch.setenv("MPCOMPILE_PROFILE", "")
    assert decided(plan_for(net(), X, device="h100"))["linear"] == "LOW"
    measured = dataclasses.replace(store.builtin("cuda-hopper"), origin="measured")
    monkeypatch.setattr(store, "builtin", lambda stem: measured)
    assert decided(plan_for(net(), X, device="h100"))["linear"] == "FULL"
    assert decided(plan_for(net(), X, device="t4"))["linear"] == "LOW"


def perceptron(width: int, batch: int = 32) -> tuple[nn.Module, torch.Tensor]:
    layers = nn.Linear(64, width), nn.GELU(), nn.Linear(width, 10)
    return nn.Sequential(*layers), torch.randn(batch, 64)


# Products too small to pay for a cast, by a data sheet.
SMALL: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    **{f"width {n}": lambda n=n: perceptron(n) for n in (64, 96, 128, 256, 384, 512)},
    "a single example": lambda: perceptron(256, 1),
    "a large batch": lambda: perceptron(256, 4096),
    "a convolution": lambda: (nn.Conv2d(8, 16, 3), torch.randn(2, 8, 16, 16)),
    "a transposed one": lambda: (nn.ConvTranspose1d(8, 16, 4), torch.randn(2, 8, 16)),
    "attention": lambda: (nn.TransformerEncoderLayer(64, 4, 128), torch.randn(16, 4, 64)),
    "a cell": lambda: (nn.GRUCell(64, 64), torch.randn(8, 64)),
    "an embedding": lambda: (
        nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 8)), torch.randint(50, (8, 4))
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["auto", torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("device", ["h100", "h200", "a100", "t4"])
@pytest.mark.parametrize("name", SMALL)
def test_a_data_sheet_takes_no_product_out_of_the_low_dtype(
    name: str, device: str, level: str, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPCOMPILE_PROFILE", "")
    model, x = SMALL[name]()
    planned = plan_for(model, x, device=device, level=level, dtype=dtype)
    products = [n.precision for n in planned.nodes if n.op in PRODUCTS]
    assert products
    assert set(products) == {"LOW"}


def test_this_cpu_is_asked_for_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def has_kernel(*args: Any) -> bool:
        raise AssertionError("a plan for a GPU asked the CPU")

    monkeypatch.setattr(kernels, "has_kernel", has_kernel)
    assert not plan_for(net(), X).left


def test_attention_stays_one_kernel() -> None:
    """On a CPU it would be written out, in BF16."""
    layer = nn.TransformerEncoderLayer(16, 2, batch_first=True)
    planned = plan_for(layer, torch.ones(2, 8, 16), dtype=torch.bfloat16)
    assert decided(planned)["scaled_dot_product_attention"] == "LOW"


def test_a_dropped_score_is_not_stored() -> None:
    """The fused kernel of a GPU draws the mask again; a CPU's products would store T x T of it."""

    def saved(dropout: float) -> int:
        layer = Calls(lambda f, x: F.scaled_dot_product_attention(f(x), x, x, dropout_p=dropout))
        x = torch.ones(2, 1, 512, 4, requires_grad=True)
        return plan_for(layer, x, device="t4").saved_bytes

    assert saved(0.1) == saved(0.0) < 512 * 512


def test_recurrent_layers_run_low() -> None:
    model = module_of(lambda m, x: m.head(m.rnn(x)[0]), rnn=nn.LSTM(8, 8), head=nn.Linear(8, 8))
    assert decided(plan_for(model, torch.ones(5, 2, 8), device="t4"))["lstm"] == "LOW"


def test_half_inputs_are_widened() -> None:
    assert decided(plan_for(net(), X.half(), device="t4"))["linear"] == "LOW"


def test_a_graph_that_stays_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan_graph(*args: Any, **kwargs: Any) -> Any:
        raise CannotRewrite("this one can't be")

    monkeypatch.setattr("mpcompile.compiler.backend.plan_graph", plan_graph)
    planned = plan_for(Calls(lambda layer, x: layer(x).exp()), X)
    assert [plan.nodes for plan in planned.graphs] == [()]
    assert planned.left == ("this one can't be",)
    assert "a graph stays in FP32: this one can't be" in str(planned)
    assert planned.saved_bytes == 4 * 3 * 4  # what exp returned, in FP32


# -- bytes -----------------------------------------------------------------------------------------


def two() -> tuple[nn.Module, torch.Tensor]:
    """Both activations are read by a backward: the GELU's input, and what the second one reads."""
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), torch.ones(32, 64)


def test_saved_bytes_by_hand() -> None:
    model, x = two()
    copies = 2 * 32 * 64 + 2 * 256 * 64  # of the input and of the second weight, in FP16
    hidden = 2 * 32 * 256
    planned = plan_for(model, x, device="t4", level="O2")
    assert planned.saved_bytes == copies + 2 * hidden
    assert planned.to_dict()["saved_bytes_copies_of_inputs"] == copies
    assert planned.to_dict()["saved_bytes_by_dtype"] == {"f16": planned.saved_bytes}
    less = plan_for(model, x, device="t4", level="O2", mp_optimizer=True, recompute=True)
    assert less.saved_bytes == hidden + 2 * 32 * 64  # the weights' copies exist anyway


def test_the_text_tells_all() -> None:
    model, x = two()
    text = str(plan_for(model, x, device="t4"))
    assert text.startswith(
        "Sequential at O1: 2 of 2 products in FP16, 100.0% of 2.1 MFLOP\n"
        "on Tesla T4; Tensor Cores: FP16 (Turing, compute capability 7.5)\n"
    )
    assert "Tensor Core share of the FLOPs: 100.0% -> 100.0%\n" in text
    assert "Saved for the backward: 69.63 kB (f16 69.63 kB, of it copies" in text
    assert "Not known without the GPU:\n  times: " in text


def test_a_size_worth_changing() -> None:
    layers = nn.Sequential(nn.Linear(64, 61), nn.Linear(61, 64))
    assert "61 -> 64 (n of 0, k of 1) " in str(plan_for(layers, torch.ones(64, 64), device="t4"))


# -- what it leaves alone --------------------------------------------------------------------------


@torch.compiler.disable
def noise() -> float:
    return random.random() + float(np.random.rand())


class Busy(nn.Module):
    """Changes whatever a forward can change."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.calls, self.plain = 0, torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.plain.add_(1)
        torch._dynamo.graph_break()
        return F.dropout(self.norm(self.layer(x))) + self.plain + torch.rand(4) * noise()


def test_nothing_happens_to_the_model_or_the_process() -> None:
    model, x = Busy(), torch.ones(3, 4)
    model.layer.weight.grad = torch.ones(4, 4)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    numbers = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # type: ignore[union-attr]
    live, changes = set(guard._live), parameters.changes()
    sums = torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    assert len(plan_for(model, x, level="O2", mp_optimizer=True).graphs) == 3
    assert (model.calls, model.plain.tolist(), x.tolist()) == (0, [0.0] * 4, X.tolist())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(model.layer.weight.grad, torch.ones(4, 4))
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), numbers[0])
    assert random.getstate() == numbers[1]
    assert np.array_equal(np.random.get_state()[1], numbers[2])  # type: ignore[index]
    assert set(guard._live) <= live
    assert parameters.changes() == changes
    assert torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction == sums
    assert torch.is_grad_enabled()


@pytest.mark.slow("plans of several models")
@since("2.13", "what is traced can't be kept apart: each plan counts as a recompile")
def test_what_the_user_compiled_stays_compiled() -> None:
    """And sizes that were planned for don't make his dynamic."""
    model, graphs = Calls(in_two_graphs), []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append([x for x in inputs if isinstance(x, torch.SymInt)])
        return gm

    plan_for(model, torch.ones(7, 4))
    mine = torch.compile(model, backend=backend)
    mine(X)
    assert graphs
    assert not any(graphs)
    compiled = len(graphs)
    for rows in range(5, 15):  # more than the functions may be compiled otherwise
        assert len(plan_for(model, torch.ones(rows, 4)).graphs) == 2
    mine(X)
    assert len(graphs) == compiled


def test_a_model_that_is_nowhere() -> None:
    """20 GB of parameters, 8 GB of inputs: on "meta" they take nothing."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(50_000, 100_000), nn.GELU(), nn.Linear(100_000, 8))
        x = torch.empty(40_000, 50_000)
    planned = plan_for(model, x, device="a100", level="O2", mp_optimizer=True)
    assert planned.saved_bytes > 2 * 2 * 40_000 * 100_000
    assert next(model.parameters()).device.type == "meta"


# -- errors ----------------------------------------------------------------------------------------


def raises(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    raise ValueError("not today")


def holds_a_lock() -> nn.Module:
    import threading

    model = net()
    model.lock = threading.Lock()  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plan_for(net(), X, levl="O2"), "unexpected keyword .*; did you mean 'level'?"),
        (lambda: plan_for(net(), X, dtype="int8"), "unknown dtype 'int8'"),
        (lambda: plan_for(net(), X, mp_optimizer=1), "use True or False"),
        (lambda: plan_for(net().half(), X), "is already in half precision"),
        (lambda: plan_for(net(), torch.ones(3, 5)), "fails on these inputs: RuntimeError.*3, 5"),
        (lambda: plan_for(net(), X, policy=Policy(modules={"9": "fp32"})), "'9' matches no module"),
        (lambda: plan_for(Calls(raises), X), r"ValueError: not today \(.*test_plan_for.py:\d+\)"),
        (
            lambda: plan_for(Calls(lambda f, x: f(x) if f(x).argmax().item() > 2 else x), X),
            r"values of a tensor \(.*test_plan_for.py:\d+\)",
        ),
        (lambda: plan_for(holds_a_lock(), X), "can't be copied .TypeError: cannot pickle"),
    ],
)
def test_errors(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(MPCompileError, match=message):
        call()


@pytest.mark.parametrize(
    "program",
    [lambda f, x: f(x) * f(x).sum().item(), lambda f, x: f(x)[f(x).nonzero()[:, 0]]],
    ids=["a number", "a size"],
)
def test_what_depends_on_values_has_a_plan(program: Callable[..., torch.Tensor]) -> None:
    (graph,) = plan_for(Calls(program), X).graphs
    assert [n.op for n in graph.nodes if n.precision == "LOW"] == ["aten::linear"] * 2
    assert not any(n.rule == "layout" for n in graph.nodes)


def test_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Calls(torch.compiler.disable(lambda layer, x: layer(x)))
    monkeypatch.setattr(Calls, "forward", torch.compiler.disable(Calls.forward))
    with pytest.raises(MPCompileError, match="no part of Calls was compiled"):
        plan_for(model, X)
