"""The other lines that a random program may consist of (`fuzz_rows.py` has the first), and programs
drawn from all of them.
"""

import contextlib
import random
import warnings
from collections.abc import Callable, Mapping

import torch
from fuzz_grower import Choose, Drawn, Grower, Maker, Unfit, is_float, overlaps
from fuzz_programs import Program
from fuzz_rows import (
    ANY,
    DIM,
    FLOAT,
    HOLED,
    LIKE,
    OPERATORS,
    TENSORS,
    VIEWS,
    among,
    eight,
    forms,
    having,
    of_rank,
    rows_along,
    statements,
    write,
)  # fmt: skip

# -- pointwise operators and reductions -----------------------------------------------------------

UNARY = {
    name: f"torch.{name}({{a}})"
    for name in ("tanh", "sigmoid", "relu", "abs", "neg", "square", "sin", "cos", "erf", "exp",
                 "atan", "clone", "sinh", "expm1")
} | {
    name: f"F.{name}({{a}})"
    for name in ("gelu", "silu", "softplus", "elu", "selu", "leaky_relu", "mish", "hardswish",
                 "logsigmoid", "relu6", "hardtanh", "softsign", "tanhshrink", "celu")
} | {
    "sqrt": "({a}.abs() + 0.5).sqrt()",
    "rsqrt": "torch.rsqrt({a}.square() + 0.5)",
    "log": "torch.log({a}.abs() + 0.5)",
    "log1p": "torch.log1p({a}.square())",
    "log2": "({a} * {a} + 1).log2()",
    "reciprocal": "({a}.square() + 1).reciprocal()",
    "rdiv": "1 / ({a}.abs() + 1)",
    "pow2": "{a} ** 2",
    "pow3": "{a}.pow(3)",
    "clamp": "{a}.clamp(-1, 1)",
    "clamp_min": "{a}.clamp(min=0.05)",
    "scaled": "{a} * 0.5",
    "shifted": "{a} + 1",
    "rsub": "1 - {a}",
    "threshold": "F.threshold({a}, 0.1, 0.0)",
    "contiguous": "{a}.contiguous()",
    "alias": "{a}.view_as({a})",
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
    **{name: forms(of_rank(0), template) for name, template in UNARY.items()},
    **{name: forms(ANY, template) for name, template in BINARY.items()},
    **{
        name: forms(ANY, template, k=lambda g, a: bool(g.choose(2)), d=DIM)
        for name, template in REDUCTIONS.items()
    },
}

# -- positions, bounds, and integers that are made of numbers -------------------------------------
#
# Positions are exact in FP32; what is computed of them alone is not disturbed for the comparison
# (`fuzz_runs.Noise`). Bounds such as `1 - 1e-4` are no numbers of FP16.


def _steps(g: Grower, a: str) -> str:
    """Positions along the last dimension, up to some hundreds: beyond 2048 FP16 has no odd ones."""
    start = g.of(0, 5, 300, 2047)
    return f"torch.arange({start}, {start} + {a}.shape[-1], {FLOAT})"


def _count(g: Grower, a: str) -> str:
    return f"torch.arange({a}.shape[-1], {FLOAT})"


_EIGHT = f"torch.arange(8, {FLOAT})"
POSITIONS: dict[str, Maker] = {
    "positions": forms(
        ANY, "{a} + {s} / 64", "{a} * torch.sin({s} * 0.7)", "torch.cos({s} * 0.9) + {a}",
        "{a} * ({s} % 2)", "torch.where({s} % 2 == 1, {a}, 0.5)", s=_steps,
    ),
    "phase": forms(
        ANY, "torch.sin({n} * 3 + {a})", "torch.cos({n} + {a} * 0.5) * {a}",
        "torch.sin({n} + 200 + {a})", "(({n} + 900 + {a} * 0.5) * 0.3).cos()",
        "({n} + 0.5 + {a}.tanh() * 0.3).sqrt()", n=_count,
    ),
    "numbered": forms(  # an index that is computed, not given: rows of a table
        eight(1),
        *(f"F.embedding({index}, w0)" for index in (
            f"(({_EIGHT} + 0.5 + {{a}}.tanh() * 0.3) % 8).floor().long()",
            f"({_EIGHT} * 257 % 8).long()",
            f"torch.bucketize({{a}}, torch.tensor([-0.5, 0.0, 0.5], {FLOAT}))",
            "({a}.sigmoid() * 7.9).long()",
            f"(({_EIGHT} + 500.5 + {{a}}.tanh() * 0.3).floor() - 500).long().clamp(0, 7)",
        )),
    ),
    "bounded": forms(
        ANY, "torch.log(1 - {s}.clamp(1e-4, 1 - 1e-4))", "torch.log({s}.clamp(1e-4, 1 - 1e-4))",
        "torch.log1p(-{s}.clamp(1e-4, 1 - 1e-4))",
        "torch.atanh({a}.tanh().clamp(-1 + 1e-4, 1 - 1e-4)) * 0.5", "1 / {a}.abs().clamp(min=0.1)",
        "F.binary_cross_entropy({s}.clamp(1e-4, 1 - 1e-4), {b}.sigmoid().detach())",
        s=lambda g, a: f"({a} * {g.of(1, 9)}).sigmoid()", b=LIKE,
    ),
    "integers": forms(
        ANY, "{a}.argmax({d})", "({a} > 0.1).sum({d})", "({a} * 4).round().long()",
        "{a}.topk(1, {d})[1]", "({a} > {b}).any({d})", "torch.isfinite({a})", "({a} * 2).int()",
        "{a}.sign().bool()", "{a}.detach().argsort({d})", d=DIM,
    ),
}  # fmt: skip

# -- functions, regions with what may be inside, hooks, and torch.func's transforms ---------------

BODIES = (
    "torch.tanh(p) * q", "p * 0.5 + q", "F.gelu(p) - q.sum()", "torch.sigmoid(p * q)",
    "(p + q).mul_(0.5)", "Clip.apply(p) + q * 0", "torch.softmax(p + q, -1)",
)  # fmt: skip
IN_CHECKPOINTS = ("F.linear(p, w0) * q", "torch.relu(p @ w0) + q", "F.layer_norm(p @ w0, (8,)) * q")
BRANCHES = tuple(text for text in BODIES if "_(" not in text and "Clip" not in text)
# Of p alone, with a result of its shape.
SAME = ("p.tanh() * p", "torch.sin(p) * 0.5", "p.square() * 0.3 + p", "F.gelu(p)")
PRODUCT = ("F.linear(p, w0)", "torch.tanh(F.linear(p, w0, w1))", "(p @ w0.t()) * 0.5")
PAIRS = ("p * q", "torch.tanh(p) + q", "p - q.sum()", "torch.softmax(p + q, -1)")
PAIR_PRODUCT = ("F.linear(p, w0) * q", "F.linear(p * q, w0, w1)", "(p @ w0) + q")


def body(plain: tuple[str, ...], products: tuple[str, ...]) -> Callable[[Grower, str], str]:
    """One of these expressions; of those with a product where the sizes let it be."""

    def draw(g: Grower, a: str) -> str:
        bodies = [*plain, *(products if g.eval(a).shape[-1] == 8 else ())]
        return bodies[g.choose(len(bodies))]

    return draw


_ALONE = body(SAME, PRODUCT * 2)


def _function(g: Grower) -> Drawn:
    a = g.any()
    form = g.choose(5)
    if form == 4:
        return f"{g.new(2)} = Two.apply({a}, {g.like(a)}, 0.5)"
    return f"{g.new()} = {('Straight', 'Reverse', 'Clip', 'Clip')[form]}.apply({a})"


def _hook(g: Grower) -> Drawn:
    """On a value of its own: torch 2.13 may crash on one that was written without a gradient."""
    a = g.pick(lambda t: is_float(t) and t.requires_grad)
    new = g.new()
    return [f"{new} = {a} * 0.5", f"{g.new()} = {new} + 1", f"{new}.register_hook(clipped)"]


SPECIAL: dict[str, Maker] = {
    "function": _function,
    "checkpoint": forms(
        ANY, "checkpoint(lambda p, q: {body}, {a}, {b})", body=body(BODIES, IN_CHECKPOINTS * 2)
    ),
    "cond": forms(
        ANY, "cond({pred}, lambda p, q: {yes}, lambda p, q: {no}, ({a}, {b}))",
        b=LIKE, pred=lambda g, a: g.of(f"{a}.sum() > 0", f"{a}.detach().amax() > 1", "w1[0] > 0"),
        yes=body(BRANCHES, PAIR_PRODUCT[:1]), no=body(BRANCHES, PAIR_PRODUCT[:1]),
    ),
    "hook": _hook,
}  # fmt: skip


def _vmap(g: Grower) -> Drawn:
    a = g.any(dims=2)
    inside = body(PAIRS, PAIR_PRODUCT * 2)(g, a)
    if g.choose(2):
        return f"{g.new()} = torch.vmap(lambda p, q: {inside})({a}, {g.like(a)})"
    b = g.pick(lambda t: t.dtype is g.eval(a).dtype and t.shape == g.eval(a).shape[1:])
    second = f"{b}.view({a}.shape[1:])"
    return f"{g.new()} = torch.vmap(lambda p, q: {inside}, in_dims=(0, None))({a}, {second})"


FUNCTORCH: dict[str, Maker] = {
    "vmap": _vmap,
    "func_grad": forms(ANY, "torch.func.grad(lambda p: ({body}).sum() / 4)({a})", body=_ALONE),
    "per_sample": forms(
        of_rank(2), "torch.vmap(torch.func.grad(lambda p: ({body}).square().sum() / 8))({a})",
        body=_ALONE,
    ),
    "jvp": forms(
        ANY, "torch.func.jvp(lambda p: {body}, ({a},), ({b},))", body=_ALONE, b=LIKE, results=2
    ),
    "vjp": forms(
        ANY, "torch.func.vjp(lambda p: {body}, {a})[1]({b})[0]", body=_ALONE, b=LIKE
    ),
    "jacobian": forms(
        having(of_rank(1, 1), lambda t: t.numel() <= 8), "torch.func.{f}(lambda p: {body})({a})",
        f=lambda g, a: g.of("jacrev", "jacfwd"), body=_ALONE,
    ),
}  # fmt: skip

# -- writes in place ------------------------------------------------------------------------------


def _out(g: Grower) -> Drawn:
    t = g.target()
    a = g.like(t)
    texts = [
        f"torch.add({a}, {g.like(t)}, out={t})", f"torch.mul({a}, 0.5, out={t})",
        f"torch.tanh({a}, out={t})",
    ]  # fmt: skip
    if g.eval(t).dim() == 2 and g.eval(t).shape[1] == 8:
        texts.append(f"torch.mm({a}, w0, out={t})")
    return texts[g.choose(len(texts))]


def _made_here(g: Grower) -> str:
    t = g.pick(lambda x: is_float(x) and x.dim() > 1 and g.writable(x))
    if t[0] in "xbw":
        raise Unfit
    return t


def _matrix(g: Grower) -> str:
    return g.pick(lambda x: is_float(x) and x.dim() == 2 and x.shape[1] == 8 and g.writable(x))


def _mask(g: Grower, a: str) -> str:
    return g.pick(lambda x: x.dtype is torch.bool and x.shape == g.eval(a).shape)


def _add_to(g: Grower) -> Drawn:
    t = g.target()
    a = g.broad(t)
    text = f"AddTo.apply({t}, {a}.expand_as({t}))"
    return text if g.choose(2) else f"{g.new()} = {text}"


_PART = statements(
    lambda g: g.slice(g.target()), "{a} = {b}", "{a} += {c}", "{a} *= 0.5", "{a} = 0.5"
)
WRITES: dict[str, Maker] = {
    **{
        name: write(template)
        for name, template in {
            "add_": "{a}.add_({b})",
            "sub_": "{a}.sub_({b}, alpha=0.5)",
            "mul_": "{a}.mul_({b})",
            "mul_number_": "{a}.mul_(0.5)",
            "div_": "{a}.div_({b}.abs() + 1)",
            "relu_": "{a}.relu_()",
            "F.relu_": "F.relu({a}, inplace=True)",
            "tanh_": "{a}.tanh_()",
            "sigmoid_": "{a}.sigmoid_()",
            "exp_": "{a}.exp_()",
            "neg_": "{a}.neg_()",
            "square_": "{a}.square_()",
            "clamp_": "{a}.clamp_(-1, 1)",
            "copy_": "{a}.copy_({b})",
            "fill_": "{a}.fill_(0.5)",
            "zero_": "{a}.zero_()",
            "masked_fill_": "{a}.masked_fill_({m}, 0.5)",
            "lerp_": "{a}.lerp_({b}.expand_as({a}), 0.3)",
            "addcmul_": "{a}.addcmul_({b}, {c}, value=0.5)",
            "iadd": "{a} += {b}",
            "imul": "{a} *= {b}",
            "cumsum_": "{a}.cumsum_(-1)",
            "leaky_relu_": "F.leaky_relu_({a})",
            "fill_value_": "{a}.fill_({b}.sum())",
        }.items()
    },
    "setitem": _PART,
    "setitem_again": _PART,
    "set_masked": statements(
        Grower.target, "{a}[{m}] = 0.5", "{a}[{m}] = {b}[{m}]", m=_mask, b=LIKE
    ),
    "indexed": statements(
        having(Grower.target, lambda t: t.dim()), "{a}.index_put_(({unique},), {b}[{unique}])",
        "{a}.index_put_(({rows},), {b}[{rows}], accumulate=True)", "{a}[{unique}] = {b}[{unique}]",
        "{a}.index_add_({along}, {b}.index_select({along}))",
        "{a}.index_copy_({along}, {b}.index_select({along}))", "{a}.index_fill_({along}, 0.5)",
        b=LIKE, unique=lambda g, a: g.rows(a, 0), rows=lambda g, a: g.rows(a, 0, unique=False),
        along=lambda g, a: rows_along(g, a, unique=True),
    ),
    "scattered": statements(
        Grower.target, "{a}.scatter_(-1, {b}.argsort(-1), {b})",
        "{a}.scatter_add_(-1, {b}.argsort(-1), {b})",
        "{a}.scatter_(-1, {b}.argsort(-1)[..., :1], 0.5)", "{a}.masked_scatter_({b} > 0.1, {b})",
        b=LIKE,
    ),
    "detached": statements(
        among(lambda t: not overlaps(t)), "{a}.detach().mul_(0.5)", "{a}.detach()[0].zero_()",
        "{a}.detach().tanh_()",
    ),
    "out": _out,
    "products_written": statements(
        _matrix, "{a}.addmm_({b}, w0)", "{a} += {b} @ w0", "{a}.copy_({b} @ w0)", b=LIKE
    ),
    "add_to": _add_to,
    "resized": statements(
        _made_here, "{a}.transpose_(0, 1)", "{a}.unsqueeze_(0)", "{a}.squeeze_()"
    ),
}  # fmt: skip

# -- programs -------------------------------------------------------------------------------------

RARE = (SPECIAL, FUNCTORCH, POSITIONS, HOLED)  # each a kind of its own, or it would drown
EXPRESSIONS: dict[str, Maker] = {**OPERATORS, **VIEWS, **TENSORS, **POINTWISE}
for _rows in RARE:
    EXPRESSIONS.update(_rows)

# The kinds of lines, the likelier ones several times; a kind is drawn first, then a row.
PRODUCTS = {k: EXPRESSIONS[k] for k in (
    "linear", "linear_bias", "matmul", "mm", "addmm", "bmm", "gram", "einsum", "conv1d", "image",
    "conv2d", "sdpa", "mv", "outer")}  # fmt: skip
NEW = {k: EXPRESSIONS[k] for k in ("created", "filled", "cast", "in_half", "accumulated")}
OTHERS = {
    k: v
    for k, v in EXPRESSIONS.items()
    if not any(k in table for table in (PRODUCTS, VIEWS, NEW, *RARE))
}
KINDS: tuple[Mapping[str, Maker], ...] = (
    OTHERS, PRODUCTS, VIEWS, WRITES, NEW, OTHERS, PRODUCTS, VIEWS, WRITES, WRITES, *RARE,
)  # fmt: skip
HEADERS = (
    "with torch.no_grad():", "with torch.no_grad():", "with torch.enable_grad():",
    "with torch.set_grad_enabled(True):",
)  # fmt: skip


def generate(choose: Choose, *, longest: int = 14) -> Program:
    """A program; raises Unfit in the rare case that nothing came of it."""
    g = Grower(choose)
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("error")
        stack.callback(g.leave, 0)
        for _ in range(3 + choose(longest - 2)):
            form = choose(14)
            if form == 13:
                header = g.of(*HEADERS)
                g.region(header, 1 + choose(3), (EXPRESSIONS, WRITES))
            else:
                g.grow(KINDS[choose(len(KINDS))])
        return g.finish()


def from_seed(seed: int) -> Program:
    """The program of a number."""
    source = random.Random(seed)
    while True:
        with contextlib.suppress(Unfit):
            return generate(source.randrange)
