"""Lines of views. Sizes are written so that another batch may come in, mostly."""

from __future__ import annotations

from fuzz_grower import Drawn, Grower, Maker, Unfit
from fuzz_makers import expr


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


VIEWS: dict[str, Maker] = {
    "view": expr(_view),
    "transpose": expr(_transpose),
    "select": expr(_select),
    "squeeze": expr(_squeeze),
    "expand": expr(_expand),
    "diagonal": expr(_diagonal),
    "unfold": expr(_unfold),
    "pieces": _pieces,
}
