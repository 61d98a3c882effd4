"""Lines of products, norms, embeddings and losses, and of what indexes, joins or pads."""

from __future__ import annotations

from fuzz_grower import Grower, Maker, Unfit, is_float
from fuzz_makers import expr
from fuzz_programs import BATCH


def _weight(g: Grower) -> str:
    return g.of("w0", "w0", "w0.t()") if g.choose(4) < 3 else g.shaped(8, 8)


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


OPERATORS: dict[str, Maker] = {
    "linear": expr(lambda g: f"F.linear({g.last(8, dims=1)}, {_weight(g)})"),
    "linear_bias": expr(lambda g: f"F.linear({g.last(8, dims=1)}, {_weight(g)}, w1)"),
    "matmul": expr(_matmul),
    "mm": expr(lambda g: f"torch.mm({g.shaped(BATCH, 8)}, {_weight(g)})"),
    "mv": expr(lambda g: f"torch.mv({_weight(g)}, {g.shaped(8)})"),
    "outer": expr(lambda g: f"torch.outer({g.exactly(1)}, {g.exactly(1)})"),
    "addmm": expr(_addmm),
    "bmm": expr(_bmm),
    "gram": expr(_gram),
    "einsum": expr(_einsum),
    "conv1d": expr(_conv1d),
    "image": expr(_image),
    "conv2d": expr(_conv2d),
    "pool": expr(_pool),
    "sdpa": expr(_sdpa),
    "layer_norm": expr(_layer_norm),
    "group_norm": expr(_group_norm),
    "batch_norm": expr(_batch_norm),
    "embedding": expr(_embedding),
    "gather": expr(_gather),
    "cross_entropy": expr(_cross_entropy),
    "index": expr(_index),
    "cat": expr(_cat),
    "scatter": expr(_scatter),
    "tril": expr(_tril),
    "pad": expr(_pad),
}
