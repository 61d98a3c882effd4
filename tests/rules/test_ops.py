"""The precision table agrees with torch.amp, says why everywhere, and takes new rows."""

from typing import Any

import pytest
import torch
from torch import fx
from versions import before

import mpcompile.operators  # noqa: F401  (registers ours, of which the table has rows)
from mpcompile import MPCompileError, ir, register_rule, rules
from mpcompile.rules import Kind, Rule, lookup, table
from mpcompile.rules.op_names import op_exists, op_key
from mpcompile.rules.policy import Precision
from mpcompile.rules.rule import NAMED, UNKNOWN, signature
from mpcompile.rules.table import TABLE

LOW, FULL, FOLLOW = Precision.LOW, Precision.FULL, Precision.FOLLOW


def words(text: str) -> list[str]:
    return text.split()


# torch.amp's CUDA lists (docs/source/amp.md and aten/src/ATen/autocast_mode.h of torch 2.13), by
# the operators that its public names reach before dispatch.
AMP_FP16 = words("""
    conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution
    _convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm
    chain_matmul linalg_multi_dot lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell lstm gru rnn_tanh
    rnn_relu scaled_dot_product_attention
""")
AMP_FP32 = words("""
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus
    layer_norm native_layer_norm rms_norm group_norm frobenius_norm nuclear_norm norm
    linalg_vector_norm linalg_matrix_norm cosine_similarity
    poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
    smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits binary_cross_entropy
    cross_entropy_loss ctc_loss
    dist pdist cdist renorm logsumexp prod softmax log_softmax cumprod cumsum sum
    upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
    upsample_trilinear3d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
""")
AMP_PROMOTE = words("""
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add cat
    stack
""")
# What the lists leave out and the papers behind them ask for.
ALSO_FP32 = words("mean var std var_mean std_mean square norm linalg_norm")

# Every disagreement with torch.amp, and why.
DEVIATIONS = {
    "grid_sampler": (FULL, "its grid holds positions: promoted FP16 ones lose whole pixels"),
    "atan2": (FULL, "its backward squares both operands: 0/0 where they are below 2.4e-4"),
    "addcdiv": (FULL, "its backward divides by a square"),
    "scatter_add": (FULL, "a sum of as many terms as its index names: promoted low ones round"),
    "tensordot": (LOW, "it is one matmul of reshaped operands; CPUs' autocast runs it low, too"),
}

EXPECTED = {
    **dict.fromkeys(AMP_FP16, LOW),
    **dict.fromkeys([*AMP_FP32, *ALSO_FP32], FULL),
    **dict.fromkeys(AMP_PROMOTE, FOLLOW),
}

mylib = torch.library.Library("mp_test_ops", "DEF")
mylib.define("scale(Tensor x, float by) -> Tensor")
mylib.impl("scale", lambda x, by: x * by, "CompositeImplicitAutograd")


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Rule]:
    """Rows registered in a test end with it."""
    rows: dict[str, Rule] = {}
    monkeypatch.setattr(lookup, "_REGISTERED", rows)
    return rows


def row(name: str) -> Rule:
    return TABLE[op_key(name)]


# -- what the table holds -------------------------------------------------------------------------


def test_agrees_with_torch_amp() -> None:
    differs = {name: row(name).precision for name in EXPECTED}.items() - EXPECTED.items()
    assert differs == {(name, precision) for name, (precision, _why) in DEVIATIONS.items()}


def test_what_comes_down_to_matmuls_is_low() -> None:
    """An operator that follows its operands stays FP32 beside an FP32 parameter, in silence."""
    assert {key for key, rule in TABLE.items() if rule.multiplies} - {"aten::inner"} == {
        key for key, rule in TABLE.items() if rule.precision is LOW and key != "aten::prelu"
    }


def test_safe_activations_may_run_low() -> None:
    assert {row(name).precision for name in words("relu sigmoid tanh")} == {FOLLOW}


@pytest.mark.parametrize("name", words("arange linspace to multinomial argmax"))
def test_nobody_vouched_for(name: str) -> None:
    """Positions, indices and the user's own casts keep the dtype they were captured with."""
    assert TABLE.get(op_key(name), UNKNOWN).precision is Precision.KEEP


def test_batch_norm_keeps_its_statistics() -> None:
    batch_norm = torch.ops.aten.batch_norm.default
    assert rules.castable(batch_norm, 0)
    assert not any(rules.castable(batch_norm, i) for i in range(1, 5))
    assert rules.written_args(batch_norm) == {3, 4}


def test_every_key_is_an_operator_of_torch() -> None:
    gone = [] if before("2.14") else ["aten::cholesky", "aten::qr"]  # `torch.linalg` has both
    assert [key for key in TABLE if not op_exists(key)] == gone


@pytest.mark.parametrize("fact", words("uncast writes masks fill digits"))
def test_arguments_are_named_as_in_the_schema(fact: str) -> None:
    for key, rule in TABLE.items():
        named = set((getattr(rule, fact) or "").split())
        assert not named or named <= lookup._argument_names(key), key


def test_every_product_can_be_read() -> None:
    for key, rule in TABLE.items():
        if rule.product is not None and rule.product not in NAMED:
            found = signature(rule.product)
            assert found is not None, key
            assert {*found.factors, *filter(None, [found.added])} <= lookup._argument_names(key)


def test_every_row_says_why() -> None:
    assert all(rule.reason.strip() for rule in TABLE.values())


def test_no_operator_stands_in_two_rows() -> None:
    """A second row would silently replace the first."""
    with pytest.raises(AssertionError, match="aten::relu stands in two rows"):
        table._row(FOLLOW, "why", "relu")


def test_views_and_moves_follow() -> None:
    """A kind that does no arithmetic has no precision of its own."""
    assert {r.precision for r in TABLE.values() if r.kind is not Kind.COMPUTE} == {FOLLOW}


def test_what_is_no_operator_has_no_row() -> None:
    assert rules.rule_for(len) is UNKNOWN
    assert rules.rule_for("aten::mm") is UNKNOWN


def test_inplace_variants_have_no_row() -> None:
    assert not rules.known_ops() & set(map(op_key, words("add_ relu_ mul_ copy_")))


# -- new rows -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["mp_test_ops::scale", torch.ops.mp_test_ops.scale, torch.ops.mp_test_ops.scale.default]
)
def test_register_rule(registered: dict[str, Rule], name: object) -> None:
    target = torch.ops.mp_test_ops.scale.default
    assert rules.rule_for(target) is UNKNOWN
    register_rule(name, "low", "a product")
    assert rules.rule_for(target) == Rule(LOW, "a product", fuses=False)
    assert "mp_test_ops::scale" in rules.known_ops()
    register_rule(name, Precision.FULL, "sums a row")
    assert rules.rule_for(target) == Rule(FULL, "sums a row", fuses=False)


def test_a_registered_rule_beats_the_table(registered: Any) -> None:
    graph, put = fx.Graph(), torch.ops.aten.index_put.default
    x = graph.placeholder("x")
    puts = [graph.call_function(put, (x, [x], x, accumulates)) for accumulates in (False, True)]
    assert [ir.rule(node).precision for node in puts] == [FOLLOW, FULL]
    register_rule("aten::index_put", "low", "we trust it")
    assert [ir.rule(node).precision for node in puts] == [LOW, LOW]


@pytest.mark.parametrize(
    ("op", "precision", "why", "message"),
    [
        ("mp_test_ops::absent", "low", "why", "no such operator.*define it first"),
        ("nowhere::at_all", "low", "why", "no such operator"),
        ("mp_test_ops::scale", "half", "why", "unknown precision 'half'.*'low', 'full'"),
        ("mp_test_ops::scale", "low", "  ", "say why"),
        (3, "low", "why", "not an operator: 3"),
    ],
)
def test_register_rule_refuses(
    registered: dict[str, Rule], op: object, precision: str, why: str, message: str
) -> None:
    with pytest.raises(MPCompileError, match=message):
        register_rule(op, precision, why)
    assert registered == {}


def test_what_an_operator_does_with_dimensions_is_one_of_a_few_words(
    registered: dict[str, Rule],
) -> None:
    """Another word would only be missed while a graph is padded."""
    with pytest.raises(MPCompileError, match=r"dims=.permutes.*.permute.*reshape, permute, unsq"):
        register_rule("mp_test_ops::scale", "follow", "moves", dims="permutes")
    assert registered == {}
    register_rule("mp_test_ops::scale", "follow", "moves", dims="permute")
    assert registered["mp_test_ops::scale"].dims == "permute"


@pytest.mark.parametrize("overload", ["reduce", "value_reduce"])
def test_a_scatter_that_adds_up_is_a_sum(overload: str) -> None:
    assert TABLE[f"aten::scatter.{overload}"].precision is FULL
    assert TABLE["aten::scatter"].precision is FOLLOW
