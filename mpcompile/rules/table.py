"""THE precision table: operator -> (precision, kind, reason). Rules are data; read top to bottom.

Keys are operator names without overload (`"aten::softmax"`); every overload shares the row. The
vocabulary is pre-dispatch ATen, so composites (`linear`, `layer_norm`, `scaled_dot_product_
attention`) are single rows. An operator in no row is KEEP: what nobody vouched for is not lowered
(the rule of TVM's ToMixedPrecision). In-place and out= variants never match a row: the
functionalize pass turns the safe ones into their functional form first, the rest keep their dtypes.

Sources of the rules: torch.amp's CUDA op lists; NVIDIA's mixed-precision guide and the paper it
rests on (Micikevicius et al., ICLR 2018: reductions and the statistics of norms in FP32); Apex's
and Paddle's lists. Where they leave an operator out (mean, var, batch_norm, gelu) we follow the
paper.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from ..errors import MPCompileError
from .policy import Precision, op_exists, op_key

LOW, FULL, FOLLOW = Precision.LOW, Precision.FULL, Precision.FOLLOW


class Kind(enum.Enum):
    """What the operator does with a value; the planner treats the three differently.

    COMPUTE  arithmetic: the dtype decides the rounding.
    VIEW     the same elements under another shape: takes its input's dtype, costs nothing.
    MOVE     copies some elements of a larger tensor (embedding, gather): cast what comes out.
    """

    COMPUTE = "compute"
    VIEW = "view"
    MOVE = "move"


@dataclass(frozen=True)
class Rule:
    """One row.

    Attributes:
        precision: LOW, FULL or FOLLOW.
        kind: what the operator does with a value.
        reason: why, in one sentence; shown beside every node.
        grows: the result may leave FP16's range although the inputs are inside it, so that what
            follows directly stays in FP32 too.
        bounded: the result lies within FP16's range whatever the inputs.
        sensitive: a rounding of the input may change the result altogether (a rank, a definite
            matrix that no longer is), so that what feeds it is computed in FP32 too.
    """

    precision: Precision
    kind: Kind
    reason: str
    grows: bool = False
    bounded: bool = False
    sensitive: bool = False


def _rows(
    precision: Precision,
    reason: str,
    names: str,
    kind: Kind = Kind.COMPUTE,
    *,
    grows: bool = False,
    bounded: bool = False,
    sensitive: bool = False,
) -> dict[str, Rule]:
    rule = Rule(precision, kind, reason, grows, bounded, sensitive)
    return {op_key(name): rule for name in names.split()}


def keys(names: str) -> frozenset[str]:
    """`"relu gelu"` -> `{"aten::relu", "aten::gelu"}`."""
    return frozenset(map(op_key, names.split()))


_BUILTIN: dict[str, Rule] = {
    # -- LOW: the work Tensor Cores exist for; FP16 products, FP32 accumulation -------------------
    **_rows(LOW, "matrix product: Tensor Cores, accumulates in FP32", """
        linear mm bmm matmul addmm addmv addr addbmm baddbmm mv einsum
        linalg_vecdot linalg_multi_dot chain_matmul linalg_matmul"""),
    **_rows(LOW, "convolution: Tensor Cores, accumulates in FP32", """
        conv1d conv2d conv3d conv_tbc convolution _convolution
        conv_transpose1d conv_transpose2d conv_transpose3d"""),
    **_rows(LOW, "fused attention: two matrix products, softmax in FP32 inside the kernel",
            "scaled_dot_product_attention"),
    **_rows(LOW, "a matrix product, and its cross entropy in FP32 inside",
            "mpcompile::linear_cross_entropy"),
    **_rows(LOW, "a whole encoder layer (nn.TransformerEncoder in eval): matrix products, norms "
            "with statistics in FP32", "_transformer_encoder_layer_fwd "
            "_native_multi_head_attention"),
    **_rows(LOW, "recurrent kernel: matrix products over time, accumulates in FP32", """
        lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"""),
    **_rows(LOW, "piecewise linear with a learned slope; in torch.amp's FP16 list", "prelu"),

    # -- FULL: range or accumulation ------------------------------------------------------------
    **_rows(FULL, "its result leaves FP16's range for ordinary inputs", """
        exp exp2 expm1 pow square float_power cosh sinh tan reciprocal rsqrt softplus logit
        special_exp2 special_expm1 lgamma digamma polygamma mvlgamma erfinv""", grows=True),
    **_rows(FULL, "its derivative grows without bound where inputs are small or near the edge", """
        log log10 log2 log1p sqrt acos asin acosh asinh atanh xlogy special_xlog1py
        logaddexp logaddexp2 log_sigmoid"""),
    **_rows(FULL, "periodic in an angle that FP16 can't resolve (positions above 2048)", "sin cos"),
    **_rows(FULL, "a sum over many terms: FP16 partial sums round and overflow", """
        sum nansum sum_to_size prod cumsum cumprod trace embedding_bag""", grows=True),
    **_rows(FULL, "a mean: FP16 partial sums round and overflow", """
        mean nanmean logcumsumexp logsumexp avg_pool1d avg_pool2d avg_pool3d
        adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d"""),
    **_rows(FULL, "a sum of squares: squares leave FP16's range", """
        norm linalg_vector_norm linalg_norm linalg_matrix_norm frobenius_norm nuclear_norm
        norm_except_dim _weight_norm renorm dist pdist cdist pairwise_distance cosine_similarity
        var std var_mean std_mean cov corrcoef""", grows=True),
    **_rows(FULL, "exponentials and a sum over the row", "softmax log_softmax _softmax "
            "_log_softmax _safe_softmax"),
    **_rows(FULL, "mean and variance of the row in FP32", """
        layer_norm native_layer_norm rms_norm _fused_rms_norm group_norm native_group_norm"""),
    **_rows(FULL, "loss: small gradients start here", """
        cross_entropy_loss nll_loss nll_loss_nd nll_loss2d mse_loss l1_loss smooth_l1_loss
        huber_loss kl_div poisson_nll_loss binary_cross_entropy
        binary_cross_entropy_with_logits hinge_embedding_loss cosine_embedding_loss
        margin_ranking_loss multi_margin_loss multilabel_margin_loss soft_margin_loss
        triplet_margin_loss ctc_loss"""),
    **_rows(FULL, "interpolation weights are positions; in torch.amp's FP32 list", """
        upsample_nearest1d upsample_nearest2d upsample_nearest3d
        _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
        upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
        _upsample_bilinear2d_aa _upsample_bicubic2d_aa grid_sampler grid_sampler_2d grid_sampler_3d
        affine_grid_generator"""),

    **_rows(FULL, "a factorisation: conditioning multiplies every rounding of its input", """
        cholesky linalg_cholesky linalg_cholesky_ex cholesky_solve cholesky_inverse
        linalg_inv linalg_inv_ex inverse linalg_pinv pinverse linalg_solve linalg_solve_ex
        linalg_solve_triangular triangular_solve linalg_lu linalg_lu_factor linalg_lu_factor_ex
        _lu_with_info linalg_lu_solve lu_solve linalg_ldl_factor linalg_ldl_factor_ex
        linalg_ldl_solve linalg_qr qr geqrf ormqr orgqr linalg_householder_product
        linalg_svd svd linalg_svdvals linalg_eig linalg_eigvals linalg_eigh linalg_eigvalsh
        linalg_det det linalg_slogdet slogdet logdet linalg_matrix_rank linalg_cond linalg_lstsq
        linalg_tensorinv linalg_tensorsolve linalg_matrix_power linalg_matrix_exp
        matrix_exp""", sensitive=True),

    # -- FOLLOW, arithmetic: safe in FP16 where the inputs already are ----------------------------
    **_rows(FOLLOW, "statistics in FP32 inside the kernel; FP16 only at input and output",
            "batch_norm instance_norm"),
    **_rows(FOLLOW, "elementwise, keeps the magnitude of its input", """
        add sub rsub mul div neg abs sign sgn clone positive lerp where masked_fill clamp clamp_min
        clamp_max clip minimum maximum fmin fmax threshold heaviside copysign true_divide multiply
        subtract divide negative absolute addcmul addcdiv cross linalg_cross dot vdot outer ger
        inner tensordot bilinear trapezoid hypot nan_to_num masked_scatter
        col2im"""),
    **_rows(FOLLOW, "activation that grows no faster than its input", """
        relu hardswish leaky_relu elu selu celu gelu silu mish hardshrink softshrink glu rrelu"""),
    **_rows(FOLLOW, "bounded whatever the input", """
        sigmoid tanh erf erfc relu6 hardtanh hardsigmoid atan atan2 special_expit special_erf
        special_erfc""", bounded=True),
    **_rows(FOLLOW, "zeroes and rescales", "dropout alpha_dropout feature_dropout "
            "feature_alpha_dropout native_dropout"),
    **_rows(FOLLOW, "picks a maximum: exact in any dtype", """
        max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d
        adaptive_max_pool3d max_pool1d_with_indices max_pool2d_with_indices
        max_pool3d_with_indices amax amin max min aminmax"""),
    **_rows(FOLLOW, "joins tensors: the widest of its inputs", """
        cat concat concatenate stack hstack vstack dstack column_stack block_diag index_put
        scatter scatter_add scatter_reduce index_add index_copy index_fill slice_scatter
        select_scatter diagonal_scatter"""),
    **_rows(FOLLOW, "fills the border", "constant_pad_nd pad reflection_pad1d reflection_pad2d "
            "reflection_pad3d replication_pad1d replication_pad2d replication_pad3d"),

    # -- FOLLOW, no arithmetic ----------------------------------------------------------------
    **_rows(FOLLOW, "a view: the same elements", """
        view reshape _unsafe_view view_as reshape_as transpose permute t numpy_T mT mH matrix_H
        adjoint movedim moveaxis swapaxes swapdims expand expand_as broadcast_to slice select narrow
        unsqueeze squeeze flatten unflatten ravel split split_with_sizes chunk tensor_split hsplit
        vsplit dsplit unbind unfold diagonal linalg_diagonal alias contiguous detach unsafe_split
        unsafe_chunk unsafe_split_with_sizes atleast_1d atleast_2d atleast_3d lift_fresh real
        pixel_shuffle pixel_unshuffle channel_shuffle broadcast_tensors meshgrid""", Kind.VIEW),
    **_rows(FOLLOW, "copies elements unchanged", """
        embedding index index_select gather take take_along_dim flip roll rot90 repeat
        repeat_interleave tile masked_select triu tril diag diagflat diag_embed
        fliplr flipud max_unpool2d max_unpool3d im2col unfold_copy sort msort topk kthvalue median
        nanmedian mode cummax cummin""", Kind.MOVE),
}  # fmt: skip

_REGISTERED: dict[str, Rule] = {}

# Arguments that are never cast, by position. batch_norm writes its running statistics in place
# although its schema does not say so: a cast would update a copy. Its weight and bias stay FP32
# because its kernels take an FP16 input beside FP32 parameters and keep the arithmetic in FP32. So
# do the bias and the class weights of linear_cross_entropy.
_UNCAST_ARGS: dict[str, frozenset[int]] = {
    "aten::batch_norm": frozenset({1, 2, 3, 4}),
    "aten::instance_norm": frozenset({1, 2, 3, 4}),
    "mpcompile::linear_cross_entropy": frozenset({2, 4}),
}

# Arguments written in place without the schema saying so.
_HIDDEN_WRITES: dict[str, frozenset[int]] = {
    "aten::batch_norm": frozenset({3, 4}),
    "aten::instance_norm": frozenset({3, 4}),
    "aten::rrelu_with_noise": frozenset({1}),
}

# Arguments holding an additive mask: values below the low dtype's range are clamped into it by
# their cast (only -inf stays -inf), so that a masked position stays masked and a fully masked row
# stays finite.
MASK_ARGS: dict[str, frozenset[int]] = {
    "aten::scaled_dot_product_attention": frozenset({3}),
    "aten::baddbmm": frozenset({0}),
    "aten::addbmm": frozenset({0}),
    "aten::addmm": frozenset({0}),
}

# FP32 inside, low at input and output (Paddle's O2 has norms so): what they give keeps the
# magnitude of what they read, or less, so it may be stored low.
STORED_LOW = keys("layer_norm rms_norm _fused_rms_norm group_norm softmax _softmax _safe_softmax")

# Of these, what ends in numbers as small as FP32 has, of which FP16 makes zeros; and what hands one
# such operand on, where everything else needs all of its operands to be so.
MAY_BE_TINY = keys("softmax _softmax _safe_softmax")
MULTIPLIES = keys("mul div true_divide")

# Elementwise operators that promote their operands by themselves, so that a 0-d FP32 operand (a
# learned temperature) may stay FP32 beside a low one, as type promotion has it.
PROMOTES = keys("add sub rsub mul div where minimum maximum true_divide")

# Operators that make a tensor out of sizes and at most one number, whatever they take those from.
CREATES = keys("""
    zeros ones full empty zeros_like ones_like full_like empty_like new_zeros new_ones new_full
    new_empty scalar_tensor eye""")
COPIES_A_CONSTANT = keys("lift_fresh_copy lift_fresh detach_ clone")

# Operators whose backward is linear in the gradient on paper but not in floating point: the block
# matrix that holds matrix_exp's gradient sets the degree of its series; logcumsumexp's backward
# takes the gradient's logarithm. They are handed gradients true to size.
NONLINEAR_BACKWARD = keys("matrix_exp linalg_matrix_exp logcumsumexp")


def rule_for(op: object) -> Rule | None:
    """The row of an operator (OpOverload), or None: keep its dtypes. User rules come first."""
    if not isinstance(op, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
        return None
    key = op_key(op)
    return _REGISTERED.get(key) or _BUILTIN.get(key)


def is_product(name: str) -> bool:
    """Whether this is the name of a matrix product, convolution or attention: an operator's, or
    that of the function or method a program calls (`"matmul"`).
    """
    rule = _BUILTIN.get(op_key(name)) if name not in _MADE_OF_PRODUCTS else None
    return name in _MADE_OF_PRODUCTS or (
        rule is not None and rule.precision is LOW and name not in ("prelu", "aten::prelu")
    )


# Functions that are no operators of the table, but come down to one that is.
_MADE_OF_PRODUCTS = frozenset(("tensordot", "inner", "imatmul", "higher_order::flex_attention"))


def castable(op: object, position: int) -> bool:
    """Whether the argument at this position may be handed over in another dtype."""
    if not isinstance(op, torch._ops.OpOverload):
        return True
    return position not in _UNCAST_ARGS.get(op_key(op), ())


def written_args(op: object) -> frozenset[int]:
    """Positions of the arguments an operator writes to, declared in its schema or not."""
    if not isinstance(op, torch._ops.OpOverload):
        return frozenset()
    declared = {
        i
        for i, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    return frozenset(declared) | _HIDDEN_WRITES.get(op_key(op), frozenset())


def register_rule(op: object, precision: Precision | str, why: str) -> None:
    """Give a custom operator a row of its own, process-wide; replaces an earlier one.

    Args:
        op: `"mylib::op"`, or the `torch.ops` object.
        precision: "low", "full" or "follow" (or a `Precision`). "low" promises kernels, forward and
            backward, for FP16/BF16 inputs; "keep" is what an unregistered op gets anyway.
        why: the reason shown beside every node of this op in plans and dumps.

    Raises:
        MPCompileError: no such operator, an unknown precision, an empty reason.
    """
    key = op_key(op)
    if not op_exists(key):
        raise MPCompileError(
            f"register_rule({op!r}): no such operator is registered with torch; "
            "define it first (torch.library.custom_op), then register its rule"
        )
    if isinstance(precision, str):
        if precision.upper() not in Precision.__members__:
            raise MPCompileError(
                f"register_rule({op!r}): unknown precision {precision!r}; "
                "use 'low', 'full', 'follow' or 'keep'"
            )
        precision = Precision[precision.upper()]
    if not why.strip():
        raise MPCompileError(f"register_rule({op!r}): say why; the plan shows it")
    _REGISTERED[key] = Rule(precision, Kind.COMPUTE, why)


def known_ops() -> frozenset[str]:
    """Every operator with a row, built in or registered."""
    return frozenset(_BUILTIN) | frozenset(_REGISTERED)
