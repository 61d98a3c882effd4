"""pad: which dims of which products are padded, and to what size; inside of checkpoints, after
writes in place and on the way of gradients, too.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import SETTINGS, check, leaf
from exact import CORES, assert_exact
from graphs import Stage, ran
from padded_graphs import (
    PAD,
    SLICE,
    Chain,
    alignments,
    nodes,
    ours,
    pads_of_weights,
    placed,
    values_of,
)
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from mpcompile import ir
from mpcompile.capture import pipeline
from mpcompile.ir import spec
from mpcompile.passes.graph.higher_order import outline
from mpcompile.passes.graph.place_pads import place_pads
from mpcompile.passes.graph.plan_pads import plan_pads
from mpcompile.passes.graph.read_copies import read_copies
from mpcompile.passes.graph.scale_gradients import scale_gradients
from mpcompile.rules.policy import Policy, TensorCores


def mlp(x: Tensor, big: Tensor, thin: Tensor) -> Any:
    """A product of many rows and one of few."""
    return F.linear(x, big), F.linear(x[:4], thin)


def test_never_and_auto_on_the_cpu_leave_the_graph_as_it_is() -> None:
    inputs = leaf(1000, 1001), leaf(1003, 1001), leaf(1003, 1001)
    texts = []
    for options in ({"pad": "never"}, {"pad": "auto", "cores": TensorCores()}):
        stage = Stage(plan_pads, mlp, *inputs, **options)
        before = stage.text
        stage.run()
        place_pads(stage.gm, stage.config)
        assert stage.text == before
        texts.append({name: a.reason for name, a in alignments(stage).items()})
    never, auto = texts
    assert set(never.values()) == {"pad='never'"}
    assert set(auto.values()) == {"unaligned dims cost nothing on cpu"}


def test_auto_pads_what_pays() -> None:
    cores = TensorCores(slowdown=2.0, balance=200.0)
    inputs = leaf(1000, 1001), leaf(1003, 1001), leaf(1003, 1001)
    found = alignments(placed(mlp, *inputs, pad="auto", cores=cores))
    assert found["linear"].padded == {"n": 1008, "k": 1008}
    assert found["linear"].reason == "padded"
    assert found["linear_1"].padded == {}
    assert found["linear_1"].reason == "bound by memory: it takes as long unaligned"
    assert found["linear_1"].after == ("n", "k")


@pytest.mark.parametrize(
    ("program", "shapes", "balance", "reason"),
    [
        (
            lambda x, w: F.linear(x, w.softmax(1)), [(500, 1001), (1003, 1001)], 200.0,
            "a copy of its operands takes 1.2 times what alignment saves",
        ),
        (
            F.scaled_dot_product_attention, [(2, 3, 16, 20)] * 3, 0.0,
            "the fused kernels pad heads themselves",
        ),
    ],
)  # fmt: skip
def test_auto_leaves_what_would_not_gain(
    program: Any, shapes: list[tuple[int, ...]], balance: float, reason: str
) -> None:
    cores = TensorCores(slowdown=2.0, balance=balance)
    stage = placed(program, *(leaf(*shape) for shape in shapes), pad="auto", cores=cores)
    (found,) = alignments(stage).values()
    assert (found.padded, found.reason) == ({}, reason)


def test_rows_count_where_they_matter_or_always() -> None:
    rows = TensorCores(rows=True, slowdown=2.0)
    for pad_, cores, wanted in (
        ("auto", CORES, 5), ("auto", rows, 8), ("always", CORES, 8), ("always", rows, 8),
    ):  # fmt: skip
        stage = placed(F.linear, leaf(5, 16), leaf(24, 16), pad=pad_, cores=cores)
        (linear,) = nodes(stage, "linear")
        assert list(ir.shape(linear)) == [wanted, 24]


@pytest.mark.parametrize(
    ("batch", "tokens", "wanted"),
    [(2, 6, (2, 8)), (6, 4, (6, 4)), (3, 12, (4, 12)), (5, 5, (8, 5)), (4, 9, (4, 10))],
)
def test_the_cheapest_of_several_rows_is_padded(
    batch: int, tokens: int, wanted: tuple[int, int]
) -> None:
    """4 sequences of 9 tokens are 36 rows: one more token in each makes 40."""
    stage = placed(F.linear, leaf(batch, tokens, 16), leaf(24, 16))
    (linear,) = nodes(stage, "linear")
    assert tuple(ir.shape(linear)) == (*wanted, 24)


def test_a_product_in_fp32_is_left_alone() -> None:
    policy = Policy(nodes={"linear": "fp32"})
    stage = ran(plan_pads, F.linear, leaf(5, 13), leaf(21, 13), pad="always", policy=policy)
    (found,) = alignments(stage).values()
    assert (found.before, found.padded) == (("n", "k", "m"), {})
    assert found.reason.startswith("runs in FP32: ")
    before = stage.text
    assert not place_pads(stage.gm, stage.config)
    assert stage.text == before


def test_a_symbol_that_is_known_to_be_a_multiple_is_left_alone() -> None:
    def program(x: Tensor, w: Tensor) -> Any:
        rows = x.view(-1, 24)  # 8 * s of them
        return F.linear(x, w).relu(), rows.t() @ rows, F.linear(rows, w)

    x = leaf(16, 8, 24)
    torch._dynamo.mark_dynamic(x, 0)
    stage = placed(program, x, leaf(32, 24))
    assert ours(stage, PAD) == ours(stage, SLICE) == []
    assert all(found.before == () for found in alignments(stage).values())


def test_idempotent() -> None:
    for program, inputs in (
        (Chain(torch.sigmoid), [torch.randn(5, 257)]),
        (nn.Conv2d(3, 5, 3), [torch.randn(2, 3, 7, 7)]),
        (F.scaled_dot_product_attention, [leaf(2, 3, 5, 20) for _ in range(3)]),
    ):
        stage = placed(program, *inputs)
        text, marks = stage.text, stage.marks
        assert not plan_pads(stage.gm, stage.config)
        assert not place_pads(stage.gm, stage.config)
        pipeline.verify(stage.gm, "place_pads")
        assert (stage.text, stage.marks) == (text, marks)


# -- checkpoints, writes in place, gradients -------------------------------------------------------


class Checkpointed(nn.Module):
    """A chain that is recomputed, of weights that are cast and padded inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.down = nn.Linear(16, 13), nn.Linear(13, 21), nn.Linear(21, 13)

    def forward(self, x: Tensor) -> Tensor:
        def body(h: Tensor) -> Tensor:
            return self.down(F.gelu(self.up(h))).relu()

        h: Tensor = checkpoint(body, self.first(x), use_reentrant=False)
        return self.up(h)


def test_inside_a_checkpoint() -> None:
    stage = placed(Checkpointed(), torch.randn(8, 16), until=outline)
    (body,) = [m for _, m in stage.gm.named_children() if isinstance(m, fx.GraphModule)]
    inside = [n for n in body.graph.nodes if ir.is_op(n)]
    linear = [n for n in inside if ir.op_name(n) == "aten::linear"]
    assert [tuple(ir.shape(n)) for n in linear] == [(8, 24), (8, 16)]
    assert [ir.op_name(n) for n in inside].count("aten::slice") == 0  # goes on padded after it
    assert_exact(Checkpointed(), torch.randn(8, 16))


@SETTINGS
@pytest.mark.parametrize("reader", [F.relu, lambda h: h, lambda h: h.softmax(-1)])
def test_gradients_are_true_to_size(reader: Any, level: str, emit: str) -> None:
    """A cut is handed to the caller: it is where gradients enter, and where they are scaled."""
    net = Chain(torch.sigmoid)
    check(lambda x: reader(net(x)), leaf(8, 257), level=level, emit=emit, pad="always")


@SETTINGS
def test_gradients_of_a_checkpoint(level: str, emit: str) -> None:
    check(Checkpointed(), torch.randn(8, 16), level=level, emit=emit, pad="always")


def test_a_value_that_is_written_in_place() -> None:
    """`y` is padded again after each write."""

    def program(x: Tensor, y: Tensor) -> Any:
        y = y * 2
        a = x.mm(y)
        y.add_(1)
        b = x.mm(y)
        y[:, :3] = 0
        return a, b, x.mm(y), y

    assert_exact(program, torch.randn(8, 13), torch.randn(13, 21))

    def written(x: Tensor, w: Tensor) -> Any:
        h = F.linear(x, w)
        h[:, 1:4] = 7
        h.view(-1).mul_(2)
        g = F.linear(x, w).relu_()
        return h, F.linear(h, w.t()), g.sum(), F.linear(g, w.t())

    assert_exact(written, torch.randn(8, 13), torch.randn(21, 13))


@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_are_scaled_on_the_other_side_of_pads(scaled: bool) -> None:
    stage = placed(Chain(), torch.randn(8, 257), until=scale_gradients, scaled=scaled)
    for node in pads_of_weights(stage):
        assert ir.mark(node.all_input_nodes[0]).rule == "cast"


# -- place_pads: lanes stay where they are exact ---------------------------------------------------


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


def test_a_weight_that_is_read_in_fp32_too_is_read_with_its_copy() -> None:
    def program(tokens: Tensor, w: Tensor) -> Tensor:
        return F.linear(F.embedding(tokens, w), w)

    inputs = torch.zeros(8, dtype=torch.int64), leaf(21, 13)
    stage = placed(program, *inputs, level="O1", copied={1: None}, until=read_copies)
    (linear,), (embedding,) = nodes(stage, "linear"), nodes(stage, "embedding")
    read, (master, kept) = linear.all_input_nodes[1], linear.all_input_nodes[1].all_input_nodes
    assert read.target is torch.ops.mpcompile.read_copy.default
    assert embedding.all_input_nodes[0] is master is stage.node("w")
    assert [tuple(ir.shape(n)) for n in (read, kept, master)] == [(24, 16), (24, 16), (21, 13)]


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
