"""lay_low_images: what it lays out of a low convolution's operands, who reads that, what it leaves,
and that the values stay the same.
"""

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from joint_graphs import Joint
from torch import Tensor, fx

from mpcompile import ir
from mpcompile.ir import aten
from mpcompile.passes.joint.lay_images import lay_low_images

HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
BACKWARD = aten.convolution_backward.default


def graph_of(
    program: Callable[..., Any], *inputs: Tensor, callers: Collection[int] | None = None, **kw: Any
) -> fx.GraphModule:
    """The program's graph; `callers`: the results that the caller sees, as Inductor notes them."""

    def of_several(*inputs: Tensor) -> tuple[Any, ...]:
        results = program(*inputs)
        return (results,) if isinstance(results, Tensor) else tuple(results)

    gm = Joint(of_several, *inputs, device="cpu", **kw).gm
    if callers is not None:
        gm.graph.output_node().meta["user_visible_output_idxs"] = callers
    return gm


def laid_in(gm: fx.GraphModule) -> list[Any]:
    """Run the pass, which must tell the truth of itself; the nodes that it lays out."""
    before = ir.render(gm.graph)
    changed = lay_low_images(gm.graph)
    gm.graph.lint()
    laid, after = [node for node in gm.graph.nodes if is_laid(node)], ir.render(gm.graph)
    assert changed == bool(laid) == (after != before)
    assert not lay_low_images(gm.graph)
    assert ir.render(gm.graph) == after
    for node in laid:
        _, channels, height, width = ir.value(node).shape
        strides = (channels * height * width, 1, width * channels, channels)
        assert tuple(node.args[1]) == ir.value(node).stride() == strides
    return [node.args[0] for node in laid]


def is_laid(node: Any) -> bool:
    return ir.op_name(node) == ir.FORCE_STRIDES


def two(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.conv2d(F.relu(F.conv2d(x, w)), v)


def weights(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape).to(dtype) for shape in shapes]


def operands(dtype: torch.dtype = torch.float16, channels: int = 16) -> list[Tensor]:
    c = channels
    return weights(dtype, (2, c, 8, 8), (c, c, 3, 3), (c, c, 3, 3))


@HALVES
def test_a_forward(dtype: torch.dtype) -> None:
    gm = graph_of(two, *operands(dtype))
    assert len(laid_in(gm)) == 4  # what each reads, and its weight
    for node in gm.graph.find_nodes(op="call_function", target=aten.convolution.default):
        assert all(map(is_laid, node.args[:2]))


@HALVES
def test_forward_and_backward(dtype: torch.dtype) -> None:
    def step(x: Tensor, w: Tensor, v: Tensor) -> Any:
        w, v = w.requires_grad_(), v.requires_grad_()
        return torch.autograd.grad(two(x, w, v).float().square().mean(), [w, v])

    gm = graph_of(step, *operands(dtype))
    laid = laid_in(gm)
    backwards = gm.graph.find_nodes(op="call_function", target=BACKWARD)
    assert len(backwards) == 2
    for node in backwards:
        assert all(map(is_laid, node.args[:3]))
    assert len(laid) == 4 + 2  # two gradients besides: what both directions read is laid out once


def test_values_stay() -> None:
    given = [x.float() for x in operands()]
    gm = graph_of(lambda *xs: two(*(x.half() for x in xs)), *given)
    before = gm(*given)
    assert laid_in(gm)
    gm.recompile()
    torch.testing.assert_close(gm(*given), before, rtol=2**-9, atol=2**-9)  # sums in another order


@pytest.mark.slow("compiles by Inductor, or a deep model")
def test_symbolic_sizes() -> None:
    """The weights alone: a convolution with one that is channels-last is so itself."""
    gm = graph_of(two, *operands(), tracing_mode="symbolic")
    found = laid_in(gm)
    assert len(found) < 4
    for node in found:
        assert all(isinstance(size, int) for size in ir.value(node).shape[1:])


def test_a_symbolic_batch() -> None:
    x, w, v = operands()

    def program(batch: Tensor) -> Tensor:
        return two(x.new_zeros(batch.shape[0], 16, 8, 8) + 1, w, v)

    gm = graph_of(program, torch.zeros(5), tracing_mode="symbolic",
                  _allow_non_fake_inputs=True)  # fmt: skip
    images = [node for node in laid_in(gm) if not isinstance(ir.value(node).shape[0], int)]
    assert len(images) == 2


@pytest.mark.parametrize(
    ("shapes", "groups", "dtype"),
    [
        ([(2, 16, 8, 8), (16, 4, 3, 3)], 4, torch.float16),
        ([(2, 16, 8), (16, 16, 3)], 1, torch.float16),
        ([(2, 1, 8, 8), (16, 1, 3, 3)], 1, torch.float16),
        ([(2, 16, 1, 1), (16, 16, 1, 1)], 1, torch.float16),
        ([(2, 16, 8, 8), (16, 16, 3, 3)], 1, torch.float32),
    ],
    ids=["groups of channels", "one dimension", "one channel", "one pixel", "FP32"],
)
def test_what_is_left(shapes: list[tuple[int, ...]], groups: int, dtype: torch.dtype) -> None:
    convolve: Any = F.conv1d if len(shapes[0]) == 3 else F.conv2d
    gm = graph_of(lambda x, w: convolve(x, w, groups=groups), *weights(dtype, *shapes))
    assert not laid_in(gm)


def test_a_depthwise_convolution_beside_others() -> None:
    given = weights(torch.float16, (2, 16, 8, 8), (16, 1, 3, 3), (16, 16, 1, 1))
    found = laid_in(graph_of(lambda x, w, v: F.conv2d(F.conv2d(x, w, groups=16), v), *given))
    assert [tuple(ir.value(node).shape) for node in found] == [(2, 16, 8, 8), (2, 16, 6, 6)]


def test_what_is_stored_is_laid_out_and_what_the_caller_sees_is_not() -> None:
    def program(x: Tensor, w: Tensor) -> Any:
        image = F.relu(x)
        return F.conv2d(image, w), image, image

    gm = graph_of(program, *operands()[:2], callers=[0, 1])
    laid_in(gm)
    _, seen, stored = gm.graph.output_node().args[0]
    assert is_laid(stored)
    assert stored.args[0] is seen


def test_without_a_word_of_inductors_all_results_are_the_callers() -> None:
    gm = graph_of(lambda x, w: (F.conv2d(y := F.relu(x), w), y), *operands()[:2])
    laid_in(gm)
    assert not any(map(is_laid, gm.graph.output_node().args[0]))


def test_who_reads_by_strides_or_writes_reads_what_was() -> None:
    def program(x: Tensor, w: Tensor) -> Any:
        image = F.relu(x)
        strided = torch.as_strided(image, (4,), (3,))
        pooled = F.avg_pool2d(image, 2)
        return F.conv2d(x, w), F.conv2d(image, w), strided, pooled, image + 1

    gm = graph_of(program, *operands()[:2])
    x, *_ = gm.graph.find_nodes(op="placeholder")
    with gm.graph.inserting_before(gm.graph.output_node()):
        write = gm.graph.call_function(aten.copy_.default, (x, x))
    laid_in(gm)
    assert not is_laid(write.args[0])
    for name, laid in [("as_strided", False), ("avg_pool2d", True), ("add.Tensor", True)]:
        (reader,) = [n for n in gm.graph.nodes if str(n.target) == f"aten.{name}"
                     or str(n.target) == f"aten.{name}.default"]  # fmt: skip
        assert is_laid(reader.args[0]) == laid, name


def test_operators_of_others_read_what_was() -> None:
    with torch.library._scoped_library("laid_images", "DEF") as library:
        library.define("seen(Tensor x) -> Tensor")
        library.impl("seen", lambda x: x.clone(), "CompositeExplicitAutograd")

        def program(x: Tensor, w: Tensor) -> Any:
            image = F.relu(x)
            return F.conv2d(image, w), torch.ops.laid_images.seen(image)

        gm = graph_of(program, *operands()[:2])
        laid_in(gm)
        (seen,) = [n for n in gm.graph.nodes if "laid_images" in str(n.target)]
        assert not is_laid(seen.args[0])
