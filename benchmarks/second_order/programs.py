"""Small programs with derivatives, transforms or control flow inside. Each is a module whose call
returns a loss; its input is an FP32 tensor of (32, 16).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.nn.attention.flex_attention import flex_attention

__all__ = ["DERIVATIVES", "OTHERS", "inputs"]

IN, WIDTH, BATCH = 16, 64, 32

Loss = Callable[["Program", Tensor], Tensor]


def inputs() -> Tensor:
    """A batch."""
    return torch.randn(BATCH, IN)


class Program(nn.Module):
    """A smooth network, and a loss that is computed with it.

    Args:
        loss: the loss of this module and a batch.
        results: the width of the network's result.
    """

    def __init__(self, loss: Loss, results: int = 1) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(IN, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Softplus(),
            nn.Linear(WIDTH, results),
        )  # fmt: skip
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        """The loss of a batch."""
        return self.loss(self, x)


def _slope(value: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(value, x, create_graph=True)[0]


def _wgan_gp(m: Program, x: Tensor) -> Tensor:
    real, fake = x, x.flip(0) * 0.5
    between = (0.3 * real + 0.7 * fake).requires_grad_()
    penalty = (_slope(m.net(between).sum(), between).norm(dim=-1) - 1).square().mean()
    return m.net(fake).mean() - m.net(real).mean() + 10 * penalty


def _r1(m: Program, x: Tensor) -> Tensor:
    real = x.detach().requires_grad_()
    scores = m.net(real)
    return F.softplus(-scores).mean() + 5 * _slope(scores.sum(), real).square().sum(-1).mean()


def _burgers(m: Program, x: Tensor) -> Tensor:
    at = x.detach().requires_grad_()
    u = m.net(at)
    du = _slope(u.sum(), at)
    u_t, u_x = du[:, 0:1], du[:, 1:2]
    u_xx = _slope(u_x.sum(), at)[:, 1:2]
    return (u_t + u * u_x - 0.01 * u_xx).square().mean() + (u - x[:, :1].sin()).square().mean()


def _forces(m: Program, x: Tensor) -> Tensor:
    places = x.detach().requires_grad_()
    energy = m.net(places).sum(-1)
    forces = -_slope(energy.sum(), places)
    return (energy - x.sum(-1)).square().mean() + (forces + x).square().mean()


def _maml(m: Program, x: Tensor) -> Tensor:
    params, total = dict(m.net.named_parameters()), x.new_zeros(())
    for phase in (0.3, 0.9):
        y = (x[:, :1] + phase).sin()
        loss = F.mse_loss(functional_call(m.net, params, (x,)), y)
        slopes = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        fast = {k: p - 0.1 * s for (k, p), s in zip(params.items(), slopes, strict=True)}
        total = total + F.mse_loss(functional_call(m.net, fast, (x,)), y)
    return total


def _hvp(m: Program, x: Tensor) -> Tensor:
    at = x.detach().requires_grad_()
    slope = _slope(m.net(at).square().sum(), at)
    return _slope((slope * x).sum(), at).square().mean()


def _func_grad(m: Program, x: Tensor) -> Tensor:
    return grad(lambda z: m.net(z).square().sum())(x).square().mean()


def _jvp(m: Program, x: Tensor) -> Tensor:
    out, tangent = jvp(m.net, (x,), (torch.ones_like(x),))
    return out.square().mean() + tangent.square().mean()


def _jacrev(m: Program, x: Tensor) -> Tensor:
    return vmap(jacrev(m.net))(x).square().mean()


def _hessian(m: Program, x: Tensor) -> Tensor:
    return vmap(hessian(lambda z: m.net(z).sum()))(x[:8]).square().mean()


def _per_sample(m: Program, x: Tensor) -> Tensor:
    def loss(params: dict[str, Tensor], row: Tensor) -> Tensor:
        return functional_call(m.net, params, (row,)).square().sum()

    slopes = vmap(grad(loss), in_dims=(None, 0))(dict(m.net.named_parameters()), x)
    return sum((s.square().flatten(1).sum(1).mean() for s in slopes.values()), x.new_zeros(()))


class Ensemble(nn.Module):
    """Members whose parameters lie side by side."""

    def __init__(self, members: int = 4) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(members, WIDTH, IN) / 4)
        self.down = nn.Parameter(torch.randn(members, 1, WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        """The loss of a batch."""

        def member(up: Tensor, down: Tensor) -> Tensor:
            return F.linear(torch.tanh(F.linear(x, up)), down)

        return (vmap(member)(self.up, self.down) - 1).square().mean()


def _cond(m: Program, x: Tensor) -> Tensor:
    def other(z: Tensor) -> Tensor:
        return z @ m.net[2].weight

    hidden = m.net[0](x)
    hidden = torch.cond(x.sum() > 1e6, lambda z: z * 2, other, (hidden,))
    out: Tensor = m.net[4](hidden)
    return out.square().mean()


def _scan(m: Program, x: Tensor) -> Tensor:
    def step(carry: Tensor, row: Tensor) -> Any:
        carry = torch.tanh(carry @ m.net[2].weight + row)
        return carry, carry * 1

    _, rows = scan(step, torch.zeros(WIDTH, dtype=x.dtype), m.net[0](x)[:8])
    out: Tensor = m.net[4](rows)
    return out.square().mean()


def _map(m: Program, x: Tensor) -> Tensor:
    rows = torch._higher_order_ops.map(lambda row, w: w @ row, m.net[0](x), m.net[2].weight)
    out: Tensor = m.net[4](rows)
    return out.square().mean()


def _while_loop(m: Program, x: Tensor) -> Tensor:
    hidden, weight = m.net[0](x), m.net[2].weight.detach()
    start = (torch.zeros((), dtype=torch.int64), hidden.detach())
    with torch.no_grad():
        loop = torch._higher_order_ops.while_loop
        added = loop(lambda i, h: i < 3, lambda i, h: (i + 1, h @ weight / 4), start)[1]
    out: Tensor = m.net[4](hidden + added)
    return out.square().mean()


def _flex(m: Program, x: Tensor) -> Tensor:
    q = m.net[0](x).view(1, 1, BATCH, WIDTH)
    h = flex_attention(q.detach(), q.detach(), q.detach())
    assert isinstance(h, Tensor)
    out: Tensor = m.net[4](h.view(BATCH, WIDTH) + q.view(BATCH, WIDTH))
    return out.square().mean()


DERIVATIVES: dict[str, Callable[[], nn.Module]] = {
    "WGAN-GP": lambda: Program(_wgan_gp),
    "R1": lambda: Program(_r1),
    "Burgers' equation": lambda: Program(_burgers),
    "energy and forces": lambda: Program(_forces),
    "MAML": lambda: Program(_maml),
    "Hessian-vector product": lambda: Program(_hvp),
    "func.grad": lambda: Program(_func_grad),
    "jvp": lambda: Program(_jvp),
    "vmap of jacrev": lambda: Program(_jacrev, 4),
    "vmap of hessian": lambda: Program(_hessian),
    "per-sample gradients": lambda: Program(_per_sample),
    "ensemble": Ensemble,
}
OTHERS: dict[str, Callable[[], nn.Module]] = {
    "cond": lambda: Program(_cond),
    "scan": lambda: Program(_scan),
    "map": lambda: Program(_map),
    "while_loop": lambda: Program(_while_loop),
    "flex_attention (forward)": lambda: Program(_flex),
}
