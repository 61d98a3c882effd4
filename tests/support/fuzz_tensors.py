"""Lines of new tensors, and of casts."""

from __future__ import annotations

import torch
from fuzz_grower import Drawn, Grower, Maker, Unfit


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


TENSORS: dict[str, Maker] = {
    "created": _created,
    "filled": _filled,
    "accumulated": _accumulated,
    "cast": _cast,
    "in_half": _in_half,
}
