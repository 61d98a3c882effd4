"""Derivatives inside of what is compiled: the part of their products that is low, beside peers.

Each program is a small network (widths 16 and 64, batch 32) whose loss holds a derivative, a
transform of torch.func or control flow. It runs op by op (`aot_eager`); the profiler says which
products it calls, forward and backward, with which sizes and dtypes. "off" is the largest distance
of a parameter's gradient from that of the same program in FP64, relative to its norm. The level is
O1. `compile + autocast` has `torch._dynamo.config.trace_autograd_ops` set, without which it breaks
its graph at `torch.autograd.grad`, and can't go backward. Neither autocast has a GradScaler, so in
FP16 their distances tell nothing of one that has.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.nn.attention.flex_attention import flex_attention

from benchmarks.harness.report import Report, Settings, Table, paragraphs, plain
from mpcompile import mpcompile

DEVICES = ("cpu",)
_DTYPES = {"BF16": torch.bfloat16, "FP16": torch.float16}


def run(settings: Settings) -> Report:
    """Count everything; under `settings.quick` one program in BF16."""
    programs = {**DERIVATIVES, **OTHERS}
    dtypes = _DTYPES
    if settings.quick:
        programs, dtypes = {"func.grad": programs["func.grad"]}, {"BF16": torch.bfloat16}
    found = {
        word: {
            name: {way: found_of(build, way, dtype) for way in WAYS}
            for name, build in programs.items()
        }
        for word, dtype in dtypes.items()
    }
    ours = [
        f for by_name in found.values() for ways in by_name.values()
        for way, f in ways.items() if way.startswith("mpcompile")
    ]  # fmt: skip
    return Report(
        "Derivatives inside of what is compiled",
        paragraphs(__doc__),
        [
            Table(f"{word}: part of the products that is low, and how far gradients are off",
                  ("program", *WAYS), [(n, *map(_cell, w.values())) for n, w in by_name.items()])
            for word, by_name in found.items()
        ],
        {"every program runs in both forms, each gradient within 0.1 of FP64's": all(
            f.off is not None and f.off < 0.1 for f in ours
        )},
        {"found": plain(found)},
    )  # fmt: skip


def _cell(found: Found) -> str:
    if found.low is None or found.off is None:
        return found.error[:60]
    return f"{found.low:.0%}, {found.off:.1g}"


# -- count -----------------------------------------------------------------------------------------
# What part of a program's products runs in a low dtype, and how far its gradients are off.

_LOW = ("c10::BFloat16", "c10::Half")

# Operand that holds [.., m, k], and the one with [.., k, n]; what calls these is not counted again.
_PRODUCTS = {
    "aten::mm": (0, 1), "aten::bmm": (0, 1), "aten::mv": (0, 1), "aten::dot": (0, 1),
    "aten::addmm": (1, 2), "aten::baddbmm": (1, 2), "aten::addmv": (1, 2),
}  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What was found of one program, run in one way.

    Attributes:
        low: the part of the FLOPs of products whose operands are low, forward and backward; None:
            it failed.
        off: the largest distance of a parameter's gradient from FP64, relative to its norm.
        error: why it failed, or what was warned of.
    """

    low: float | None = None
    off: float | None = None
    error: str = ""


def _autocast(call: Callable[[Tensor], Any], dtype: torch.dtype) -> Callable[[Tensor], Any]:
    def step(x: Tensor) -> None:
        with torch._dynamo.config.patch(trace_autograd_ops=True), torch.autocast("cpu", dtype):
            loss = call(x)
        loss.backward()

    return step


def _compiled(model: nn.Module, dtype: torch.dtype) -> Callable[[Tensor], Any]:
    return _autocast(torch.compile(lambda x: model(x), backend="aot_eager"), dtype)


def _model(model: nn.Module, dtype: torch.dtype) -> Callable[[Tensor], Any]:
    mpcompile(model, dtype=dtype, emit="aot_eager")
    return lambda x: model(x).backward()


def _step(model: nn.Module, dtype: torch.dtype) -> Callable[[Tensor], Any]:
    # Without rounding, what lr=1 takes off a parameter is its gradient.
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    whole = mpcompile(step, dtype=dtype, emit="aot_eager")

    def run(x: Tensor) -> None:
        before = [p.detach().clone() for p in model.parameters()]
        whole(x)
        for then, p in zip(before, model.parameters(), strict=True):
            p.grad = then - p.detach()
            p.data.copy_(then)

    return run


WAYS: dict[str, Callable[[nn.Module, torch.dtype], Callable[[Tensor], Any]]] = {
    "eager autocast": _autocast,
    "compile + autocast": _compiled,
    "mpcompile(model)": _model,
    "mpcompile(step)": _step,
}


def found_of(build: Callable[[], nn.Module], way: str, dtype: torch.dtype) -> Found:
    """Run a program once to compile it, and once more to look."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = build(), inputs()
    exact = copy.deepcopy(model).double()
    exact(x.double()).backward()
    wanted = [p.grad for p in exact.parameters()]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            run = WAYS[way](model, dtype)
            run(x)
            for p in model.parameters():
                p.grad = None
            with _counted() as flops:
                run(x)
        except Exception as error:
            return Found(error=f"{type(error).__name__}: {str(error).splitlines()[0]}")
    ours = [str(one.message) for one in said if str(one.message).startswith("mpcompile")]
    off = 0.0
    for p, want in zip(model.parameters(), wanted, strict=True):
        if want is None or not want.any():
            continue
        got = torch.zeros_like(want) if p.grad is None else p.grad.double()
        off = max(off, float((got - want).norm() / want.norm()))
    low, full = flops[True], flops[False]
    return Found(low / max(low + full, 1), off, "; ".join(dict.fromkeys(ours)))


@contextlib.contextmanager
def _counted() -> Iterator[dict[bool, int]]:
    """FLOPs of products by whether their operands are low, from the profiler's record."""
    flops = {True: 0, False: 0}
    with torch.profiler.profile(record_shapes=True) as seen:
        yield flops
    assert seen.profiler is not None
    for event in seen.profiler.kineto_results.events():
        if (operands := _PRODUCTS.get(event.name())) is None:
            continue
        shapes, kinds = event.shapes(), event.dtypes()
        left, right = (shapes[i] for i in operands)
        columns = right[-1] if len(right) > 1 else 1
        flops[kinds[operands[0]] in _LOW] += 2 * prod(left) * columns


# -- programs --------------------------------------------------------------------------------------
# Small programs with derivatives, transforms or control flow inside. Each is a module whose call
# returns a loss; its input is an FP32 tensor of (32, 16).

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
