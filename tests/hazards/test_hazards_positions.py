"""Hazards of positions: what becomes an index, a whole number, a side or an angle is computed with
as many digits as under autocast, at O2, too.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import COMBINED, DTYPES
from module_of import function_of, module_of
from torch import nn

from mpcompile import compiled_plans, mpcompile

N = 100  # places


class Net(nn.Module):
    """Places that a layer moves a little, a table with something at each place, and frequencies."""

    def __init__(self, program: "Callable[[Net, torch.Tensor], torch.Tensor]") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.program = program
        self.layer, self.read = nn.Linear(8, 8), nn.Linear(8, 4)
        self.places = nn.Parameter(torch.arange(float(N)))
        self.table = nn.Parameter(torch.randn(N + 2))
        self.frequencies = nn.Parameter(torch.rand(8) * 3)
        self.image = nn.Parameter(torch.randn(1, 2, 10, 10))
        self.norm = nn.LayerNorm(8)

    def moved(self, x: torch.Tensor) -> torch.Tensor:
        return torch.arange(float(N)) + self.layer(x)[:, 0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.program(self, x)


def between(m: Net, place: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The table at a place between two of its places."""
    part, i = place - low, low.long()
    return (m.table[i] * (1 - part) + m.table[i + 1] * part).sum()


def bounded(place: torch.Tensor) -> torch.Tensor:
    return place.clamp(0, N - 1.001)  # below 99, so that the next place is one of the table


def nudged(m: Net, x: torch.Tensor) -> torch.Tensor:
    return m.places + m.layer(x)[:, 0]


def between_floors(m: Net, place: torch.Tensor) -> torch.Tensor:
    place = bounded(place)
    return between(m, place, place.detach().floor())


def of_a_mesh(m: Net, x: torch.Tensor) -> torch.Tensor:
    rows, columns = torch.meshgrid(torch.arange(10.0), torch.arange(10.0), indexing="ij")
    places = torch.stack([rows * 10, columns], -1).view(N, 2) + m.layer(x)[:, :2]
    row, column = places.unbind(-1)
    place = bounded(row + column)
    return between(m, place, place.detach().long().float())


def counted(m: Net, x: torch.Tensor) -> torch.Tensor:
    place = bounded(torch.ones(N).cumsum(0) - 1 + m.layer(x)[:, 0])
    return between(m, place, torch.div(place.detach(), 1, rounding_mode="floor"))


def from_a_parameter(m: Net, x: torch.Tensor) -> torch.Tensor:
    place = bounded(nudged(m, x))
    return between(m, place, place.detach().trunc())


def fractions(m: Net, x: torch.Tensor) -> torch.Tensor:
    place = nudged(m, x)
    return ((place.frac() + place.remainder(2.0) + m.moved(x).fmod(3.0)) * m.table[:N]).sum()


def straight_through(m: Net, x: torch.Tensor) -> torch.Tensor:
    place = nudged(m, x)
    return ((place + (place.round() - place).detach() - m.places) * m.table[:N]).sum()


Rounded = function_of(lambda ctx, place: place.round(), lambda ctx, grad: grad)


def rounded_by_a_function(m: Net, x: torch.Tensor) -> torch.Tensor:
    place = nudged(m, x)
    return ((place - Rounded.apply(place).detach()) * m.table[:N]).sum()


def between_knots(m: Net, x: torch.Tensor) -> torch.Tensor:
    place, knots = nudged(m, x), torch.linspace(-4, N + 4, N)
    i = torch.searchsorted(knots, place.detach()).clamp(1, N - 1)
    part = (place - knots[i - 1]) / (knots[i] - knots[i - 1])
    return (m.table[i - 1] * (1 - part) + m.table[i] * part).sum()


def equal_to_the_largest(m: Net, x: torch.Tensor) -> torch.Tensor:
    h = m.norm(m.layer(x) + x) * 1.3
    return (h * (h == h.amax(-1, keepdim=True))).sum() + m.read(h).square().mean()


def rotated(m: Net, x: torch.Tensor) -> torch.Tensor:
    angle = torch.einsum("i,j->ij", torch.arange(float(N)), m.frequencies[:4]).repeat(1, 2)
    q = m.layer(x)
    q = q * angle.cos() + torch.cat([-q[:, 4:], q[:, :4]], -1) * angle.sin()
    return (q @ q.t()).softmax(-1).square().sum()


def sampled(m: Net, x: torch.Tensor) -> torch.Tensor:
    rows, columns = torch.meshgrid(torch.arange(10.0), torch.arange(10.0), indexing="ij")
    grid = torch.stack([columns, rows], -1)[None] + m.layer(x)[:, :2].view(1, 10, 10, 2)
    return F.grid_sample(m.image, 2 * grid / 9 - 1, align_corners=True).square().sum()


def warped(m: Net, x: torch.Tensor) -> torch.Tensor:
    theta = torch.eye(2, 3) + 0.1 * m.layer(x)[0, :6].view(2, 3)
    grid = F.affine_grid(theta[None], [1, 2, 10, 10], align_corners=True)
    grid = grid + 0.1 * m.layer(x)[:, :2].view(1, 10, 10, 2)
    return F.grid_sample(m.image, grid, align_corners=True).square().sum()


def slopes(m: Net, x: torch.Tensor) -> torch.Tensor:
    q = m.layer(x)
    distance = (torch.arange(float(N)) - torch.arange(float(N))[:, None]).abs()
    return ((q @ q.t() - 0.3 * distance).softmax(-1) @ q).square().mean()


def boxes(m: Net, x: torch.Tensor) -> torch.Tensor:
    """Overlaps of moved anchors with boxes near them."""
    anchors = torch.stack([torch.arange(float(N)) * 8] * 2 + [torch.full((N,), 32.0)] * 2, -1)
    delta, (cx, cy, w, h) = m.layer(x), anchors.unbind(-1)
    x0, y0 = delta[:, 0] * w + cx, delta[:, 1] * h + cy
    w, h = delta[:, 2].exp() * w, delta[:, 3].exp() * h
    inner = [
        (torch.minimum(at + size / 2, c + 21) - torch.maximum(at - size / 2, c - 11)).clamp(min=0)
        for at, size, c in ((x0, w, cx), (y0, h, cy))
    ]
    both = inner[0] * inner[1]
    return (1 - both / (w * h + 1024 - both)).mean()


def summed_over_paths(m: Net, x: torch.Tensor) -> torch.Tensor:
    """The likelihood of a chain, as a conditional random field has it."""
    seen, moves = 3 * m.layer(x), m.image[0, 0, :8, :8]
    total = seen[0]
    for row in seen[1:40]:
        total = torch.logsumexp(total[:, None] + moves, 0) + row
    return torch.logsumexp(total, 0) / 40 - seen.mean()


def difference_of_sigmoids(m: Net, x: torch.Tensor) -> torch.Tensor:
    """The probability of a bin."""
    from_mean = m.places[:8] / 20 + m.layer(x) - m.norm(x)
    inside = torch.sigmoid(from_mean + 0.01) - torch.sigmoid(from_mean - 0.01)
    return -(inside * 50).clamp(min=1e-3).log2().mean()


PLACES: dict[str, Callable[[Net, torch.Tensor], torch.Tensor]] = {
    "looked_up": lambda m, x: between_floors(m, m.moved(x)),
    "from_a_parameter": from_a_parameter,
    # Rounded to the low dtype, the bound would be 99.
    "from_a_low_value": lambda m, x: between_floors(m, (4 * m.layer(x)[:, 0]).sigmoid() * N),
    "counted": counted,
    "of_a_mesh": of_a_mesh,
    "of_integers": lambda m, x: between_floors(
        m, torch.arange(N) * m.frequencies[0].detach() / 3 + m.layer(x)[:, 0].float()
    ),
    "fractions": fractions,
    "straight_through": straight_through,
    "rounded_by_a_function": rounded_by_a_function,
    "between_knots": between_knots,
    "binned": lambda m, x: (
        m.table[torch.bucketize(nudged(m, x).detach(), m.places.detach())] * m.read(x)[:, 0]
    ).sum(),
    "compared": lambda m, x: (
        torch.where(nudged(m, x) > m.places.detach() + 0.1, m.read(x)[:, 0], m.read(x)[:, 1])
    ).square().sum(),
    "equal_to_the_largest": equal_to_the_largest,
    "phases": lambda m, x: m.read((m.moved(x)[:, None] * m.frequencies).sin()).square().mean(),
    "phases_of_a_parameter": lambda m, x: (
        m.read((nudged(m, x)[:, None] * m.frequencies).cos()).square().mean()
    ),
    "phases_of_a_product": lambda m, x: (
        m.read((torch.arange(float(N))[:, None] @ m.frequencies[None] + m.layer(x)).sin())
    ).square().mean(),
    "phases_of_whole_data": lambda m, x: m.read(
        torch.einsum("n,d->nd", (x[:, 0] * 4000).floor(), m.frequencies).sin()
    ).square().mean(),
    "powers_of_two": lambda m, x: (
        m.read(((x[:, :1] + m.layer(x)[:, :1]) * 2.0 ** torch.arange(8)).sin()).square().mean()
    ),
    "rotated": rotated,
    "tents": lambda m, x: (
        F.relu(1 - (m.moved(x)[:, None] - torch.arange(N + 2.0)).abs()) @ m.table[:, None]
    ).square().sum(),
    "sampled": sampled,
    "warped": warped,
    "slopes": slopes,
    "boxes": boxes,
    "summed_over_paths": summed_over_paths,
    "difference_of_sigmoids": difference_of_sigmoids,
}  # fmt: skip


def run(model: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and all gradients in one vector."""
    result = model(x)
    result.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return result.detach().double(), torch.cat([g.double().flatten() for g in gradients])


def errors(
    program: Callable[[Net, torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> dict[str, tuple[float, float]]:
    """How far result and gradients are from FP64's, of their norms: of autocast, and by level."""
    model = Net(program)
    x = torch.randn(N, 8, generator=torch.Generator().manual_seed(1))
    torch.set_default_dtype(torch.float64)
    try:
        exact = run(copy.deepcopy(model).double(), x.double())
    finally:
        torch.set_default_dtype(torch.float32)

    def error(found: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, float]:
        result, gradient = (
            float((mine - own).norm() / own.norm()) for mine, own in zip(found, exact, strict=True)
        )
        return result, gradient

    with torch.autocast("cpu", dtype=dtype):
        found = {"autocast": error(run(copy.deepcopy(model), x))}
    for level in ("O1", "O2"):
        options: dict[str, Any] = {"emit": "aot_eager", "strict": True}
        compiled = mpcompile(copy.deepcopy(model), level=level, dtype=dtype, **options)
        found[level] = error(run(compiled, x))
        assert "LOW" in {n.precision for n in compiled_plans(compiled)[0].nodes}
    return found


@pytest.mark.slow_rows("a matrix of trainings against FP64")
@pytest.mark.sampled(3)
@DTYPES
@pytest.mark.parametrize("case", PLACES)
def test_no_further_off_than_autocast(case: str, dtype: torch.dtype) -> None:
    found = errors(PLACES[case], dtype)
    for level in ("O1", "O2"):
        for mine, peers in zip(found[level], found["autocast"], strict=True):
            assert mine <= 1.5 * peers + torch.finfo(dtype).eps / 2, found


# -- what sees a rounding --------------------------------------------------------------------------


# A backward that asks which element a maximum was, and a compiler that leaves out a rounding.
CHOSEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "amax": lambda h: h.amax(1),
    "amin": lambda h: h.amin(1),
    "max": lambda h: h.max(1)[0],
    "aminmax": lambda h: torch.cat(torch.aminmax(h, dim=1), -1),
    "a kept amax": lambda h: h / h.amax(-1, keepdim=True).add(1),
    "of all": lambda h: h * h.amax(),
    "median": lambda h: h.median(1)[0],
    "kthvalue": lambda h: h.kthvalue(3, 1)[0],
    "topk": lambda h: h.topk(5, 1)[0].sum(1),
    "sort": lambda h: h.sort(1)[0][:, :8].sum(1),
    "cummax": lambda h: h.cummax(1)[0].mean(1),
    "equal": lambda h: (h * (h == h.amax(1, keepdim=True))).sum(1),
    "a threshold": lambda h: (h * (h >= h.topk(4, 1)[0][:, -1:])).sum(1),
    "gathered": lambda h: h.gather(1, h.argmax(1, keepdim=True)).sum(1),
    "one of many": lambda h: (h * F.one_hot(h.argmax(-1), h.shape[-1])).sum(1),
    "a largest norm": lambda h: h.norm(float("inf"), dim=1),
    "pooled": lambda h: F.max_pool1d(h.transpose(1, 2), 4).sum(2),
    "unpooled": lambda h: F.max_unpool1d(
        *F.max_pool1d(h.transpose(1, 2), 4, return_indices=True), 4
    ).sum(2),
    "adaptive": lambda h: F.adaptive_max_pool1d(h.transpose(1, 2), 4).sum(2),
    "scattered": lambda h: torch.zeros(4, 8, 96, dtype=h.dtype).scatter_reduce(
        1, (torch.arange(64) % 8)[None, :, None].expand_as(h), h, "amax"
    ).sum(1),
}  # fmt: skip


@COMBINED
@pytest.mark.parametrize("named", CHOSEN)
def test_what_sees_a_rounding_has_eagers_gradients(named: str, how: Any) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.b(CHOSEN[named](F.gelu(m.a(x)))).square().mean()

    torch.manual_seed(0)
    net, x = module_of(forward, a=nn.Linear(96, 96), b=nn.LazyLinear(8)), torch.randn(4, 64, 96)
    net(x)
    exact = run(copy.deepcopy(net).double(), x.double())[1]
    off = []
    for emit in ("eager", how["emit"]):
        torch._dynamo.reset()
        own = mpcompile(copy.deepcopy(net), **{**how, "emit": emit})
        off.append(float((run(own, x)[1] - exact).norm() / exact.norm()))
    assert off[1] <= 1.5 * off[0] + torch.finfo(how["dtype"]).eps
