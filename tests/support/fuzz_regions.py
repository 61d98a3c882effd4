"""Lines of functions and regions, with what may be inside, and of hooks."""

from __future__ import annotations

from fuzz_grower import Drawn, Grower, Maker, is_float
from fuzz_makers import expr


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
    return [f"{new} = {a} * 0.5", f"{g.new()} = {new} + 1", f"{new}.register_hook(clipped)"]


SPECIAL: dict[str, Maker] = {
    "function": _function,
    "checkpoint": expr(_checkpoint),
    "cond": expr(_cond),
    "hook": _hook,
}
