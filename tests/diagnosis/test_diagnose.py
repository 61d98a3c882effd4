"""diagnose: nothing happens to the model, and what it computes by hand."""

import inspect
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from module_of import function_of, module_of
from torch import fx, nn

from mpcompile import LossScale, MPOptimizer, diagnose, mpcompile
from mpcompile.capture import pipeline
from mpcompile.errors import CannotRewrite
from mpcompile.observe.fault import FaultKind

FP16: dict[str, Any] = {"dtype": "float16"}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))


# -- nothing happens to the model ------------------------------------------------------------------


class Counting(nn.Module):
    """Counts its calls, in a number and in a buffer that each call replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = net(), 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen = self.seen + len(x)
        torch._dynamo.graph_break()
        return self.net(x) * self.calls


def test_nothing_happens_to_the_model() -> None:
    model = Counting()
    x = torch.randn(4, 8, requires_grad=True)
    optimizer = torch.optim.Adam(model.parameters())
    model(x).sum().backward()
    optimizer.step()
    model.net[2].eval()  # type: ignore[index, union-attr]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [p.grad for p in model.parameters()]
    values = [g.clone() for g in gradients if g is not None]
    moments = [v["exp_avg"].clone() for v in optimizer.state.values()]
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    report = diagnose(model, x, optimizer=optimizer, steps=2, **FP16)
    assert report.faults == ()
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [p.grad is g for p, g in zip(model.parameters(), gradients, strict=True)] == [True] * 6
    assert all(map(torch.equal, values, [p.grad for p in model.parameters()]))  # type: ignore[arg-type]
    assert all(
        torch.equal(v["exp_avg"], m) for v, m in zip(optimizer.state.values(), moments, strict=True)
    )
    assert (model.calls, model.training, model.net[2].training) == (1, True, False)  # type: ignore[index, union-attr]
    assert all(p._backward_hooks is None for p in model.parameters())
    assert not model._forward_hooks
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert x.grad is not None


def test_a_call_that_counts_is_the_same_on_all_sides() -> None:
    """Were the counter to go on from side to side, results would be 1, 2 and 3 times as large."""
    report = diagnose(Counting(), torch.randn(4, 8), **FP16)
    assert report.losses["fp32"] == pytest.approx(report.losses["fp64"], rel=1e-4, abs=1e-5)
    assert report.losses["low"] == pytest.approx(report.losses["fp64"], abs=0.01)
    assert all(node.error is not None for node in report.nodes if not node.node.is_added)


@pytest.mark.slow("runs a model step by step, many times")
@torch._dynamo.config.patch(recompile_limit=3)
def test_it_may_be_done_any_number_of_times() -> None:
    """Dynamo's limit of compiles for one function is not used up, neither for us nor the user."""
    limit = torch._dynamo.config.recompile_limit
    for _ in range(limit + 2):
        assert diagnose(Counting(), torch.randn(4, 8), **FP16).faults == ()
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        counter = torch._dynamo.testing.CompileCounter()
        torch.compile(Counting(), backend=counter)(torch.randn(4, 8))
        assert counter.frame_count == 2, "as many graphs as on the first day"


# -- by hand ---------------------------------------------------------------------------------------


class Ones(nn.Module):
    """Four rows of ones times a weight: the gradient of the result is that of the loss, g for each
    element; that of the weight and of the bias is the sum over the rows, 4 g.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        with torch.no_grad():
            self.linear.weight.fill_(1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


@pytest.mark.parametrize(
    ("gradient", "scale"),
    [
        (0.25, 2.0**15),  # 4 g = 1
        (0.5, 2.0**14),
        (65504 / 4096, 2.0**9),  # 4 g * 2**10 = 65504, which is not below
        (65472 / 4096, 2.0**10),
        (2.0**-30, 2.0**43),
    ],
)
def test_the_suggested_scale(gradient: float, scale: float) -> None:
    report = diagnose(Ones(), torch.ones(4, 8), loss_fn=lambda y: y.sum() * gradient, **FP16)
    assert report.suggested_scale == scale
    assert report.scale == min(scale, 2.0**16), "where a training begins"


def test_bf16_needs_no_scale() -> None:
    report = diagnose(Ones(), torch.ones(4, 8), dtype="bfloat16")
    assert (report.scale, report.suggested_scale) == (None, None)


@pytest.mark.parametrize(
    ("loss_scale", "scale"),
    [(512.0, 512.0), ("none", None), (LossScale.dynamic(init_scale=64.0), 64.0)],
)
def test_the_scale_that_was_asked_for(loss_scale: Any, scale: float | None) -> None:
    assert diagnose(Ones(), torch.ones(4, 8), loss_scale=loss_scale, **FP16).scale == scale


@pytest.mark.parametrize(("dtype", "unit"), [("float16", 2.0**-11), ("bfloat16", 2.0**-8)])
def test_how_far_weights_move(dtype: str, unit: float) -> None:
    """Weights are 1, and SGD moves each by lr * 4 g: below and above half a unit in the last place.
    Biases are drawn between 0.1 and 0.35.
    """
    for share, stalls in ((0.75, 1.0), (1.5, 0.0)):
        model = Ones()
        optimizer = torch.optim.SGD(model.parameters(), lr=unit * share / 4)
        report = diagnose(
            model, torch.ones(4, 8), loss_fn=torch.sum, optimizer=optimizer, dtype=dtype
        )
        (weight,) = [u for u in report.updates if u.parameter == "linear.weight"]
        assert weight.ratio == pytest.approx(unit * share, rel=1e-3)
        assert weight.stalls == stalls
        assert report.optimizer == "SGD"


def test_several_steps() -> None:
    """The loss of the third step, from the optimizer's own momentum on."""
    model, x = Ones(), torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    report = diagnose(
        model, x, loss_fn=lambda y: y.square().mean(), steps=3, optimizer=optimizer, **FP16
    )
    for _ in range(3):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert report.losses["fp32"] == pytest.approx(loss.item(), rel=0.01)
    assert diagnose(model, x, **FP16).losses["fp32"] != pytest.approx(loss.item(), rel=0.01)


@pytest.mark.slow("runs a model step by step, many times")
def test_each_step_goes_on_from_what_the_last_one_left() -> None:
    """The second call counts 2, by which the result is multiplied; the weights stay."""
    model = Counting()
    model.net[2].eval()  # type: ignore[index, union-attr]
    x = torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    one, two = (diagnose(model, x, steps=n, optimizer=optimizer, **FP16).losses for n in (1, 2))
    assert two["fp32"] == pytest.approx(2 * one["fp32"], rel=1e-3)


def test_a_result_that_cancels_is_no_fault_where_gradients_are_right() -> None:
    """1000.01 and -1000 in FP16, which has steps of 0.5 there: their sum is off by 100%."""
    model = Ones()
    with torch.no_grad():
        model.linear.weight.zero_()
        model.linear.bias.copy_(torch.tensor([1000.01, -1000.0] * 4))
    report = diagnose(model, torch.ones(4, 8), loss_fn=lambda y: y.sum() / 4, level="O2", **FP16)
    assert abs(report.losses["low"] - report.losses["fp32"]) > 0.9 * report.losses["fp32"]
    assert report.faults == ()

    class Inside(Ones):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).sum(-1)

    inside = Inside()
    inside.load_state_dict(model.state_dict())
    report = diagnose(inside, torch.ones(4, 8), level="O2", **FP16)
    assert any(node.error is not None and node.error > 0.9 for node in report.nodes)
    assert report.faults == ()


@pytest.mark.slow("runs a model step by step, many times")
def test_an_mp_optimizer_takes_the_steps() -> None:
    model = mpcompile(Ones(), level="O2", emit="eager", **FP16)
    optimizer = MPOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    report = diagnose(model, torch.ones(4, 8), loss_fn=torch.sum, optimizer=optimizer, steps=2)
    assert (report.faults, report.optimizer, report.level) == ((), "SGD", "O2")
    # The weights are those of the second step of the copy: 1 - 4e-3 * 2, give or take a rounding.
    (weight,) = [u for u in report.updates if u.parameter == "linear.weight"]
    assert weight.ratio == pytest.approx(4e-3 / (1 - 8e-3), rel=1e-3)


# -- the loss scale --------------------------------------------------------------------------------


def slopes() -> Any:
    """A slope of 1e8 at a dead unit, beside a part whose gradients are ordinary."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        far = torch.atan(m.steep(x) * 1e8)
        return m.plain(x).square().mean() * 1e-4 + far.mean()

    torch.manual_seed(0)
    made = module_of(forward, plain=nn.Linear(16, 16), steep=nn.Linear(16, 16))
    with torch.no_grad():
        made.steep.weight[0], made.steep.bias[0] = 0, 0
    return made


def test_the_steep_gradient_is_named_for_which_the_others_are_lost() -> None:
    report = diagnose(slopes(), torch.randn(8, 16), **FP16)
    found = report.first
    assert (found.kind, found.node.op, found.node.name) == (FaultKind.UNDERFLOW, "aten::mul", "mul")
    assert report.pins == ("linear",), "the steep one"
    assert "of linear_1" in found.reason


def test_a_constant_scale_that_is_too_high() -> None:
    """The dynamic one would go down to where everything fits."""
    report = diagnose(slopes(), torch.randn(8, 16), loss_scale=2.0**16, **FP16)
    assert (report.first.kind, report.first.node.name) == (FaultKind.BACKWARD, "mul")
    assert "at a loss scale of 65536" in report.first.reason


# -- what is outside of the graphs -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda y: (y * 0).log().mean(), "the loss is not finite, in FP32 either"),
        (lambda y: (y * 0).sum().abs().sqrt(), "gradients are not finite, in FP32 either"),
    ],
)
def test_a_loss_function_that_overflows(loss: Callable[..., torch.Tensor], said: str) -> None:
    report = diagnose(Ones(), torch.ones(4, 8), loss_fn=loss, **FP16)
    assert report.faults == ()
    (note,) = report.notes
    assert note.startswith(said)


def test_a_graph_that_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def clean(gm: fx.GraphModule, config: Any) -> bool:
        raise CannotRewrite("the moon is full")

    passes = tuple(clean if p.__name__ == "clean" else p for p in pipeline.PASSES)
    monkeypatch.setattr(pipeline, "PASSES", passes)
    report = diagnose(Ones(), torch.ones(4, 8), **FP16)
    assert report.notes == ("a graph was left in FP32, and not looked at: the moon is full",)
    assert (report.faults, report.nodes, report.dtype) == ((), (), "float32")


_NarrowOnly = function_of(
    lambda ctx, x: torch.mm(x, torch.eye(8, dtype=torch.float32)),
    lambda ctx, grad: torch.mm(grad, torch.eye(8, dtype=torch.float32)),
)


class NarrowOnly(Ones):
    """Fails in FP64."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _NarrowOnly.apply(self.linear(x) * 1e5)  # type: ignore[no-untyped-call,no-any-return]


def test_what_torch_cannot_compute_in_fp64() -> None:
    report = diagnose(NarrowOnly(), torch.ones(4, 8), **FP16)
    assert report.losses.keys() >= {"low", "fp32"}
    assert all(node.error is None or node.error < 0.01 for node in report.nodes)
    (linear,) = [node for node in report.nodes if node.node.op == "aten::linear"]
    assert linear.gradient_error < 0.01


# -- calls -----------------------------------------------------------------------------------------


def test_half_inputs_and_keywords() -> None:
    class Named(Ones):
        def forward(self, x: torch.Tensor, *, gain: float = 1.0) -> torch.Tensor:
            return self.linear(x) * gain

    assert diagnose(Named(), torch.ones(4, 8).half(), gain=2.0, **FP16).faults == ()


def masked(fused: bool) -> Any:
    """Attention whose first row may attend to nothing."""

    def forward(m: Any, x: torch.Tensor, empty: torch.Tensor) -> torch.Tensor:
        return m.attention(x, x, x, key_padding_mask=empty, need_weights=not fused)[0]

    return module_of(forward, attention=nn.MultiheadAttention(16, 2, batch_first=True))


@pytest.mark.parametrize("fused", [False, True])
def test_a_row_that_is_masked_out_completely(fused: bool) -> None:
    """F.scaled_dot_product_attention makes zeros of it, the softmax of MultiheadAttention NaN."""
    empty = torch.zeros(2, 6, dtype=torch.bool)
    empty[0] = True
    report = diagnose(masked(fused), torch.randn(2, 6, 16), empty, **FP16)
    assert [fault.kind for fault in report.faults] == ([] if fused else [FaultKind.OWN])
    for fault in report.faults:
        assert (fault.node.op, fault.node.module) == ("aten::softmax", "attention")
        assert "a row is masked out completely" in fault.reason
        assert fault.pins == ()


def test_the_default_loss() -> None:
    """The mean of all results; or the result's own `loss`, also of a dict."""

    class Twofold(Ones):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            y = self.linear(x)
            return {"loss": y.square().mean(), "logits": y}

    x = torch.randn(4, 8)
    model: nn.Module = Twofold()
    wanted = model(x)["loss"].item()
    assert diagnose(model, x, **FP16).losses["fp32"] == pytest.approx(wanted, rel=1e-5)
    model = Ones()
    wanted = model(x).mean().item()
    assert diagnose(model, x, **FP16).losses["fp32"] == pytest.approx(wanted, rel=1e-4)
