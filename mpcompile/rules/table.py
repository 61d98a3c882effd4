"""THE table: each operator in one row, with everything that is known about it. Data; read top down.

A row is a precision, a reason, the facts (see `Rule`), and the operators they hold for. Operators
are named without overload (`softmax` is `aten::softmax`); all overloads share the row, but for
those with a row of their own (`aten::max.dim` also finds places). The vocabulary is pre-dispatch
ATen, so composites (`linear`, `layer_norm`, `scaled_dot_product_attention`) are single operators.
In-place and out= variants have no row: the functionalize pass turns the safe ones into their
functional form first, the rest keep their dtypes.

Sources of the precisions: torch.amp's CUDA op lists; NVIDIA's mixed-precision guide and the paper
it rests on (Micikevicius et al., ICLR 2018: reductions and the statistics of norms in FP32); Apex's
and Paddle's lists. Where they leave an operator out (mean, var, batch_norm, gelu) we follow the
paper. Source of what a backward keeps: torch's derivatives.yaml.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from .op_names import op_key
from .policy import Precision
from .rule import Keeps, Kind, Recurrent, Rule

LOW, FULL, FOLLOW, KEEP = Precision.LOW, Precision.FULL, Precision.FOLLOW, Precision.KEEP
NOTHING, RESULT = Keeps.NOTHING, Keeps.RESULT

TABLE: dict[str, Rule] = {}


def _row(precision: Precision, reason: str, names: str, **facts: Any) -> None:
    rule = Rule(precision, reason, **facts)
    for key in map(op_key, names.split()):
        assert key not in TABLE, f"{key} stands in two rows"
        TABLE[key] = rule


def _overloads(precision: Precision, reason: str, names: str, **facts: Any) -> None:
    """The same for overloads that differ from the others of their operator."""
    rule = Rule(precision, reason, **facts)
    for name in names.split():
        TABLE[f"aten::{name}"] = rule


# fmt: off

# -- LOW: the work Tensor Cores exist for; FP16 products, FP32 accumulation -----------------------

_WHY = "matrix product: multiplies in the low dtype, adds up in FP32"
_row(LOW, _WHY, "linear", product="linear", multiplies=True)
_row(LOW, _WHY, "matmul linalg_matmul", product="matmul", multiplies=True)
_row(LOW, _WHY, "einsum", product="einsum", multiplies=True)
_row(LOW, _WHY, "mm", product="self[m,k] mat2[k,n] -> [m,n]", multiplies=True)
_row(LOW, _WHY, "bmm", product="self[b,m,k] mat2[b,k,n] -> [b,m,n]", multiplies=True)
_row(LOW, _WHY, "addmm", product="mat1[m,k] mat2[k,n] + self -> [m,n]", masks="self",
     multiplies=True)
_row(LOW, _WHY, "baddbmm", product="batch1[b,m,k] batch2[b,k,n] + self -> [b,m,n]", masks="self",
     multiplies=True)
_row(LOW, _WHY, "addbmm", product="batch1[b,m,k] batch2[b,k,n] + self -> [m,n]", masks="self",
     multiplies=True)
_row(LOW, _WHY, "addr linalg_vecdot linalg_multi_dot chain_matmul tensordot", multiplies=True)
_row(LOW, _WHY, "addmv mv", multiplies=True, fuses=False)

_WHY = "convolution: multiplies in the low dtype, adds up in FP32"
_row(LOW, _WHY, "conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d "
     "conv_transpose3d", product="convolution", multiplies=True)
_row(LOW, _WHY, "conv_tbc", product="conv_tbc", multiplies=True)
_row(LOW, _WHY, "_convolution convolution_backward", multiplies=True)

_row(LOW, "fused attention: two matrix products, softmax in FP32 inside the kernel",
     "scaled_dot_product_attention", product="attention", masks="attn_mask", multiplies=True)
# Its kernels take low logits beside FP32 bias and class weights.
_row(LOW, "a matrix product, and its cross entropy in FP32 inside",
     "mpcompile::linear_cross_entropy", uncast="bias class_weight", multiplies=True)
_row(LOW, "a whole encoder layer (nn.TransformerEncoder in eval): matrix products, norms with "
     "statistics in FP32", "_transformer_encoder_layer_fwd _native_multi_head_attention",
     multiplies=True)

_WHY = "recurrent kernel: matrix products over time, accumulates in FP32"
_row(LOW, _WHY, "lstm", product="recurrent", recurrent=Recurrent(4, nn.LSTM), multiplies=True)
_row(LOW, _WHY, "gru", product="recurrent", recurrent=Recurrent(3, nn.GRU), multiplies=True)
_row(LOW, _WHY, "rnn_tanh rnn_relu", product="recurrent", recurrent=Recurrent(1, nn.RNN),
     multiplies=True)
_row(LOW, _WHY, "lstm_cell gru_cell", fuses=False, multiplies=True)
_row(LOW, _WHY, "rnn_tanh_cell rnn_relu_cell", multiplies=True)

_row(LOW, "piecewise linear with a learned slope; in torch.amp's FP16 list", "prelu", fuses=False)

# -- FULL: range or accumulation ------------------------------------------------------------------

_WHY = "its result can grow fast: FP16 overflows, BF16 rounds it coarsely"
_row(FULL, _WHY, "exp reciprocal rsqrt", grows=True, keeps=RESULT, elementwise=True)
_row(FULL, _WHY, "exp2 expm1 pow square softplus", grows=True, elementwise=True)
_row(FULL, _WHY, """
     float_power cosh sinh tan special_exp2 special_expm1 lgamma digamma polygamma mvlgamma""",
     grows=True)
_row(FULL, _WHY, "logit erfinv", grows=True, digits="self")

_WHY = "its derivative grows without bound where inputs are small or near the edge"
_row(FULL, _WHY, "log log1p log_sigmoid", digits="self", elementwise=True)
_row(FULL, _WHY, "sqrt", digits="self", keeps=RESULT, elementwise=True)
_row(FULL, _WHY, "log10 log2 acos asin acosh asinh atanh", digits="self")
_row(FULL, _WHY, "xlogy special_xlog1py", digits="self other")

_WHY = "its backward squares what it reads, or divides by it: that leaves FP16's range"
_row(FULL, _WHY, "atan", bounded=True, elementwise=True)
_row(FULL, _WHY, "atan2", bounded=True)
_row(FULL, _WHY, "addcdiv", elementwise=True)
_row(FULL, _WHY, "scatter_reduce", fuses=False, finds="self src")

_WHY = "a log-likelihood, which programs add up: little differences of large numbers count"
_row(FULL, _WHY, "logsumexp logaddexp logaddexp2", grows=True)
# Its backward takes the gradient's logarithm.
_row(FULL, _WHY, "logcumsumexp", grows=True, linear_backward=False)

_row(FULL, "periodic in an angle that FP16 can't resolve (positions above 2048)", "sin cos",
     elementwise=True, digits="self")

_WHY = "whole numbers: a rounding of what it reads makes another one"
_row(FULL, _WHY, "floor ceil round trunc fix", digits="self", makes_positions=True, keeps=NOTHING,
     elementwise=True)
_row(FULL, _WHY, "fmod remainder floor_divide", digits="self other", makes_positions=True,
     elementwise=True)
_overloads(FULL, _WHY, "div.Tensor_mode div.Scalar_mode", digits="self other", makes_positions=True,
           elementwise=True)
_row(FULL, "what is left of a number without its whole part", "frac", digits="self", keeps=NOTHING,
     elementwise=True)

_WHY = "a sum over many terms: low partial sums round, and overflow in FP16"
_row(FULL, _WHY, "sum", grows=True, keeps=NOTHING)
_row(FULL, _WHY, "nansum sum_to_size prod cumsum cumprod trace", grows=True)
_row(FULL, _WHY, "embedding_bag scatter_add index_add", grows=True, fuses=False)
_overloads(FULL, _WHY, "scatter.reduce scatter.value_reduce", grows=True, fuses=False)

_WHY = "a mean: low partial sums round, and overflow in FP16"
_row(FULL, _WHY, "mean", averages=True, keeps=NOTHING)
_row(FULL, _WHY, "nanmean", averages=True)
_row(FULL, _WHY, """
     avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
     adaptive_avg_pool3d""")

_WHY = "a sum of squares: squares leave FP16's range"
_row(FULL, _WHY, """
     linalg_matrix_norm frobenius_norm nuclear_norm norm_except_dim _weight_norm pairwise_distance
     cosine_similarity renorm var std var_mean std_mean cov corrcoef""", grows=True)
_row(FULL, _WHY, "norm linalg_vector_norm linalg_norm pdist", grows=True, finds="self")
_row(FULL, _WHY, "dist cdist", grows=True, finds="self other x1 x2")

_WHY = "exponentials and a sum over the row"
_row(FULL, _WHY, "softmax _safe_softmax", tiny=True, rounds_result=True, keeps=RESULT,
     low_form="mpcompile::softmax_low")
_row(FULL, _WHY, "_softmax", tiny=True, rounds_result=True, keeps=RESULT)
_row(FULL, _WHY, "log_softmax _log_softmax", keeps=RESULT)

_WHY = "mean and variance of the row in FP32"
_row(FULL, _WHY, "layer_norm rms_norm _fused_rms_norm group_norm", rounds_result=True)
_row(FULL, _WHY, "native_layer_norm native_group_norm")

_WHY = "loss: small gradients start here"
_row(FULL, _WHY, "ctc_loss", fuses=False)
_row(FULL, _WHY, """
     cross_entropy_loss nll_loss nll_loss_nd nll_loss2d mse_loss l1_loss smooth_l1_loss
     huber_loss kl_div poisson_nll_loss binary_cross_entropy
     binary_cross_entropy_with_logits hinge_embedding_loss cosine_embedding_loss
     margin_ranking_loss multi_margin_loss multilabel_margin_loss soft_margin_loss
     triplet_margin_loss mpcompile::multilabel_margin_losses""")

_WHY = "interpolation weights are positions; in torch.amp's FP32 list"
_row(FULL, _WHY, "grid_sampler grid_sampler_2d grid_sampler_3d", digits="grid", fuses=False)
_row(FULL, _WHY, "affine_grid_generator", makes_positions=True, fuses=False)
_row(FULL, _WHY, """
     upsample_nearest1d upsample_nearest2d upsample_nearest3d
     _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
     upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
     _upsample_bilinear2d_aa _upsample_bicubic2d_aa""")

_WHY = "a factorisation: conditioning multiplies every rounding of its input"
# The block matrix that holds the gradient sets the degree of its series.
_row(FULL, _WHY, "linalg_matrix_exp matrix_exp", sensitive=True, fuses=False, linear_backward=False)
_row(FULL, _WHY, """
     cholesky linalg_cholesky linalg_cholesky_ex cholesky_solve cholesky_inverse
     linalg_inv linalg_inv_ex inverse linalg_pinv pinverse linalg_solve linalg_solve_ex
     linalg_solve_triangular triangular_solve linalg_lu linalg_lu_factor linalg_lu_factor_ex
     _lu_with_info linalg_lu_solve lu_solve linalg_ldl_factor linalg_ldl_factor_ex
     linalg_ldl_solve linalg_qr qr geqrf ormqr orgqr linalg_householder_product
     linalg_svd svd linalg_svdvals linalg_eig linalg_eigvals linalg_eigh linalg_eigvalsh
     linalg_det det linalg_slogdet slogdet logdet linalg_matrix_rank linalg_cond linalg_lstsq
     linalg_tensorinv linalg_tensorsolve linalg_matrix_power""", sensitive=True, fuses=False)

# -- FOLLOW, arithmetic: safe in FP16 where the inputs already are --------------------------------

# The running statistics are written in place: a cast would update a copy. Kernels take FP32
# parameters beside an FP16 input, and keep the arithmetic in FP32.
_row(FOLLOW, "statistics in FP32 inside the kernel; the low dtype only at input and output",
     "batch_norm instance_norm", uncast="weight bias running_mean running_var",
     writes="running_mean running_var")

_WHY = "elementwise, keeps the magnitude of its input"
_row(FOLLOW, _WHY, "add sub rsub", promotes=True, adds=True, keeps=NOTHING, elementwise=True)
_row(FOLLOW, _WHY, "mul", promotes=True, hands_on_tiny=True, elementwise=True, zero_absorbs=True)
_row(FOLLOW, _WHY, "div true_divide", promotes=True, hands_on_tiny=True, elementwise=True)
_row(FOLLOW, _WHY, "minimum maximum", promotes=True, elementwise=True, picks=True,
     compares="self other")
_row(FOLLOW, _WHY, "where", promotes=True, keeps=NOTHING, picks=True)
_row(FOLLOW, _WHY, "masked_fill", keeps=NOTHING, picks=True)
_row(FOLLOW, _WHY, "neg", keeps=NOTHING, elementwise=True)
_row(FOLLOW, _WHY, "clone", keeps=NOTHING, elementwise=True, may_alias=True, copies_constant=True,
     picks=True)
_row(FOLLOW, _WHY, "positive", elementwise=True, may_alias=True, picks=True)
_row(FOLLOW, _WHY, "abs addcmul lerp", elementwise=True)
_row(FOLLOW, _WHY, "threshold", elementwise=True, picks=True)
_row(FOLLOW, _WHY, "clamp clamp_max clamp_min", elementwise=True, picks=True,
     compares="self min max")
_row(FOLLOW, _WHY, "inner", multiplies=True)  # of vectors a `dot`, which may leave FP16's range
_row(FOLLOW, _WHY, "bilinear col2im dot vdot", fuses=False)
_row(FOLLOW, _WHY, "masked_scatter", fuses=False, picks=True)
_row(FOLLOW, _WHY, "fmax fmin", picks=True, compares="self other")
_row(FOLLOW, _WHY, "clip", picks=True, compares="self min max")
_row(FOLLOW, _WHY, "nan_to_num", picks=True)
_row(FOLLOW, _WHY, """
     absolute copysign cross divide ger hypot linalg_cross multiply negative outer trapezoid""")
_row(FOLLOW, _WHY, "subtract", adds=True)
_row(FOLLOW, _WHY, "heaviside sgn sign", digits="self")

_WHY = "activation that grows no faster than its input"
_row(FOLLOW, _WHY, "relu", keeps=RESULT, elementwise=True, picks=True)
_row(FOLLOW, _WHY, "leaky_relu elu", keeps=RESULT, elementwise=True)
_row(FOLLOW, _WHY, "hardswish selu celu gelu silu mish hardshrink softshrink", elementwise=True)
_row(FOLLOW, _WHY, "glu rrelu")

_WHY = "bounded whatever the input"
_row(FOLLOW, _WHY, "sigmoid tanh", bounded=True, keeps=RESULT, elementwise=True)
_row(FOLLOW, _WHY, "erf hardsigmoid", bounded=True, elementwise=True)
_row(FOLLOW, _WHY, "relu6 hardtanh", bounded=True, elementwise=True, picks=True)
_row(FOLLOW, _WHY, "erfc special_expit special_erf special_erfc", bounded=True)

_WHY = "zeroes and rescales"
_row(FOLLOW, _WHY, "dropout", keeps=NOTHING, elementwise=True, zero_absorbs=True, random=True,
     may_alias=True)
_row(FOLLOW, _WHY, "feature_dropout", elementwise=True, zero_absorbs=True, random=True,
     may_alias=True)
_row(FOLLOW, _WHY, "alpha_dropout feature_alpha_dropout native_dropout")

_WHY = "picks a maximum: exact in any dtype"
_row(FOLLOW, _WHY, "max_pool2d", keeps=NOTHING, picks=True)
_row(FOLLOW, _WHY, """
     max_pool1d max_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
     max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices""", picks=True)
_row(FOLLOW, _WHY, "amax amin aminmax max min", picks=True, finds="self")
_overloads(FOLLOW, _WHY, "max.other min.other", picks=True, compares="self other")

_overloads(FOLLOW, "picks a maximum, and says where it is", "max.dim min.dim", digits="self",
           picks=True)

_WHY = "joins tensors: the widest of its inputs"
_row(FOLLOW, _WHY, "cat stack slice_scatter", keeps=NOTHING, picks=True)
_row(FOLLOW, f"{_WHY}; accumulating, a sum", "index_put", keeps=NOTHING, fuses=False)
_row(FOLLOW, _WHY, "scatter index_copy", fuses=False, picks=True)
_row(FOLLOW, _WHY, """
     concat concatenate hstack vstack dstack column_stack block_diag index_fill select_scatter
     diagonal_scatter""", picks=True)

_WHY = "fills the border"
_row(FOLLOW, _WHY, "constant_pad_nd pad", keeps=NOTHING, picks=True)
_row(FOLLOW, _WHY, """
     reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d
     replication_pad3d""", picks=True)

# -- FOLLOW, no arithmetic ------------------------------------------------------------------------

_WHY = "a view: the same elements"
_row(FOLLOW, _WHY, "view reshape _unsafe_view", kind=Kind.VIEW, dims="reshape", in_order=True)
_row(FOLLOW, _WHY, "permute transpose t", kind=Kind.VIEW, dims="permute")
_row(FOLLOW, _WHY, "unsqueeze", kind=Kind.VIEW, dims="unsqueeze")
_row(FOLLOW, _WHY, "contiguous", kind=Kind.VIEW, elementwise=True, may_alias=True, in_order=True)
_row(FOLLOW, _WHY, "alias detach", kind=Kind.VIEW, elementwise=True, may_alias=True)
_row(FOLLOW, _WHY, "flatten unflatten", kind=Kind.VIEW, in_order=True)
_row(FOLLOW, _WHY, "lift_fresh", kind=Kind.VIEW, copies_constant=True)
_row(FOLLOW, _WHY, """
     view_as reshape_as numpy_T mT mH matrix_H adjoint movedim moveaxis swapaxes swapdims expand
     expand_as broadcast_to slice select narrow squeeze ravel split split_with_sizes chunk
     tensor_split hsplit vsplit dsplit unbind unfold diagonal linalg_diagonal unsafe_split
     unsafe_chunk unsafe_split_with_sizes atleast_1d atleast_2d atleast_3d real
     pixel_shuffle pixel_unshuffle channel_shuffle broadcast_tensors meshgrid""", kind=Kind.VIEW)

_WHY = "copies elements unchanged"
_row(FOLLOW, _WHY, "flip repeat roll triu tril", kind=Kind.MOVE, keeps=NOTHING)
_row(FOLLOW, _WHY, "im2col unfold_copy msort mode", kind=Kind.MOVE, fuses=False)
_row(FOLLOW, _WHY, "median", kind=Kind.MOVE, fuses=False, finds="self")
_row(FOLLOW, _WHY, "sort topk kthvalue", kind=Kind.MOVE, digits="self", fuses=False)
_row(FOLLOW, _WHY, """
     embedding index index_select gather take take_along_dim rot90 repeat_interleave tile
     masked_select diag diagflat diag_embed fliplr flipud max_unpool2d max_unpool3d cummax
     cummin""", kind=Kind.MOVE)
_row(FOLLOW, _WHY, "nanmedian", kind=Kind.MOVE, finds="self")
_overloads(FOLLOW, _WHY, "median.dim", kind=Kind.MOVE, fuses=False)
_overloads(FOLLOW, _WHY, "nanmedian.dim", kind=Kind.MOVE)

# -- KEEP: no precision of their own, but known ---------------------------------------------------

_WHY = "makes a tensor of numbers, in the dtype that the program names"
_row(KEEP, _WHY, "full full_like new_full", creates=True, fill="fill_value", fuses=False)
_row(KEEP, _WHY, "scalar_tensor", creates=True, fill="s", fuses=False)
_row(KEEP, _WHY, "zeros ones zeros_like ones_like new_zeros new_ones eye", creates=True,
     zeros_and_ones=True, fuses=False)
_row(KEEP, _WHY, "empty empty_like new_empty", creates=True, fuses=False)
_row(KEEP, "one at a place, zeros elsewhere", "one_hot", fuses=False, zeros_and_ones=True)
_row(KEEP, "positions, in the dtype that the program names", "arange linspace logspace",
     makes_positions=True, fuses=False)
_WHY = "the program asks for this dtype"
_row(KEEP, _WHY, "to", converts=True, digits="self", elementwise=True, may_alias=True, fuses=False)
_row(KEEP, _WHY, "_to_copy type_as", converts=True, digits="self", fuses=False)
_WHY = "says on which side, or where; reads what the program captured"
_row(KEEP, _WHY, """
     eq ne lt le gt ge not_equal less less_equal greater greater_equal isclose""",
     digits="self other", fuses=False, compares="self other")
_row(KEEP, _WHY, "argmax argmin argsort", digits="self", fuses=False)
_row(KEEP, _WHY, "bucketize", digits="self boundaries", fuses=False, compares="self boundaries")
_row(KEEP, _WHY, "searchsorted", digits="sorted_sequence self", fuses=False,
     compares="sorted_sequence self")
_row(KEEP, "a copy of a constant", "lift_fresh_copy detach_", copies_constant=True, fuses=False)
_row(KEEP, "names places in memory, which casts would move", "as_strided", by_strides=True,
     fuses=False)
_overloads(KEEP, "shows its bits as another dtype", "view.dtype", fuses=False)
_WHY = "finds equal values; reads what the program captured"
_row(KEEP, _WHY, "index_reduce", fuses=False, finds="self source")
_row(KEEP, _WHY, "segment_reduce", fuses=False, finds="data")
_row(KEEP, _WHY, "isin", fuses=False, compares="elements test_elements")
_row(KEEP, _WHY, "_unique2 unique_consecutive unique_dim", fuses=False, picks=True)
_row(KEEP, "a value in memory of its own: something is compared with it",
     "mpcompile::kept", fuses=False)
_row(KEEP, "its noise is written in place", "rrelu_with_noise", writes="noise", fuses=False)

# fmt: on
