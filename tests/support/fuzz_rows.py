"""The tables that lines of random programs are drawn from: how each kind of line is made.

Most rows are templates: `{a}` is what the line is about, `{b}` and `{c}` can be broadcast to it,
`{m}` is a mask of it, and whatever else a template names is drawn as its row says. Sizes are
written so that another batch may come in, mostly.
"""

from collections.abc import Callable
from typing import Any

import torch
from fuzz_grower import HOLES, Drawn, Grower, Maker, Unfit, is_float
from fuzz_programs import BATCH

Subject = Callable[[Grower], str]
FLOAT = "dtype=torch.get_default_dtype()"

# -- how a line is made ---------------------------------------------------------------------------


def _filled_in(g: Grower, a: str, texts: tuple[str, ...], more: dict[str, Any]) -> str:
    """One of several templates; all that they name is drawn before it is chosen."""
    drawn: dict[str, Any] = {"a": a} | {name: draw(g, a) for name, draw in more.items()}
    for name, draw in {"b": g.broad, "c": g.broad, "m": g.mask}.items():
        if name not in more and any(f"{{{name}}}" in text for text in texts):
            drawn[name] = draw(a)
    return (g.of(*texts) if len(texts) > 1 else texts[0]).format(**drawn)


def forms(subject: Subject, *texts: str, results: int = 1, **more: Any) -> Maker:
    """`new = text`, for one of several texts about a subject."""

    def line(g: Grower) -> Drawn:
        text = _filled_in(g, subject(g), texts, more)
        return f"{g.new(results)} = {text}"

    return line


def statements(subject: Subject, *texts: str, **more: Any) -> Maker:
    return lambda g: _filled_in(g, subject(g), texts, more)


def write(template: str) -> Maker:
    """`{a}` is the target, sometimes part of it."""

    def line(g: Grower) -> Drawn:
        a = g.target()
        if g.choose(3) == 2:
            a = g.slice(a)
        text = _filled_in(g, a, (template,), {})
        if text.endswith(")") and "=" not in template and g.choose(5) == 4:
            return f"{g.new()} = {text}"
        return text

    return line


def having(subject: Subject, fits: Callable[[torch.Tensor], object]) -> Subject:
    def picked(g: Grower) -> str:
        a = subject(g)
        if not fits(g.eval(a)):
            raise Unfit
        return a

    return picked


def among(fits: Callable[[torch.Tensor], object]) -> Subject:
    """Any FP32 value that fits."""
    return lambda g: g.pick(lambda t: is_float(t) and bool(fits(t)))


def of_rank(dims: int, at_most: int = 5) -> Subject:
    return lambda g: g.any(dims=dims, at_most=at_most)


def eight(dims: int = 2) -> Subject:
    return lambda g: g.last(8, dims=dims)


ANY, LIKE, DIM = Grower.any, Grower.like, Grower.dim

# -- products, norms, embeddings and losses, and what indexes, joins or pads ----------------------


def _weight(g: Grower, a: str = "") -> str:
    return g.of("w0", "w0", "w0.t()") if g.choose(4) < 3 else g.shaped(8, 8)


def _matmul(g: Grower) -> Drawn:
    a = g.any(dims=2)
    text = g.of("{a} @ {b}", "torch.matmul({a}, {b})").format(a=a, b=g.right(a))
    return f"{g.new()} = {text}"


def _batched(g: Grower, a: str) -> str:
    batch, _, inner = g.eval(a).shape
    return g.pick(lambda t: is_float(t) and t.dim() == 3 and t.shape[:2] == (batch, inner))


def _conv1d(g: Grower) -> Drawn:
    a = g.exactly(3)
    _, channels, length = g.eval(a).shape
    sizes = [(o, channels, 64 // (o * channels)) for o in (16, 8, 4) if 64 % (o * channels) == 0]
    sizes = [s for s in sizes if 1 <= s[2] <= length]
    if not sizes:
        raise Unfit
    weight = f"w0.view{sizes[g.choose(len(sizes))]}"
    return f"{g.new()} = F.conv1d({a}, {weight}, padding={g.choose(2)})"


def _conv2d(g: Grower) -> Drawn:
    a = g.exactly(4)
    _, channels, height, width = g.eval(a).shape
    if 16 % channels or height < 2 or width < 2:
        raise Unfit
    weight = f"w0.view({16 // channels}, {channels}, 2, 2)"
    return f"{g.new()} = F.conv2d({a}, {weight}, padding={g.choose(2)})"


def rows_along(g: Grower, a: str, unique: bool = False) -> str:
    d = g.dim(a)
    return f"{d}, {g.rows(a, d, unique=unique)}"


OPERATORS: dict[str, Maker] = {
    "linear": forms(eight(1), "F.linear({a}, {w})", w=_weight),
    "linear_bias": forms(eight(1), "F.linear({a}, {w}, w1)", w=_weight),
    "matmul": _matmul,
    "mm": forms(lambda g: g.shaped(BATCH, 8), "torch.mm({a}, {w})", w=_weight),
    "mv": forms(_weight, "torch.mv({a}, {row})", row=lambda g, a: g.shaped(8)),
    "outer": forms(of_rank(1, 1), "torch.outer({a}, {row})", row=lambda g, a: g.exactly(1)),
    "addmm": forms(
        having(eight(), lambda t: t.dim() == 2), "torch.addmm({added}, {a}, w0)",
        added=lambda g, a: g.of("w1", "b0" if g.eval("b0").shape[-1] == 8 else "w1"),
    ),
    "bmm": forms(
        of_rank(3, 3), "torch.bmm({a}, {b})", "torch.baddbmm({a}.sum(-1, keepdim=True), {a}, {b})",
        b=_batched,
    ),
    "gram": forms(of_rank(2), "{a} @ {a}.mT", "torch.einsum('...id,...jd->...ij', {a}, {a})"),
    "einsum": forms(
        eight(), "torch.einsum('...d,de->...e', {a}, {v})",
        "torch.einsum('...d,ed->...e', {a}, {w})", "torch.einsum('...d,d->...', {a}, w1)",
        v=_weight, w=_weight,
    ),
    "conv1d": _conv1d,
    "image": forms(eight(), "{a}.reshape(-1, 2, 2, 2)"),
    "conv2d": _conv2d,
    "pool": forms(
        of_rank(4, 4), "F.avg_pool2d({a}, 2)", "F.max_pool2d({a}, 2)",
        "F.interpolate({a}, size=(4, 4))",
    ),
    "sdpa": forms(
        of_rank(3, 4), "F.scaled_dot_product_attention({a}, {k}, {v}{extra})",
        extra=lambda g, a: g.of("", ", is_causal=True", ", scale=0.5"), k=LIKE, v=LIKE,
    ),
    "layer_norm": forms(
        eight(1), "F.layer_norm({a}, (8,))", "F.layer_norm({a}, (8,), w1, w0[0])",
        "F.rms_norm({a}, (8,), w1)",
    ),
    "group_norm": forms(
        having(of_rank(3, 4), lambda t: t.shape[1] % 2 == 0), "F.group_norm({a}, 2)"
    ),
    "batch_norm": forms(
        having(eight(), lambda t: t.dim() == 2),
        "F.batch_norm({a}, None, None, w1, None, training=True)",
    ),
    "embedding": forms(
        among(lambda t: t.dim() == 2 and t.shape[0] >= 4), "F.embedding(i0, {a})", "{a}[i0]",
        "{a}.index_select(0, i0)", "torch.index_select({a}, 0, i0)",
    ),
    "gather": forms(
        having(of_rank(2), lambda t: t.dim() == 2 and t.shape[1] >= 4),
        "{a}.gather(1, i0.unsqueeze(1)[:{n}])", "torch.take_along_dim({a}, {a}.argsort(-1), -1)",
        n=lambda g, a: len(g.eval(a)),
    ),
    "cross_entropy": forms(
        among(lambda t: t.dim() == 2 and len(t) == BATCH and t.shape[1] >= 4),
        "F.cross_entropy({a}, i0)", "F.cross_entropy({a}, i0, reduction='none')",
        "F.nll_loss({a}.log_softmax(-1), i0)",
    ),
    "index": forms(
        ANY, "{a}.index_select({along})", "{a}[{rows}]",
        along=rows_along, rows=lambda g, a: g.rows(a, 0, unique=False),
    ),
    "cat": forms(
        ANY, "torch.cat([{a}, {b}], {d})", "torch.stack([{a}, {b}], {d})",
        "torch.cat([{a}, {b}.detach(), {a}], {d})", "torch.stack([{a}, {b}]).sum(0)",
        b=LIKE, d=DIM,
    ),
    "scatter": forms(  # the functional forms of writes
        ANY, "{a}.index_add(0, {rows}, {b}[{rows}])", "{a}.index_copy(0, {rows}, {b}[{rows}])",
        "{a}.slice_scatter({b}[:1], 0, 0, 1)", "{a}.select_scatter({b}[0], 0, 0)",
        "{a}.scatter_add(-1, {a}.argsort(-1), {b})", "{a}.index_fill(0, {rows}, 0.5)",
        b=LIKE, rows=lambda g, a: g.rows(a, 0),
    ),
    "tril": forms(of_rank(2), "{a}.tril()", "{a}.triu()"),
    "pad": forms(ANY, "F.pad({a}, (0, 1))", "F.pad({a}, (-1, 0))", "{a}.repeat_interleave(2, -1)"),
}  # fmt: skip

# -- views ----------------------------------------------------------------------------------------


def _view(g: Grower) -> Drawn:
    a = g.any()
    value = g.eval(a)
    size = value.shape
    texts = ["{a}.view(-1)", "{a}.reshape(-1)", "{a}.flatten()"]
    if size[-1] % 2 == 0:
        texts += ["{a}.unflatten(-1, (2, -1))", "{a}.reshape(*{a}.shape[:-1], 2, {half})"]
    if value.dim() == 2 and size[1] == 8:
        texts += ["{a}.view(-1, 2, 4)", "{a}.view({a}.shape[0], 4, 2)", "{a}.view(2, -1, 8)"]
    if value.dim() > 2:
        texts += ["{a}.flatten(1)", "{a}.view({a}.size(0), -1)", "{a}.reshape(-1, {last})"]
        texts += ["{a}.flatten(0, 1)"]
    text = texts[g.choose(len(texts))].format(a=a, half=size[-1] // 2, last=size[-1])
    return f"{g.new()} = {text}"


def _order(g: Grower, a: str) -> str:
    order = list(range(g.eval(a).dim()))
    return ", ".join(map(str, order[::-1] if g.choose(2) else order[1:] + order[:1]))


def _place(g: Grower, a: str) -> str:
    d = g.dim(a)
    return f"{d}, {g.at(a, d)}"


def _of_two(g: Grower, a: str) -> int:
    d = g.dim(a)
    g.at(a, d, 2)
    return d


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


def _each(number: int) -> Callable[[Grower, str], str]:
    return lambda g, a: ", ".join([str(number)] * g.eval(a).dim())


VIEWS: dict[str, Maker] = {
    "view": _view,
    "transpose": forms(
        of_rank(2), "{a}.transpose({d}, {e})", "{a}.mT", "{a}.permute({order})",
        "torch.movedim({a}, 0, -1)", "{a}.{swapped}",
        order=_order, d=DIM, e=DIM,
        swapped=lambda g, a: "t()" if g.eval(a).dim() == 2 else "swapaxes(0, 1)",
    ),
    "select": forms(
        ANY, "{part}", "{a}.select({at})", "{a}.narrow({at}, 1)", "{a}[..., {last}]", "{a}[None]",
        at=_place, part=Grower.slice, last=lambda g, a: g.at(a, -1),
    ),
    "squeeze": forms(
        ANY, "{a}.unsqueeze({d})", "{a}.squeeze()", "{a}.squeeze({e})", d=DIM, e=DIM
    ),
    "expand": forms(
        of_rank(1, 3), "{a}.expand(2, {kept})", "{a}.broadcast_to(2, *{a}.shape)",
        "{a}.repeat(2, {once})", "{a}[:1].expand_as({a})", kept=_each(-1), once=_each(1),
    ),
    "diagonal": forms(
        of_rank(2), "{a}.diagonal()", "{a}.diagonal(0, -2, -1)", "torch.diag_embed({a})"
    ),
    "unfold": forms(ANY, "{a}.unfold({d}, 2, 2)", "{a}.unfold({d}, 2, 1)", d=_of_two),
    "pieces": _pieces,
}  # fmt: skip

# -- new tensors, and casts -----------------------------------------------------------------------


def _shape(g: Grower, a: str) -> str:
    return f"{a}.shape" if g.choose(2) else str(tuple(g.eval(a).shape))


def _filled(g: Grower) -> Drawn:
    """A new tensor, filled whole by differentiable values."""
    a = g.any(at_most=3)
    new = g.new()
    made = g.of(
        f"torch.empty_like({a})", f"torch.zeros_like({a})", f"{a}.new_empty({a}.shape)",
        f"torch.zeros({a}.shape)",
    )  # fmt: skip
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
        (None, ""),
    )
    if target is None:
        raise Unfit
    same = value.dtype is target
    return (f"{new} = {text}", f"{new} = {a}.to({a}.dtype)" if same else f"{new} = {a}.clone()")


def _in_half(g: Grower) -> Drawn:
    """Arithmetic on values of another dtype than FP32, and back."""
    a = g.half()
    new = g.new()
    if g.choose(4) == 0:
        return (f"{new} = {a}.float()", f"{new} = {a}.clone()")
    return f"{new} = " + g.of(f"{a} * 0.5", f"{a}.tanh()", f"{a} + {a}.sum()")


TENSORS: dict[str, Maker] = {
    "created": forms(
        of_rank(1, 3), "torch.zeros({s})", "torch.zeros_like({a})", "{a}.new_zeros({s})",
        "torch.ones_like({a})", "torch.full({s}, 0.5)", "{a}.new_full({s}, 0.5)",
        "torch.full_like({a}, -0.5)", "{a}.new_ones({s})",
        f"torch.arange({{a}}.shape[-1], {FLOAT}) / 8", "{a}.detach()", "{a}.detach().clone()",
        s=_shape,
    ),
    "filled": _filled,
    "accumulated": _accumulated,
    "cast": _cast,
    "in_half": _in_half,
}  # fmt: skip

# -- data of which some are NaN, read by a program that was written for them ----------------------

HOLED: dict[str, Maker] = {
    "holes_filled": forms(
        eight(1), "torch.nan_to_num(n0, nan=0.5)", "torch.where(n0.isnan(), 0.25, n0)",
        "n0.masked_fill(n0.isnan(), 0.0)", "n0.nan_to_num(0.0) + {a}.mean()",
        "F.linear(n0.nan_to_num(0.0), w0, w1)",
    ),
    "holes_masked": forms(
        lambda g: g.shaped(*g.eval(HOLES).shape), "{a}.masked_fill(n0.isnan(), 0.0)",
        "torch.where(n0.isnan(), {a}, n0.nan_to_num(0.0) * {a})",
        "{a} * (~n0.isnan()).to({a}.dtype)", "F.mse_loss({a} * ~n0.isnan(), n0.nan_to_num(0.0))",
    ),
    "holes_reduced": forms(
        lambda g: HOLES, "torch.nanmean({a}, {d})", "torch.nansum({a}, {e})", "{a}.isnan().sum(0)",
        "torch.nanmean({a} * 0.5)", d=lambda g, a: g.of(0, 1), e=lambda g, a: g.of(0, 1),
    ),
}  # fmt: skip
