"""store_masks_as_bytes: what it rewrites in the halves of a joint graph, and what it leaves."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn

from mpcompile import ir, mpcompile
from mpcompile.capture.capture import capture
from mpcompile.capture.surroundings import around_now
from mpcompile.devices.cpu import CPU
from mpcompile.lower.emitter import emit
from mpcompile.lower.joint import JointPasses
from mpcompile.passes.joint.kept_for_backward import store_masks_as_bytes

pytestmark = pytest.mark.slow("compiles by Inductor")

REST = pytest.mark.sweep("programs that are chains of others")

BF16 = torch.bfloat16
Program = Callable[..., Any]


@pytest.fixture(autouse=True)
def no_cache() -> Iterator[None]:
    """A cached graph isn't parted again."""
    with torch._functorch.config.patch(enable_autograd_cache=False):
        yield


class Halves:
    """Compiles programs with the pass, and keeps what it saw and what it made of it."""

    def __init__(self, use: bool = True) -> None:
        self.use = use
        self.before: list[str] = []
        self.after: list[str] = []
        self.changed: list[bool] = []

    def pass_(self, forward: fx.Graph, backward: fx.Graph, own_results: int) -> bool:
        self.before.append(_text(forward) + _text(backward))
        changed = self.use and store_masks_as_bytes(forward, backward, own_results)
        forward.lint()
        backward.lint()
        self.after.append(_text(forward) + _text(backward))
        self.changed.append(changed)
        return changed

    def compile(self, program: Program, **kw: Any) -> Program:
        def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            joint = JointPasses(halves=(self.pass_,))
            return emit(
                capture(gm, inputs, around_now(gm, inputs)), inputs, "inductor", joint=joint
            )

        torch._dynamo.reset()
        return torch.compile(program, backend=backend, **kw)


def _text(graph: fx.Graph) -> str:
    return ir.render(graph).replace("prims::convert_element_type", "cast")


def run(program: Program, x: torch.Tensor) -> list[torch.Tensor]:
    """The results, and the gradient of the sum of those that have one."""
    x = x.clone().requires_grad_()
    torch.manual_seed(0)
    results = program(x)
    results = list(results) if isinstance(results, tuple) else [results]
    torch.stack([r.float().sin().sum() for r in results if r.requires_grad]).sum().backward()
    assert x.grad is not None
    return [*(r.detach() for r in results), x.grad]


def residual(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x + x.roll(1)).to(BF16)


def test_the_sign_of_a_relu() -> None:
    halves = Halves()
    run(halves.compile(residual), torch.randn(64, 32))
    (text,) = halves.after
    for line in (
        "le: b8[64, 32] = le(relu, 0)",
        "convert_element_type_default: f32[64, 32] = cast(le, f32)",
        "convert_element_type_default_1: u8[64, 32] = cast(convert_element_type_default, u8)",
        "return convert_element_type, convert_element_type_default_1",
        "le: u8[64, 32] = input",
        "convert_element_type_default: f32[64, 32] = cast(le, f32)",
        "ne_scalar: b8[64, 32] = ne(convert_element_type_default, 0)",
        "where: f32[64, 32] = where(ne_scalar, full_default, convert_element_type_1)",
    ):
        assert line in text
    assert "le: b8[64, 32] = input" in halves.before[0]
    assert halves.changed == [True]


PROGRAMS: dict[str, Program] = {
    "relu": residual,
    "dropout": lambda x: nn.functional.dropout(x.exp(), 0.3).to(BF16),
    "two masks": lambda x: torch.relu(torch.relu(x.cos()).roll(1) - 0.5).clamp(0.1, 0.3).to(BF16),
    "maximum": lambda x: torch.maximum(x.sin(), x.roll(1)).to(BF16),
    "amax": lambda x: x.sin().amax(1),
    "where": lambda x: torch.where((x > 0) & (x.exp() < 2), x * 3, x.sin()).to(BF16),
    "a row": lambda x: torch.where(x.sum(1, keepdim=True) > 0, x * 3, x.sin()).to(BF16),
    "transposed": lambda x: torch.relu(x.t() + 1).to(BF16),
    "nothing": lambda x: torch.relu(x[:0] + 1).to(BF16),
}


# By default each program once, every other one with symbolic sizes. The other halves follow.
PAIRS = [(name, bool(number % 2) is not other) for other in (False, True)
         for number, name in enumerate(PROGRAMS)]  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "dynamic"),
    [
        pytest.param(
            name, dynamic, marks=REST if number >= len(PROGRAMS) else (),
            id=f"{name}-{'symbolic' if dynamic else 'fixed'}",
        )
        for number, (name, dynamic) in enumerate(PAIRS)
    ],
)  # fmt: skip
def test_the_same_results_and_gradients(name: str, dynamic: bool) -> None:
    x, program = torch.randn(24, 40), PROGRAMS[name]
    x[0, 0], x[0, 1], x[0, 2] = float("nan"), float("inf"), 0.0
    expected = run(Halves(use=False).compile(program, dynamic=dynamic), x)
    found = run(Halves().compile(program, dynamic=dynamic), x)
    # A kernel that becomes vectors has other last bits of sines; a wrong mask is off by all of one.
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-6, atol=1e-6)


def test_every_mask_that_is_kept_is_bytes() -> None:
    for name in ("relu", "dropout", "transposed"):
        halves = Halves()
        run(halves.compile(PROGRAMS[name]), torch.randn(24, 40))
        assert re.search(r"b8\[.*= input", halves.before[0]), name
        assert not re.search(r"b8\[.*= input", halves.after[0]), name


def _returned(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mask = x.sin() > 0
    return torch.where(mask, x.cos(), 0.0).to(BF16), mask


def _counted(x: torch.Tensor) -> torch.Tensor:
    """The mask is the index of an operator that no fused kernel does."""
    mask = x.sin() > 0
    return torch.where(mask, x, 0).to(BF16) * mask.nonzero_static(size=8).float().mean()


def _of_the_user(x: torch.Tensor) -> torch.Tensor:
    return torch.where(MASK, x.sin(), 0.0).to(BF16)


MASK = torch.rand(24, 40) > 0.5


@pytest.mark.parametrize("program", [_returned, _counted, _of_the_user])
def test_left_alone(program: Program) -> None:
    halves = Halves()
    run(halves.compile(program), torch.randn(24, 40))
    assert halves.changed == [False]
    assert "u8[" not in halves.after[0]


def test_left_alone_where_bools_are_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CPU, "slow_bools", False)
    halves = Halves()
    run(halves.compile(residual), torch.randn(64, 32))
    assert halves.changed == [False]
    assert halves.after == halves.before


def test_a_model_keeps_bytes() -> None:
    """From `mpcompile(model)` on: between forward and backward lie bytes, and no bools."""
    kept: list[torch.dtype] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept.append(x.dtype)
        return x

    class Net(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self[1](torch.relu(self[0](x) + x))

    model = mpcompile(Net(nn.Linear(32, 32), nn.Linear(32, 4)), dtype=BF16)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(torch.randn(16, 32)).sum().backward()
    assert torch.uint8 in kept
    assert torch.bool not in kept
