"""Lines that write in place."""

from __future__ import annotations

import torch
from fuzz_grower import Drawn, Grower, Maker, Unfit, is_float, overlaps
from fuzz_makers import write


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
    t = g.pick(lambda x: is_float(x) and not overlaps(x))
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
    text = f"AddTo.apply({t}, {a}.expand_as({t}))"
    return text if g.choose(2) else f"{g.new()} = {text}"


WRITES: dict[str, Maker] = {
    **{
        name: write(template)
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
