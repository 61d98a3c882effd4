"""`disable_passes=`: each pass that may be left out is, alone; the others refuse."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import MLP, check, leaf
from exact import InFP64, results
from module_of import module_of
from torch import nn

from mpcompile import MPCompileError, MPOptimizer, compiled_plans, mpcompile
from mpcompile.capture import pipeline

PASSES = tuple(pipeline.MAY_BE_DISABLED)


def attention_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Attention with a mask, a softmax beside it, a square, and dims that are worth padding."""
    q, k, v = self.qkv(x).chunk(3, -1)
    own = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    weights = (q @ k.transpose(-1, -2)).softmax(-1).to(q.dtype)
    return self.out(own * own + weights @ v)


def attention() -> Any:
    return module_of(attention_forward, qkv=nn.Linear(12, 36), out=nn.Linear(12, 7))


def convolve(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Values written in place, and a norm."""
    hidden = F.relu(self.conv(x), inplace=True) * 3
    hidden = self.norm(hidden.add_(hidden.mean()))
    return self.head(hidden.mean((2, 3)).mul_(2))


def convolutions() -> Any:
    parts = {"conv": nn.Conv2d(3, 5, 3), "norm": nn.BatchNorm2d(5), "head": nn.Linear(5, 3)}
    return module_of(convolve, **parts)


def classifier() -> Any:
    """A head and its loss."""
    return module_of(
        lambda m, x: F.cross_entropy(m.head(m.body(x).tanh()), torch.arange(4) % 11),
        body=nn.Linear(6, 8), head=nn.Linear(8, 11),
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (MLP, (3, 16)),
    "attention": (attention, (2, 9, 12)),
    "convolutions": (convolutions, (2, 3, 6, 6)),
    "classifier": (classifier, (4, 6)),
}
EACH_MODEL = pytest.mark.parametrize("model", MODELS)


@EACH_MODEL
@pytest.mark.parametrize("name", PASSES)
def test_gradients_without_it_are_those_of_fp64(name: str, model: str) -> None:
    """The graph run in FP64, where nothing but the rewriting can change a number; it is verified
    after each pass.
    """
    torch.manual_seed(0)
    kind, size = MODELS[model]
    program, x = kind(), leaf(*size)
    exact = copy.deepcopy(program).double()
    # What makes the pass do something, where it isn't the program.
    asks = {"leave_unpromised": {"promised": False}, "read_copies": {"copied": {0: None, 1: None}}}
    backend = InFP64("always", "O2", without=[name], fuse_head=True, **asks.get(name, {}))
    found = results(program, [x], backend)
    wanted = results(exact, [x.double()], "eager")
    assert found.keys() == wanted.keys()
    for what, value in wanted.items():
        scale = value.abs().max().item()
        tolerance = 1e-11 if what.startswith("output") else 1e-5
        torch.testing.assert_close(
            found[what].double(), value, rtol=tolerance, atol=tolerance * max(scale, 1e-3)
        )


@EACH_MODEL
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_model_trains_without_all_of_them(level: str, model: str) -> None:
    kind, size = MODELS[model]
    options = {"disable_passes": PASSES, "pad": "always", "fuse_head": kind is classifier}
    check(kind(), leaf(*size), level=level, **options)


@pytest.mark.slow("compiles by Inductor, or a deep model")
def test_the_models_give_the_passes_something_to_do() -> None:
    """But for one that only decides, and reports no change."""
    changed: set[str] = set()
    for kind, size in MODELS.values():
        model = kind()
        options = {"level": "O2", "emit": "eager", "pad": "always", "fuse_head": kind is classifier}
        run = mpcompile(model, dtype=torch.bfloat16, **options)
        optimizer = MPOptimizer(torch.optim.SGD(model.parameters(), 0.1), emit="eager")
        run(leaf(*size)).sum().backward()
        optimizer.step()
        changed.update(name for plan in compiled_plans(run) for name in plan.changed)
    reported = {*PASSES} - {"leave_unpromised", "plan_pads"}  # both only decide
    assert reported <= changed


@pytest.mark.slow("compiles by Inductor, or a deep model")
def test_an_o2_model_trains_without_reading_copies() -> None:
    model, x = MLP(), torch.randn(3, 16)
    full = copy.deepcopy(model)
    optimizers = []
    mpcompile(model, level="O2", dtype=torch.float16, emit="eager", disable_passes=["read_copies"])
    for one in (model, full):
        optimizer = torch.optim.SGD(one.parameters(), 0.1)
        optimizers.append(MPOptimizer(optimizer) if one is model else optimizer)
    for _ in range(3):
        for one, optimizer in zip((model, full), optimizers, strict=True):
            optimizer.zero_grad()
            one(x).square().mean().backward()
            optimizer.step()
    assert all(n.planned.startswith("f16") for n in compiled_plans(model)[0].nodes
               if n.name.endswith("weight_f16"))  # fmt: skip
    for ours, theirs in zip(model.parameters(), full.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)


# -- what can't be left out ------------------------------------------------------------------------


def test_every_pass_is_in_one_of_the_tables() -> None:
    names = {pass_.__name__ for pass_ in pipeline.PASSES}
    assert pipeline.MAY_BE_DISABLED.keys() | pipeline.MUST_RUN.keys() == names
    assert not pipeline.MAY_BE_DISABLED.keys() & pipeline.MUST_RUN.keys()


@pytest.mark.parametrize("name", pipeline.MUST_RUN)
def test_the_others_refuse_and_say_why(name: str) -> None:
    with pytest.raises(MPCompileError) as caught:
        mpcompile(MLP(), disable_passes=[name])
    assert f"{name!r} can't be disabled: {pipeline.MUST_RUN[name]}" in str(caught.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (["plan_pad"], "no pass 'plan_pad'; did you mean 'plan_pads'"),
        ("plan_pads", "give a list of names of passes"),
        (3, "give a list of names of passes"),
    ],
)
def test_what_is_no_list_of_passes(value: Any, message: str) -> None:
    with pytest.raises(MPCompileError, match=message):
        mpcompile(MLP(), disable_passes=value)
