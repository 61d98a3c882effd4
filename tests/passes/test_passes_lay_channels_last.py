"""lay_channels_last: which images it lays out in a graph of forward and backward, what it leaves,
and that a whole step compiled with it gives what it gives without.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from module_of import module_of
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from mpcompile import ir, mpcompile
from mpcompile.ir import aten
from mpcompile.passes.joint.lay_images import lay_channels_last

LAID = torch.ops.prims.inductor_force_stride_order.default


class Branches(nn.Module):
    """Two convolutions of one image, joined, and pools: every operator that the pass knows."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.left = nn.Conv2d(16, 16, 1)
        self.right = nn.Conv2d(16, 16, 3, padding=1)
        self.last = nn.Conv2d(48, 16, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.stem(x)), 2)
        pooled = F.avg_pool2d(x, 3, stride=1, padding=1)
        x = torch.cat([F.relu(self.left(x)), F.relu(self.right(x)), pooled], 1)
        return F.adaptive_avg_pool2d(self.last(x) + x[:, :16], 2).flatten(1)


def sliced(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Views of the input are read by a convolution, and by others."""
    a, b = x.split(16, 1)
    return self.conv(a) * a.sum() + F.max_pool2d(b, 3, stride=1, padding=1)


def attends(self: Any, x: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """Values of four dims beside a convolution, made of no image and read by no convolution."""
    weights = self.mix(heads).softmax(-1)
    again = torch.cat([weights.exp(), weights.tanh()])
    return (again @ again.mT).mean() + F.relu(self.conv(x)).mean()


def graph_of(model: nn.Module, *inputs: torch.Tensor, backward: bool, mode: str) -> fx.Graph:
    """Forward and backward as one graph of ATen operators, inputs in BF16."""
    parameters = dict(model.named_parameters())

    def step(parameters: dict[str, torch.Tensor], *inputs: torch.Tensor) -> Any:
        cast = {name: value.bfloat16() for name, value in parameters.items()}
        # as Inductor writes it
        low = [torch.ops.prims.convert_element_type(x, torch.bfloat16) for x in inputs]
        loss = torch.func.functional_call(model, cast, tuple(low)).float().square().mean()
        return torch.autograd.grad(loss, list(parameters.values())) if backward else loss

    return make_fx(step, tracing_mode=mode)(parameters, *inputs).graph


def laid_in(
    model: nn.Module, *inputs: torch.Tensor, backward: bool = True, mode: str = "fake"
) -> list[fx.Node]:
    """What the pass lays out."""
    graph = graph_of(model, *inputs, backward=backward, mode=mode)
    before = ir.render(graph)
    changed = lay_channels_last(graph)
    graph.lint()
    laid = graph.find_nodes(op="call_function", target=LAID)
    assert changed == bool(laid) == (ir.render(graph) != before)
    return [node.args[0] for node in laid]


def shapes(nodes: list[fx.Node]) -> set[tuple[int, ...]]:
    return {tuple(ir.tensor(node).shape[1:]) for node in nodes}  # type: ignore[union-attr]


def test_images() -> None:
    found = laid_in(Branches(), torch.randn(4, 3, 16, 16))
    # the stem's result, what is pooled, and the branches joined; the input has few channels
    assert shapes(found) == {(16, 16, 16), (16, 8, 8), (48, 8, 8)}
    for node in found:
        (laid,) = node.users  # all others read the one that is laid out: nothing is stored twice
        _, channels, height, width = ir.tensor(laid).shape  # type: ignore[union-attr]
        strides = [channels * height * width, 1, width * channels, channels]
        assert laid.args[1] == strides
        assert list(ir.tensor(laid).stride()) == strides  # type: ignore[union-attr]
        assert len(laid.users) > 1
    # So does the backward of a convolution: there Inductor would take the strides for given.
    backwards = found[0].graph.find_nodes(
        op="call_function", target=aten.convolution_backward.default
    )
    assert len(backwards) == 4
    of_input = [node for node in backwards if ir.tensor(node.args[1]).shape[1] == 3]  # type: ignore[union-attr, arg-type]
    assert len(of_input) == 1
    assert all(node.args[1].target is LAID for node in backwards if node not in of_input)


def test_a_graph_without_a_backward() -> None:
    """What a convolution reads there, Inductor lays out as it is read."""
    assert not laid_in(Branches(), torch.randn(4, 3, 16, 16), backward=False)


def test_views() -> None:
    """One that is laid out would be a copy, which a later write to its base would not reach."""
    assert not laid_in(
        module_of(sliced, conv=nn.Conv2d(16, 16, 3, padding=1)), torch.randn(2, 32, 8, 8)
    )


def test_what_is_no_image() -> None:
    found = laid_in(
        module_of(attends, conv=nn.Conv2d(1, 16, 3, padding=1), mix=nn.Linear(4, 4)),
        torch.randn(2, 1, 8, 8),
        torch.randn(2, 3, 4, 4),
    )
    assert shapes(found) <= {(16, 8, 8)}


@pytest.mark.parametrize(
    ("channels", "pixels", "inner", "laid"),
    [(1, 8, 17, {(17, 8, 8)}), (20, 1, 17, set()), (15, 8, 15, set())],
    ids=["one channel", "one pixel", "few channels"],
)
def test_images_that_are_left(
    channels: int, pixels: int, inner: int, laid: set[tuple[int, ...]]
) -> None:
    """Where both orders of strides are the same memory, a convolution's result has the input's;
    where channels are few, kernels are faster along a row of pixels.
    """
    model = nn.Sequential(
        nn.Conv2d(channels, inner, 3, padding=1), nn.Tanh(), nn.Conv2d(inner, 3, 1)
    )
    assert shapes(laid_in(model, torch.randn(2, channels, pixels, pixels))) == laid


@pytest.mark.slow("compiles by Inductor, or a deep model")
def test_symbolic_sizes() -> None:
    assert not laid_in(Branches(), torch.randn(4, 3, 16, 16), mode="symbolic")


# -- in a whole step -------------------------------------------------------------------------------


@pytest.fixture
def no_cache(own_inductor_cache: None) -> Iterator[None]:
    """A cached graph isn't lowered again."""
    with torch._inductor.config.patch(fx_graph_cache=False):
        yield


@pytest.mark.slow("compiles by Inductor, or a deep model")
@pytest.mark.usefixtures("no_cache")
def test_results_and_gradients_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their values and their strides; images are among the results."""
    torch.manual_seed(0)
    model, x = Branches(), torch.randn(4, 3, 16, 16)

    def run(use: bool) -> list[torch.Tensor]:
        changed: list[bool] = []

        def lowered(graph: fx.Graph) -> bool:
            changed.append(use and lay_channels_last(graph))
            graph.lint()
            return changed[-1]

        monkeypatch.setattr("mpcompile.lower.joint.lay_channels_last", lowered)
        torch._dynamo.reset()
        model.zero_grad()

        @mpcompile(dtype=torch.bfloat16)
        def step(x: torch.Tensor) -> Any:
            stem = F.relu(model.stem(x))
            image = F.max_pool2d(F.relu(model.left(stem)) + model.right(stem), 2)
            image.float().square().mean().backward()
            return stem.detach(), image.detach()

        results = step(x)
        assert changed == [use]
        return [*results, *(p.grad for p in model.parameters() if p.grad is not None)]

    without, found = run(False), run(True)
    assert len(found) == 8
    # sums over other strides have other last bits
    torch.testing.assert_close(found, without, rtol=2**-7, atol=1e-5, check_stride=True)
