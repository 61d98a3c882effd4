"""Lines of torch.func's transforms: vmap, grad, jvp, vjp, and one in another."""

from __future__ import annotations

from fuzz_grower import Drawn, Grower, Maker, Unfit
from fuzz_makers import expr

# Of p alone, with a result of its shape.
SAME = ("p.tanh() * p", "torch.sin(p) * 0.5", "p.square() * 0.3 + p", "F.gelu(p)")
PRODUCT = ("F.linear(p, w0)", "torch.tanh(F.linear(p, w0, w1))", "(p @ w0.t()) * 0.5")
PAIRS = ("p * q", "torch.tanh(p) + q", "p - q.sum()", "torch.softmax(p + q, -1)")
PAIR_PRODUCT = ("F.linear(p, w0) * q", "F.linear(p * q, w0, w1)", "(p @ w0) + q")


def _of(g: Grower, a: str, plain: tuple[str, ...], product: tuple[str, ...]) -> str:
    bodies = [*plain, *(product * 2 if g.eval(a).shape[-1] == 8 else ())]
    return bodies[g.choose(len(bodies))]


def _vmap(g: Grower) -> str:
    a = g.any(dims=2)
    body = _of(g, a, PAIRS, PAIR_PRODUCT)
    second = f"{a}.shape[1:]"
    if g.choose(2):
        return f"torch.vmap(lambda p, q: {body})({a}, {g.like(a)})"
    b = g.pick(lambda t: t.dtype is g.eval(a).dtype and t.shape == g.eval(a).shape[1:])
    return f"torch.vmap(lambda p, q: {body}, in_dims=(0, None))({a}, {b}.view({second}))"


def _grad(g: Grower) -> str:
    a = g.any()
    return f"torch.func.grad(lambda p: ({_of(g, a, SAME, PRODUCT)}).sum() / 4)({a})"


def _samples(g: Grower) -> str:
    """A gradient for each sample."""
    a = g.any(dims=2)
    body = _of(g, a, SAME, PRODUCT)
    return f"torch.vmap(torch.func.grad(lambda p: ({body}).square().sum() / 8))({a})"


def _jvp(g: Grower) -> Drawn:
    a = g.any()
    body = _of(g, a, SAME, PRODUCT)
    return f"{g.new(2)} = torch.func.jvp(lambda p: {body}, ({a},), ({g.like(a)},))"


def _vjp(g: Grower) -> str:
    a = g.any()
    return f"torch.func.vjp(lambda p: {_of(g, a, SAME, PRODUCT)}, {a})[1]({g.like(a)})[0]"


def _jacobian(g: Grower) -> str:
    a = g.exactly(1)
    if g.eval(a).numel() > 8:
        raise Unfit
    function = g.of("jacrev", "jacfwd")
    return f"torch.func.{function}(lambda p: {_of(g, a, SAME, PRODUCT)})({a})"


FUNCTORCH: dict[str, Maker] = {
    "vmap": expr(_vmap),
    "func_grad": expr(_grad),
    "per_sample": expr(_samples),
    "jvp": _jvp,
    "vjp": expr(_vjp),
    "jacobian": expr(_jacobian),
}
