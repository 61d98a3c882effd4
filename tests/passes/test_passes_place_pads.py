"""place_pads: lanes stay where they are exact. That everybody else reads the real size is seen by
what comes out: `tests/padding`.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import leaf
from padded_graphs import PAD, SLICE, Chain, nodes, ours, pads_of_weights, placed, values_of
from torch import Tensor

from mpcompile import ir
from mpcompile.capture import pipeline
from mpcompile.ir import spec
from mpcompile.passes.graph.read_copies import read_copies
from mpcompile.rules.policy import Policy

# -- chains and weights ----------------------------------------------------------------------------


def test_weights_are_padded_after_their_cast_and_nothing_is_cut_between_products() -> None:
    stage = placed(Chain(), torch.randn(8, 257))
    first, second = nodes(stage, "linear")
    (gelu,) = nodes(stage, "gelu")
    assert gelu.all_input_nodes == [first]
    assert second.all_input_nodes[0] is gelu
    (cut,) = ours(stage, SLICE)
    assert cut.all_input_nodes == [second]
    weights = pads_of_weights(stage)
    assert len(weights) == 4
    for node in weights:
        (cast,) = node.all_input_nodes
        assert ir.is_cast(cast)
        assert ir.is_parameter(cast.all_input_nodes[0])
        assert list(cast.users) == [node]


def test_copies_are_stored_padded() -> None:
    parameters = dict.fromkeys(range(5))
    stage = placed(Chain(), torch.randn(8, 257), level="O2", copied=parameters, until=read_copies)
    assert pads_of_weights(stage) == []
    copies = [n for n in stage.gm.graph.find_nodes(op="placeholder") if ir.is_parameter(n)]
    assert sorted(tuple(ir.shape(n)) for n in copies) == [
        (264,), (264, 1008), (1008,), (1008, 264),
    ]  # fmt: skip
    assert not [n for n in stage.gm.graph.nodes if ir.is_cast(n) and ir.is_parameter(n.args[0])]  # type: ignore[arg-type]


def test_a_copy_that_another_graph_stores_in_its_own_shape_is_cut_and_padded() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w)

    for stored in ((21, 13), (24, 16), (32, 16)):
        stage = placed(
            program, leaf(8, 13), leaf(21, 13), level="O2", copied={1: stored}, until=read_copies
        )
        assert tuple(ir.shape(stage.node("w"))) == stored
        (linear,) = nodes(stage, "linear")
        weight = linear.all_input_nodes[1]
        assert tuple(ir.shape(weight)) == (24, 16)
        assert (weight is stage.node("w")) == (stored == (24, 16))


def test_readers_share_a_pad_and_a_cut() -> None:
    def program(x: Tensor, a: Tensor, b: Tensor) -> Any:
        h = F.linear(x, a)
        return F.linear(x, b), F.linear(h, b), F.linear(h, b), h.softmax(-1), h.sum(-1)

    stage = placed(program, leaf(8, 13), leaf(13, 13), leaf(21, 13))
    pads = ours(stage, PAD)
    assert sorted(n.name for n in pads) == ["a_f16_padded", "b_f16_padded", "x_f16_padded"]
    (cut,) = [n for n in ours(stage, SLICE) if n.all_input_nodes == [stage.node("linear")]]
    assert [n.name for n in cut.users] == ["linear_f32"]


# -- what keeps lanes ------------------------------------------------------------------------------

KEEP = {
    "gelu": (F.gelu, 0.0),
    "relu": (torch.relu, 0.0),
    "sigmoid": (torch.sigmoid, 0.5),
    "exp": (torch.exp, 1.0),
    "multiple": (lambda x: 3 * x, 0.0),
    "shifted": (lambda x: x + 0.5, 0.5),
    "back and forth": (lambda x: x + 0.5 - 0.5, 0.0),
    "shifted log": (lambda x: (x + 1).log(), 0.0),
    "square": (torch.square, 0.0),
    "detach": (torch.detach, 0.0),
    "view": (lambda x: x.view(2, 4, 1001).relu().view(8, 1001), 0.0),
}
CUT: dict[str, Callable[[Tensor], Tensor]] = {
    "log": torch.log,
    "reciprocal": torch.reciprocal,
    "rsqrt": torch.rsqrt,
    "division": lambda x: 1 / x,
    "division of two": lambda x: x / x.exp().sub(1),
    "power": lambda x: x**-2,
    "infinite slope": torch.sqrt,
    "overflow in FP16": lambda x: (x + 100.0).exp(),
    "softmax": lambda x: x.softmax(-1),
    "sum": lambda x: x - x.sum(-1, keepdim=True),
    "layer norm": lambda x: F.layer_norm(x, (1001,)),
    "flip": lambda x: x.flip(-1),
    "a zero but for rounding": lambda x: x + 0.3 - 0.3,
    "split": lambda x: x.view(8, 7, 143).relu().view(8, 1001),
}


@pytest.mark.parametrize("between", KEEP)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_known_number_keeps_the_chain(between: str, level: str) -> None:
    function, content = KEEP[between]
    stage = placed(Chain(function), torch.randn(8, 257), level=level)
    up, down = nodes(stage, "linear")
    (cut,) = ours(stage, SLICE)
    assert cut.all_input_nodes == [down]
    values = values_of(stage)
    assert (values[down.all_input_nodes[0].name][..., 1001:] == content).all()
    assert (values[up.name][..., 1001:] == 0).all()


@pytest.mark.parametrize("between", CUT)
def test_what_is_not_known_or_not_finite_cuts_the_chain(between: str) -> None:
    stage = placed(Chain(CUT[between]), torch.randn(8, 257))
    _, down = nodes(stage, "linear")
    assert len(ours(stage, SLICE)) == 2
    assert ir.shape(down)[-1] == 264
    (between_products,) = [n for n in ours(stage, PAD) if n not in pads_of_weights(stage)][1:]
    assert between_products in down.all_input_nodes
    assert list(ir.shape(between_products)) == [8, 1008]


@pytest.mark.parametrize(("low", "cuts"), [([], 1), (["pow"], 2)])
def test_a_slope_beyond_fp16_cuts_the_chain_where_fp16_has_to_hold_it(
    low: list[str], cuts: int
) -> None:
    """2**15 fits, its slope doesn't: zero times infinity would be NaN."""
    chain = Chain(lambda x: (x + 2) ** 15)
    stage = placed(chain, torch.randn(8, 257), policy=Policy(low=low))
    assert len(ours(stage, SLICE)) == cuts


# -- the spec --------------------------------------------------------------------------------------


def test_the_spec_wants_lanes_cut_off() -> None:
    stage = placed(lambda x, w: F.linear(x, w).softmax(-1), leaf(8, 13), leaf(21, 13))
    cut = stage.node("linear_cut")
    cut.replace_all_uses_with(stage.node("linear"))
    ir.set_mark(stage.node("linear_f32"), ir.mark(stage.node("linear")))
    with pytest.raises(spec.SpecError, match="linear_f32 reads the lanes of linear"):
        pipeline.verify(stage.gm, "place_pads")


def test_the_spec_wants_the_shapes_that_were_planned() -> None:
    stage = placed(F.linear, leaf(8, 13), leaf(21, 13))
    linear = stage.node("linear")
    ir.set_value(linear, ir.value(stage.node("linear_cut")))
    with pytest.raises(spec.SpecError, match=r"linear is f16\[8, 21\], planned \(8, 24\)"):
        pipeline.verify(stage.gm, "place_pads")
