"""Derivatives inside of what is compiled: low, as in FP64 to second order, and in training."""

import copy
import statistics
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from module_of import function_of, module_of
from torch import nn
from versions import since

from benchmarks.second_order import DERIVATIVES, OTHERS, found_of, inputs
from mpcompile import MPOptimizer, compiled_plans, mpcompile
from mpcompile.capture import derivatives
from mpcompile.errors import MPCompileError

BF16, FP16 = torch.bfloat16, torch.float16
FORMS = ("mpcompile(model)", "mpcompile(step)")
TOLERANCE = {BF16: 0.05, FP16: 0.01}

# Before 2.13, a leaf that is made within a graph breaks it.
pytestmark = since("2.13", "Dynamo traces no leaf that a program makes")


@pytest.fixture(autouse=True)
def as_users_see_it() -> Iterator[None]:
    with warnings.catch_warnings():  # of torch's own, as it compiles
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", "flex_attention called without")
        yield


@pytest.mark.slow("derivatives of derivatives")
@pytest.mark.sampled(5)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", DERIVATIVES)
def test_all_products_are_bf16(name: str, form: str) -> None:
    found = found_of(DERIVATIVES[name], form, BF16)
    assert found.error == ""
    assert found.low == 1
    assert found.off < TOLERANCE[BF16]


@pytest.mark.slow("derivatives of derivatives")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", DERIVATIVES)
def test_inner_gradients_stay_fp32_beside_fp16(name: str) -> None:
    found = found_of(DERIVATIVES[name], FORMS[0], FP16)
    assert found.error == ""
    assert found.off < TOLERANCE[FP16]
    assert found.low > 0.1


@pytest.mark.slow("derivatives of derivatives")
@pytest.mark.parametrize("name", OTHERS)
def test_control_flow_is_right_and_says_what_stays(name: str) -> None:
    found = found_of(OTHERS[name], FORMS[0], BF16)
    assert found.error == ""
    assert 0 < found.low < 1
    assert found.off < TOLERANCE[BF16]


def gradients(
    build: Callable[[], nn.Module], dtype: torch.dtype, level: str, emit: str
) -> tuple[list[torch.Tensor], list[torch.Tensor], nn.Module]:
    """Of a compiled program, and in FP64."""
    torch.manual_seed(1)
    model, x = build(), inputs()
    exact = copy.deepcopy(model).double()
    exact(x.double()).backward()
    mpcompile(model, dtype=dtype, level=level, emit=emit, strict=True)
    model(x).backward()
    found = [[p.grad for p in m.parameters() if p.grad is not None] for m in (model, exact)]
    return found[0], found[1], model


@pytest.mark.slow_rows("derivatives of derivatives")
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", ["R1", "Burgers' equation", "MAML", "per-sample gradients"])
def test_o2(name: str, dtype: torch.dtype) -> None:
    """Results are low in between, so the bound is wider."""
    found, wanted, _ = gradients(DERIVATIVES[name], dtype, "O2", "eager")
    for got, want in zip(found, wanted, strict=True):
        assert want.any()
        assert (got - want).norm() < 2 * TOLERANCE[dtype] * want.norm()


@pytest.mark.slow("derivatives of derivatives")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["energy and forces", "per-sample gradients"])
def test_under_inductor(name: str) -> None:
    found, wanted, _ = gradients(DERIVATIVES[name], BF16, "O1", "inductor")
    for got, want in zip(found, wanted, strict=True):
        assert want.any()
        assert (got - want).norm() < TOLERANCE[BF16] * want.norm()


def test_the_plan_says_why_an_inner_gradient_is_fp32() -> None:
    *_, model = gradients(DERIVATIVES["energy and forces"], FP16, "O1", "eager")
    nodes = compiled_plans(model)[-1].nodes
    products = [n for n in nodes if n.op in ("aten::mm", "aten::addmm")]
    assert {n.precision for n in products if n.op == "aten::addmm"} == {"LOW"}
    inner = [n for n in products if n.op == "aten::mm"]
    assert {n.precision for n in inner} == {"FULL"}
    assert all("a gradient inside of the program" in n.reason for n in inner)


# Its backward is none of its forward's.
Tripled = function_of(lambda ctx, x: x.sin(), lambda ctx, grad: grad * 3)


def test_a_function_inside_of_a_derivative_is_refused() -> None:
    """Torch traces its backward without a history: the gradient would lack a term, in FP32 too."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        at = x.detach().requires_grad_()
        value = Tripled.apply(m.net(at)).square().sum()
        return torch.autograd.grad(value, at, create_graph=True)[0].square().mean()

    model = module_of(forward, net=nn.Linear(16, 16))
    mpcompile(model, dtype=BF16, emit="aot_eager")
    with pytest.raises(MPCompileError, match=r"Function is inside of a derivative"):
        model(torch.randn(8, 16))


def test_what_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were autograd's own detaches left in, a part of the second derivative would be lost."""
    monkeypatch.setattr(derivatives, "_drop_detaches", lambda graph: None)
    with pytest.raises(MPCompileError, match="another one when it is written out"):
        gradients(DERIVATIVES["energy and forces"], BF16, "O1", "eager")


def test_a_detach_of_the_programs_own_stays() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        def energy(z: torch.Tensor) -> torch.Tensor:
            hidden = m.net(z).tanh()
            return (hidden * hidden.detach()).sum()

        return torch.func.grad(energy)(x).square().mean()

    def half() -> nn.Module:
        return module_of(forward, net=nn.Linear(16, 16))

    found, wanted, _ = gradients(half, BF16, "O1", "eager")
    for got, want in zip(found, wanted, strict=True):
        assert want.any()
        assert (got - want).norm() < TOLERANCE[BF16] * want.norm()


def losses(name: str, seed: int, level: str | None, steps: int = 30) -> float:
    """The mean loss of the last steps of a short training."""
    torch.manual_seed(seed)
    model = DERIVATIVES[name]()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=3e-3)
    if level == "O2":
        optimizer = MPOptimizer(optimizer)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run: Any = step
    if level is not None:
        run = mpcompile(step, dtype=BF16, level=level, emit="aot_eager", strict=True)
    data = torch.Generator().manual_seed(0)
    found = [float(run(torch.randn(32, 16, generator=data))) for _ in range(steps)]
    assert getattr(run, "left", None) is None
    return statistics.mean(found[-10:])


@pytest.mark.slow("derivatives of derivatives")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(
    "name", ["WGAN-GP", "R1", "Burgers' equation", "energy and forces", "MAML"]
)
def test_trains_as_in_fp32(name: str, level: str) -> None:
    """As near to FP32 with the same seed as another seed is."""
    of_seeds = [losses(name, seed, None) for seed in range(5)]
    ours = losses(name, 0, level)
    assert abs(ours - of_seeds[0]) <= max(of_seeds) - min(of_seeds)
