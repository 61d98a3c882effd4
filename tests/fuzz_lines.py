"""The lines that a random program may consist of, by what they are about."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Collection, Mapping

import torch
from fuzz_grower import (
    KNOWN_BUGS,
    Choose,
    Drawn,
    Grower,
    Maker,
    Unfit,
    is_float,
    memory_of,
    overlaps,
)
from fuzz_programs import BATCH, Program

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


def _unary(template: str) -> Maker:
    def make(g: Grower) -> Drawn:
        a = g.any(dims=0)
        return f"{g.new()} = {template.replace('%s', a)}"

    return make


def _binary(template: str, second: Callable[[Grower, str], str] = Grower.broad) -> Maker:
    def make(g: Grower) -> Drawn:
        a = g.any()
        text = template.replace("{a}", a)
        for name in ("{b}", "{c}"):
            if name in text:
                text = text.replace(name, second(g, a))
        if "{m}" in text:
            text = text.replace("{m}", g.mask(a))
        return f"{g.new()} = {text}"

    return make


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


def _reduction(template: str) -> Maker:
    def make(g: Grower) -> Drawn:
        a = g.any()
        keep = "True" if g.choose(2) else "False"
        text = template.replace("{a}", a).replace("{d}", str(g.dim(a))).replace("{k}", keep)
        return f"{g.new()} = {text}"

    return make


def _weight(g: Grower) -> str:
    return g.of("w0", "w0", "w0.t()") if g.choose(4) < 3 else g.shaped(8, 8)


def _expr(make: Callable[[Grower], str]) -> Maker:
    def line(g: Grower) -> Drawn:
        text = make(g)
        return f"{g.new()} = {text}"

    return line


def _matmul(g: Grower) -> str:
    a = g.any(dims=2)
    return g.of("{a} @ {b}", "torch.matmul({a}, {b})").format(a=a, b=g.right(a))


def _addmm(g: Grower) -> str:
    a = g.last(8)
    if g.eval(a).dim() != 2:
        raise Unfit
    return f"torch.addmm({g.of('w1', 'b0' if g.eval('b0').shape[-1] == 8 else 'w1')}, {a}, w0)"


def _bmm(g: Grower) -> str:
    a = g.exactly(3)
    value = g.eval(a)
    b = g.pick(
        lambda t: is_float(t) and t.dim() == 3 and t.shape[:2] == (value.shape[0], value.shape[2])
    )
    return g.of(f"torch.bmm({a}, {b})", f"torch.baddbmm({a}.sum(-1, keepdim=True), {a}, {b})")


def _gram(g: Grower) -> str:
    a = g.any(dims=2)
    return g.of(f"{a} @ {a}.mT", f"torch.einsum('...id,...jd->...ij', {a}, {a})")


def _einsum(g: Grower) -> str:
    a = g.last(8)
    return g.of(
        f"torch.einsum('...d,de->...e', {a}, {_weight(g)})",
        f"torch.einsum('...d,ed->...e', {a}, {_weight(g)})",
        f"torch.einsum('...d,d->...', {a}, w1)",
    )


def _conv1d(g: Grower) -> str:
    a = g.exactly(3)
    _, channels, length = g.eval(a).shape
    forms = [(o, channels, 64 // (o * channels)) for o in (16, 8, 4) if 64 % (o * channels) == 0]
    forms = [f for f in forms if 1 <= f[2] <= length]
    if not forms:
        raise Unfit
    weight = f"w0.view{forms[g.choose(len(forms))]}"
    return f"F.conv1d({a}, {weight}, padding={g.choose(2)})"


def _conv2d(g: Grower) -> str:
    a = g.exactly(4)
    _, channels, height, width = g.eval(a).shape
    if 16 % channels or height < 2 or width < 2:
        raise Unfit
    weight = f"w0.view({16 // channels}, {channels}, 2, 2)"
    return f"F.conv2d({a}, {weight}, padding={g.choose(2)})"


def _image(g: Grower) -> str:
    return f"{g.last(8)}.reshape(-1, 2, 2, 2)"


def _pool(g: Grower) -> str:
    a = g.exactly(4)
    return g.of(
        f"F.avg_pool2d({a}, 2)", f"F.max_pool2d({a}, 2)", f"F.interpolate({a}, size=(4, 4))"
    )


def _sdpa(g: Grower) -> str:
    a = g.any(dims=3, at_most=4)
    extra = g.of("", ", is_causal=True", ", scale=0.5")
    return f"F.scaled_dot_product_attention({a}, {g.like(a)}, {g.like(a)}{extra})"


def _layer_norm(g: Grower) -> str:
    a = g.last(8, dims=1)
    return g.of(
        f"F.layer_norm({a}, (8,))",
        f"F.layer_norm({a}, (8,), w1, w0[0])",
        f"F.rms_norm({a}, (8,), w1)",
    )


def _group_norm(g: Grower) -> str:
    a = g.any(dims=3, at_most=4)
    if g.eval(a).shape[1] % 2:
        raise Unfit
    return f"F.group_norm({a}, 2)"


def _batch_norm(g: Grower) -> str:
    a = g.last(8, dims=2)
    if g.eval(a).dim() != 2:
        raise Unfit
    return f"F.batch_norm({a}, None, None, w1, None, training=True)"


def _embedding(g: Grower) -> str:
    table = g.pick(lambda t: is_float(t) and t.dim() == 2 and t.shape[0] >= 4)
    return g.of(
        f"F.embedding(i0, {table})",
        f"{table}[i0]",
        f"{table}.index_select(0, i0)",
        f"torch.index_select({table}, 0, i0)",
    )


def _gather(g: Grower) -> str:
    a = g.any(dims=2)
    if g.eval(a).dim() != 2 or g.eval(a).shape[1] < 4:
        raise Unfit
    return g.of(
        f"{a}.gather(1, i0.unsqueeze(1)[:{g.eval(a).shape[0]}])",
        f"torch.take_along_dim({a}, {a}.argsort(-1), -1)",
    )


def _cross_entropy(g: Grower) -> str:
    a = g.pick(lambda t: is_float(t) and t.dim() == 2 and len(t) == BATCH and t.shape[1] >= 4)
    return g.of(
        f"F.cross_entropy({a}, i0)",
        f"F.cross_entropy({a}, i0, reduction='none')",
        f"F.nll_loss({a}.log_softmax(-1), i0)",
    )


def _index(g: Grower) -> str:
    a = g.any()
    d = g.dim(a)
    return g.of(
        f"{a}.index_select({d}, {g.rows(a, d, unique=False)})",
        f"{a}[{g.rows(a, 0, unique=False)}]",
    )


def _cat(g: Grower) -> str:
    a = g.any()
    b = g.like(a)
    d = g.dim(a)
    return g.of(
        f"torch.cat([{a}, {b}], {d})",
        f"torch.stack([{a}, {b}], {d})",
        f"torch.cat([{a}, {b}.detach(), {a}], {d})",
        f"torch.stack([{a}, {b}]).sum(0)",
    )


def _scatter(g: Grower) -> str:
    """The functional forms of writes."""
    a = g.any()
    b = g.like(a)
    rows = g.rows(a, 0)
    return g.of(
        f"{a}.index_add(0, {rows}, {b}[{rows}])",
        f"{a}.index_copy(0, {rows}, {b}[{rows}])",
        f"{a}.slice_scatter({b}[:1], 0, 0, 1)",
        f"{a}.select_scatter({b}[0], 0, 0)",
        f"{a}.scatter_add(-1, {a}.argsort(-1), {b})",
        f"{a}.index_fill(0, {rows}, 0.5)",
    )


def _tril(g: Grower) -> str:
    return f"{g.any(dims=2)}.{g.of('tril', 'triu')}()"


def _pad(g: Grower) -> str:
    a = g.any()
    return g.of(f"F.pad({a}, (0, 1))", f"F.pad({a}, (-1, 0))", f"{a}.repeat_interleave(2, -1)")


# Views. Sizes are written so that another batch may come in, mostly.


def _view(g: Grower) -> str:
    a = g.any()
    value = g.eval(a)
    size = value.shape
    forms = [f"{a}.view(-1)", f"{a}.reshape(-1)", f"{a}.flatten()"]
    if size[-1] % 2 == 0:
        forms += [
            f"{a}.unflatten(-1, (2, -1))",
            f"{a}.reshape(*{a}.shape[:-1], 2, {size[-1] // 2})",
        ]
    if value.dim() == 2 and size[1] == 8:
        forms += [f"{a}.view(-1, 2, 4)", f"{a}.view({a}.shape[0], 4, 2)", f"{a}.view(2, -1, 8)"]
    if value.dim() > 2:
        forms += [f"{a}.flatten(1)", f"{a}.view({a}.size(0), -1)", f"{a}.reshape(-1, {size[-1]})"]
        forms += [f"{a}.flatten(0, 1)"]
    return forms[g.choose(len(forms))]


def _transpose(g: Grower) -> str:
    a = g.any(dims=2)
    dims = g.eval(a).dim()
    order = list(range(dims))
    order = order[::-1] if g.choose(2) else order[1:] + order[:1]
    return g.of(
        f"{a}.transpose({g.dim(a)}, {g.dim(a)})",
        f"{a}.mT",
        f"{a}.permute({', '.join(map(str, order))})",
        f"torch.movedim({a}, 0, -1)",
        f"{a}.t()" if dims == 2 else f"{a}.swapaxes(0, 1)",
    )


def _select(g: Grower) -> str:
    a = g.any()
    d = g.dim(a)
    k = g.at(a, d)
    return g.of(
        g.slice(a),
        f"{a}.select({d}, {k})",
        f"{a}.narrow({d}, {k}, 1)",
        f"{a}[..., {g.at(a, -1)}]",
        f"{a}[None]",
    )


def _squeeze(g: Grower) -> str:
    a = g.any()
    return g.of(f"{a}.unsqueeze({g.dim(a)})", f"{a}.squeeze()", f"{a}.squeeze({g.dim(a)})")


def _expand(g: Grower) -> str:
    a = g.any(at_most=3)
    dims = g.eval(a).dim()
    return g.of(
        f"{a}.expand(2, {', '.join(['-1'] * dims)})",
        f"{a}.broadcast_to(2, *{a}.shape)",
        f"{a}.repeat(2, {', '.join(['1'] * dims)})",
        f"{a}[:1].expand_as({a})",
    )


def _diagonal(g: Grower) -> str:
    a = g.any(dims=2)
    return g.of(f"{a}.diagonal()", f"{a}.diagonal(0, -2, -1)", f"torch.diag_embed({a})")


def _unfold(g: Grower) -> str:
    a = g.any()
    d = g.dim(a)
    g.at(a, d, 2)
    return f"{a}.unfold({d}, 2, {g.of(2, 1)})"


def _pieces(g: Grower) -> Drawn:
    a = g.any()
    d = g.dim(a)
    size = g.eval(a).shape[d]
    if size < 2 or size > 8:
        raise Unfit
    if g.choose(2) and size <= 4:
        return f"{g.new(size)} = {a}.unbind({d})"
    if size % 2:
        raise Unfit
    half = size // 2
    text = g.of(f"{a}.chunk(2, {d})", f"{a}.split({half}, {d})", f"torch.tensor_split({a}, 2, {d})")
    return f"{g.new(2)} = {text}"


# New tensors.


def _created(g: Grower) -> Drawn:
    a = g.any(at_most=3)
    size = ", ".join(map(str, g.eval(a).shape))
    shape = f"{a}.shape" if g.choose(2) else f"({size})" if "," in size else f"({size},)"
    text = g.of(
        f"torch.zeros({shape})",
        f"torch.zeros_like({a})",
        f"{a}.new_zeros({shape})",
        f"torch.ones_like({a})",
        f"torch.full({shape}, 0.5)",
        f"{a}.new_full({shape}, 0.5)",
        f"torch.full_like({a}, -0.5)",
        f"{a}.new_ones({shape})",
        f"torch.arange({a}.shape[-1], dtype=torch.get_default_dtype()) / 8",
        f"{a}.detach()",
        f"{a}.detach().clone()",
    )
    return f"{g.new()} = {text}"


def _filled(g: Grower) -> Drawn:
    """A new tensor, filled whole by differentiable values."""
    a = g.any(at_most=3)
    new = g.new()
    made = g.of(
        f"torch.empty_like({a})",
        f"torch.zeros_like({a})",
        f"{a}.new_empty({a}.shape)",
        f"torch.zeros({a}.shape)",
    )
    count = len(g.eval(a))
    fills = [[f"{new}.copy_({g.broad(a)})"], [f"{new}[:] = {g.broad(a)}"]]
    if count > 1:
        fills.append([f"{new}[:1] = {a}[1:2]", f"{new}[1:] = {a}[1:] * 0.5"])
        fills.append([f"{new}[:-1].copy_({a}[1:])", f"{new}[-1] = 0.5"])
    if count <= 4:
        fills.append([f"{new}[{k}] = {a}[{k}] * {k + 1}" for k in range(count)])
    lines = [f"{new} = {made}", *fills[g.choose(len(fills))]]
    if g.choose(4) == 3:  # a view taken before the write
        lines.insert(1, f"{g.new()} = {new}[0]")
    return lines


def _accumulated(g: Grower) -> Drawn:
    """A running state and a list of its values, as in a loop written by hand."""
    a = g.any(dims=2)
    count = g.eval(a).shape[0]
    if count > 4:
        raise Unfit
    state, out = g.new(), g.new()
    lines = [f"{state} = torch.zeros_like({a}[0])"]
    lines += [f"{state} = {state} * 0.5 + {a}[{k}]" for k in range(count)]
    return [*lines, f"{out} = torch.stack([{state}, {state} * 2])"]


# Casts.


def _cast(g: Grower) -> Drawn:
    a = g.number()
    value = g.eval(a)
    new = g.new()
    other = g.pick(lambda t: t.is_floating_point())
    target, text = g.of(
        (torch.float16, f"{a}.half()"),
        (torch.float32, f"{a}.float()"),
        (torch.float16, f"{a}.to(torch.float16)"),
        (torch.float64, f"{a}.double()"),
        (g.eval(other).dtype, f"{a}.to({other}.dtype)"),
        (g.eval(other).dtype, f"{a}.type_as({other})"),
        (torch.bfloat16, f"{a}.bfloat16().float()"),
    )
    if text.endswith(".bfloat16().float()"):
        raise Unfit
    same = value.dtype is target
    return (f"{new} = {text}", f"{new} = {a}.to({a}.dtype)" if same else f"{new} = {a}.clone()")


def _in_half(g: Grower) -> Drawn:
    """Arithmetic on values of another dtype than FP32, and back."""
    a = g.half()
    new = g.new()
    form = g.choose(4)
    if form == 0:
        return (f"{new} = {a}.float()", f"{new} = {a}.clone()")
    return f"{new} = " + g.of(f"{a} * 0.5", f"{a}.tanh()", f"{a} + {a}.sum()")


# Functions, regions, and what may be inside.


def _function(g: Grower) -> Drawn:
    a = g.any()
    form = g.choose(5)
    if form == 4:
        return f"{g.new(2)} = Two.apply({a}, {g.like(a)}, 0.5)"
    return f"{g.new()} = {('Straight', 'Reverse', 'Clip', 'Clip')[form]}.apply({a})"


BODIES = (
    "torch.tanh(p) * q",
    "p * 0.5 + q",
    "F.gelu(p) - q.sum()",
    "torch.sigmoid(p * q)",
    "(p + q).mul_(0.5)",
    "Clip.apply(p) + q * 0",
    "torch.softmax(p + q, -1)",
)


def _body(g: Grower, a: str) -> str:
    product = ["F.linear(p, w0) * q", "torch.relu(p @ w0) + q", "F.layer_norm(p @ w0, (8,)) * q"]
    bodies = [*BODIES, *(product * 2 if g.eval(a).shape[-1] == 8 else [])]
    return bodies[g.choose(len(bodies))]


def _checkpoint(g: Grower) -> str:
    a = g.any()
    return f"checkpoint(lambda p, q: {_body(g, a)}, {a}, {g.broad(a)})"


def _cond(g: Grower) -> str:
    a = g.any()
    b = g.like(a)
    pred = g.of(f"{a}.sum() > 0", f"{a}.detach().amax() > 1", "w1[0] > 0")
    bodies = [t for t in BODIES if "_(" not in t and "Clip" not in t]
    if g.eval(a).shape[-1] == 8:
        bodies += ["F.linear(p, w0) * q"]
    yes, no = (bodies[g.choose(len(bodies))] for _ in range(2))
    return f"cond({pred}, lambda p, q: {yes}, lambda p, q: {no}, ({a}, {b}))"


def _hook(g: Grower) -> Drawn:
    """On a value of its own: torch 2.13 may crash on one that was written without a gradient."""
    a = g.pick(lambda t: is_float(t) and t.requires_grad)
    new = g.new()
    lines = [f"{new} = {a} * 0.5", f"{new}.register_hook(clipped)"]
    if "hook" not in g.avoided:
        lines.insert(1, f"{g.new()} = {new} + 1")
    return lines


EXPRESSIONS: dict[str, Maker] = {
    "linear": _expr(lambda g: f"F.linear({g.last(8, dims=1)}, {_weight(g)})"),
    "linear_bias": _expr(lambda g: f"F.linear({g.last(8, dims=1)}, {_weight(g)}, w1)"),
    "matmul": _expr(_matmul),
    "mm": _expr(lambda g: f"torch.mm({g.shaped(BATCH, 8)}, {_weight(g)})"),
    "mv": _expr(lambda g: f"torch.mv({_weight(g)}, {g.shaped(8)})"),
    "outer": _expr(lambda g: f"torch.outer({g.exactly(1)}, {g.exactly(1)})"),
    "addmm": _expr(_addmm),
    "bmm": _expr(_bmm),
    "gram": _expr(_gram),
    "einsum": _expr(_einsum),
    "conv1d": _expr(_conv1d),
    "image": _expr(_image),
    "conv2d": _expr(_conv2d),
    "pool": _expr(_pool),
    "sdpa": _expr(_sdpa),
    "layer_norm": _expr(_layer_norm),
    "group_norm": _expr(_group_norm),
    "batch_norm": _expr(_batch_norm),
    "embedding": _expr(_embedding),
    "gather": _expr(_gather),
    "cross_entropy": _expr(_cross_entropy),
    "index": _expr(_index),
    "cat": _expr(_cat),
    "scatter": _expr(_scatter),
    "tril": _expr(_tril),
    "pad": _expr(_pad),
    "view": _expr(_view),
    "transpose": _expr(_transpose),
    "select": _expr(_select),
    "squeeze": _expr(_squeeze),
    "expand": _expr(_expand),
    "diagonal": _expr(_diagonal),
    "unfold": _expr(_unfold),
    "pieces": _pieces,
    "created": _created,
    "filled": _filled,
    "accumulated": _accumulated,
    "cast": _cast,
    "in_half": _in_half,
    "function": _function,
    "checkpoint": _expr(_checkpoint),
    "cond": _expr(_cond),
    "hook": _hook,
    **{name: _unary(template) for name, template in UNARY.items()},
    **{name: _binary(template) for name, template in BINARY.items()},
    **{name: _reduction(template) for name, template in REDUCTIONS.items()},
}

# The kinds of lines, the likelier ones several times; a kind is drawn first, then a row.
PRODUCTS = {k: EXPRESSIONS[k] for k in (
    "linear", "linear_bias", "matmul", "mm", "addmm", "bmm", "gram", "einsum", "conv1d", "image",
    "conv2d", "sdpa", "mv", "outer")}  # fmt: skip
VIEWS = {k: EXPRESSIONS[k] for k in (
    "view", "transpose", "select", "squeeze", "expand", "diagonal", "unfold",
    "pieces")}  # fmt: skip
NEW = {k: EXPRESSIONS[k] for k in ("created", "filled", "cast", "in_half", "accumulated")}
SPECIAL = {k: EXPRESSIONS[k] for k in ("function", "checkpoint", "cond", "hook")}
OTHERS = {
    k: v
    for k, v in EXPRESSIONS.items()
    if not any(k in table for table in (PRODUCTS, VIEWS, NEW, SPECIAL))
}


# Writes.


def _write(template: str) -> Maker:
    """{t}: the target, sometimes part of it; {b}: broadcast to it; {m}: a mask."""

    def make(g: Grower) -> Drawn:
        t = g.target()
        if g.choose(3) == 2:
            t = g.slice(t)
        text = template.replace("{t}", t)
        if "{b}" in text:
            text = text.replace("{b}", g.broad(t))
        if "{c}" in text:
            text = text.replace("{c}", g.broad(t))
        if "{m}" in text:
            text = text.replace("{m}", g.mask(t))
        if text.endswith(")") and "=" not in template and g.choose(5) == 4:
            return f"{g.new()} = {text}"
        return text

    return make


def _setitem(g: Grower) -> Drawn:
    t = g.slice(g.target())
    return g.of(f"{t} = {g.broad(t)}", f"{t} += {g.broad(t)}", f"{t} *= 0.5", f"{t} = 0.5")


def _set_masked(g: Grower) -> Drawn:
    t = g.target()
    mask = g.pick(lambda x: x.dtype is torch.bool and x.shape == g.eval(t).shape)
    return g.of(f"{t}[{mask}] = 0.5", f"{t}[{mask}] = {g.like(t)}[{mask}]")


def _indexed(g: Grower) -> Drawn:
    t = g.target()
    if not g.eval(t).dim():
        raise Unfit
    b = g.like(t)
    unique = g.rows(t, 0)
    rows = g.rows(t, 0, unique=False)
    d = g.dim(t)
    along = g.rows(t, d)
    return g.of(
        f"{t}.index_put_(({unique},), {b}[{unique}])",
        f"{t}.index_put_(({rows},), {b}[{rows}], accumulate=True)",
        f"{t}[{unique}] = {b}[{unique}]",
        f"{t}.index_add_({d}, {along}, {b}.index_select({d}, {along}))",
        f"{t}.index_copy_({d}, {along}, {b}.index_select({d}, {along}))",
        f"{t}.index_fill_({d}, {along}, 0.5)",
    )


def _scattered(g: Grower) -> Drawn:
    t = g.target()
    b = g.like(t)
    return g.of(
        f"{t}.scatter_(-1, {b}.argsort(-1), {b})",
        f"{t}.scatter_add_(-1, {b}.argsort(-1), {b})",
        f"{t}.scatter_(-1, {b}.argsort(-1)[..., :1], 0.5)",
        f"{t}.masked_scatter_({b} > 0.1, {b})",
    )


def _detached(g: Grower) -> Drawn:
    anything = "leaf" not in g.avoided
    t = g.pick(lambda x: is_float(x) and (anything or g.writable(x)) and not overlaps(x))
    return g.of(f"{t}.detach().mul_(0.5)", f"{t}.detach()[0].zero_()", f"{t}.detach().tanh_()")


def _out(g: Grower) -> Drawn:
    t = g.target()
    a = g.like(t)
    forms = [
        f"torch.add({a}, {g.like(t)}, out={t})",
        f"torch.mul({a}, 0.5, out={t})",
        f"torch.tanh({a}, out={t})",
    ]
    if g.eval(t).dim() == 2 and g.eval(t).shape[1] == 8:
        forms.append(f"torch.mm({a}, w0, out={t})")
    return forms[g.choose(len(forms))]


def _products_written(g: Grower) -> Drawn:
    t = g.pick(lambda x: is_float(x) and x.dim() == 2 and x.shape[1] == 8 and g.writable(x))
    a = g.like(t)
    return g.of(f"{t}.addmm_({a}, w0)", f"{t} += {a} @ w0", f"{t}.copy_({a} @ w0)")


def _resized(g: Grower) -> Drawn:
    t = g.pick(lambda x: is_float(x) and x.dim() > 1 and g.writable(x))
    if t[0] in "xbw":
        raise Unfit
    return g.of(f"{t}.transpose_(0, 1)", f"{t}.unsqueeze_(0)", f"{t}.squeeze_()")


def _add_to(g: Grower) -> Drawn:
    t = g.target()
    a = g.broad(t)
    if "dirty" in g.avoided:
        memory = memory_of(g.eval(t))
        if any(memory == memory_of(g.values[i.name]) for i in g.inputs):
            raise Unfit
        a = f"({a} * 1)"
    text = f"AddTo.apply({t}, {a}.expand_as({t}))"
    return text if g.choose(2) else f"{g.new()} = {text}"


WRITES: dict[str, Maker] = {
    **{
        name: _write(template)
        for name, template in {
            "add_": "{t}.add_({b})",
            "sub_": "{t}.sub_({b}, alpha=0.5)",
            "mul_": "{t}.mul_({b})",
            "mul_number_": "{t}.mul_(0.5)",
            "div_": "{t}.div_({b}.abs() + 1)",
            "relu_": "{t}.relu_()",
            "F.relu_": "F.relu({t}, inplace=True)",
            "tanh_": "{t}.tanh_()",
            "sigmoid_": "{t}.sigmoid_()",
            "exp_": "{t}.exp_()",
            "neg_": "{t}.neg_()",
            "square_": "{t}.square_()",
            "clamp_": "{t}.clamp_(-1, 1)",
            "copy_": "{t}.copy_({b})",
            "fill_": "{t}.fill_(0.5)",
            "zero_": "{t}.zero_()",
            "masked_fill_": "{t}.masked_fill_({m}, 0.5)",
            "lerp_": "{t}.lerp_({b}.expand_as({t}), 0.3)",
            "addcmul_": "{t}.addcmul_({b}, {c}, value=0.5)",
            "iadd": "{t} += {b}",
            "imul": "{t} *= {b}",
            "cumsum_": "{t}.cumsum_(-1)",
            "leaky_relu_": "F.leaky_relu_({t})",
            "fill_value_": "{t}.fill_({b}.sum())",
        }.items()
    },
    "setitem": _setitem,
    "setitem_again": _setitem,
    "set_masked": _set_masked,
    "indexed": _indexed,
    "scattered": _scattered,
    "detached": _detached,
    "out": _out,
    "products_written": _products_written,
    "add_to": _add_to,
    "resized": _resized,
}

KINDS: tuple[Mapping[str, Maker], ...] = (
    OTHERS, PRODUCTS, VIEWS, WRITES, NEW, OTHERS, PRODUCTS, VIEWS, WRITES, SPECIAL, WRITES,
)  # fmt: skip
HEADERS = (
    "with torch.no_grad():",
    "with torch.no_grad():",
    "with torch.enable_grad():",
    "with torch.set_grad_enabled(True):",
)


def generate(
    choose: Choose, *, known_bugs: Collection[str] = tuple(KNOWN_BUGS), longest: int = 14
) -> Program:
    """A program; raises Unfit in the rare case that nothing came of it.

    Args:
        known_bugs: of `KNOWN_BUGS`, those that are avoided.
    """
    g = Grower(choose, known_bugs)
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


def from_seed(seed: int, known_bugs: Collection[str] = tuple(KNOWN_BUGS)) -> Program:
    """The program of a number."""
    source = random.Random(seed)
    while True:
        with contextlib.suppress(Unfit):
            return generate(source.randrange, known_bugs=known_bugs)


def operators() -> list[str]:
    """Every row of the tables."""
    return sorted({*EXPRESSIONS, *WRITES})
