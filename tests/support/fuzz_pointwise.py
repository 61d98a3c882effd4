"""Lines of pointwise operators and reductions, by their templates."""

from __future__ import annotations

from fuzz_grower import Maker
from fuzz_makers import binary, reduction, unary

UNARY = {
    name: "torch.{}(%s)".replace("{}", name)
    for name in ("tanh", "sigmoid", "relu", "abs", "neg", "square", "sin", "cos", "erf", "exp",
                 "atan", "clone", "sinh", "expm1")
} | {
    name: "F.{}(%s)".replace("{}", name)
    for name in ("gelu", "silu", "softplus", "elu", "selu", "leaky_relu", "mish", "hardswish",
                 "logsigmoid", "relu6", "hardtanh", "softsign", "tanhshrink", "celu")
} | {
    "sqrt": "(%s.abs() + 0.5).sqrt()",
    "rsqrt": "torch.rsqrt(%s.square() + 0.5)",
    "log": "torch.log(%s.abs() + 0.5)",
    "log1p": "torch.log1p(%s.square())",
    "log2": "(%s * %s + 1).log2()",
    "reciprocal": "(%s.square() + 1).reciprocal()",
    "rdiv": "1 / (%s.abs() + 1)",
    "pow2": "%s ** 2",
    "pow3": "%s.pow(3)",
    "clamp": "%s.clamp(-1, 1)",
    "clamp_min": "%s.clamp(min=0.05)",
    "scaled": "%s * 0.5",
    "shifted": "%s + 1",
    "rsub": "1 - %s",
    "threshold": "F.threshold(%s, 0.1, 0.0)",
    "contiguous": "%s.contiguous()",
    "alias": "%s.view_as(%s)",
}  # fmt: skip


BINARY = {
    "add": "{a} + {b}",
    "sub": "{a} - {b}",
    "mul": "{a} * {b}",
    "div": "{a} / ({b}.abs() + 1)",
    "add_alpha": "torch.add({a}, {b}, alpha=0.5)",
    "maximum": "torch.maximum({a}, {b})",
    "minimum": "torch.minimum({a}, {b})",
    "addcmul": "torch.addcmul({a}, {b}, {c}, value=0.5)",
    "addcdiv": "torch.addcdiv({a}, {b}, {c}.abs() + 1)",
    "lerp": "torch.lerp({a}, {b}, 0.3)",
    "atan2": "torch.atan2({a}, {b}.abs() + 0.5)",
    "hypot": "torch.hypot({a}, {b} + 2)",
    "where": "torch.where({m}, {a}, {b})",
    "where_number": "torch.where({m}, {a}, 0.5)",
    "masked_fill": "{a}.masked_fill({m}, -0.5)",
    "times_mask": "{a} * {m}",
    "mse_loss": "F.mse_loss({a}, {b}.expand_as({a}))",
    "smooth_l1": "F.smooth_l1_loss({a}, {b}.expand_as({a}), reduction='none')",
    "bce_logits": "F.binary_cross_entropy_with_logits({a}, {b}.sigmoid().expand_as({a}))",
    "gt": "{a} > {b}",
    "le_logical": "({a} <= {b}) & {m}",
}


REDUCTIONS = {
    "sum": "{a}.sum({d}, keepdim={k})",
    "mean": "{a}.mean({d}, keepdim={k})",
    "amax": "{a}.amax({d}, keepdim={k})",
    "max": "{a}.max({d})[0]",
    "logsumexp": "{a}.logsumexp({d}, keepdim={k})",
    "var": "{a}.var({d}, keepdim={k}, unbiased=False)",
    "std": "({a} + {a}.cumsum({d})).std({d}, unbiased=False, keepdim={k})",
    "norm": "({a} + 1).norm(dim={d}, keepdim={k})",
    "vector_norm": "torch.linalg.vector_norm({a} + 2, dim={d})",
    "cumsum": "{a}.cumsum({d})",
    "softmax": "{a}.softmax({d})",
    "log_softmax": "F.log_softmax({a}, {d})",
    "normalize": "F.normalize({a} + 0.5, dim={d})",
    "sort": "{a}.sort({d})[0]",
    "argmax": "{a}.argmax({d})",
    "flip": "{a}.flip({d})",
    "roll": "{a}.roll(1, {d})",
    "softmax_half_loss": "{a}.softmax({d}).sum()",
}


POINTWISE: dict[str, Maker] = {
    **{name: unary(template) for name, template in UNARY.items()},
    **{name: binary(template) for name, template in BINARY.items()},
    **{name: reduction(template) for name, template in REDUCTIONS.items()},
}
