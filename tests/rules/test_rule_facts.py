"""What the table says about torch's operators is so: each fact is tried on those that have it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from mpcompile.rules.policy import Precision
from mpcompile.rules.rule import Keeps, Kind, Rule
from mpcompile.rules.table import TABLE

aten = torch.ops.aten


def having(fact: Callable[[Rule], Any]) -> list[str]:
    return [key.removeprefix("aten::") for key, rule in TABLE.items() if fact(rule)]


def generated(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 0.8 + 0.1


X = generated(4, 6)
MASK = X > 0.5
IMAGE = generated(1, 2, 8, 8)

# How operators are called that take more than tensors of one shape.
CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "addcdiv": lambda x: aten.addcdiv(x, x, x),
    "addcmul": lambda x: aten.addcmul(x, x, x),
    "cat": lambda x: aten.cat([x, x]),
    "clamp": lambda x: aten.clamp(x, 0.2, 0.7),
    "clamp_max": lambda x: aten.clamp_max(x, 0.7),
    "clamp_min": lambda x: aten.clamp_min(x, 0.2),
    "div.Scalar_mode": lambda x: aten.div(x, 1, rounding_mode="floor"),
    "div.Tensor_mode": lambda x: aten.div(x, torch.ones(()), rounding_mode="floor"),
    "constant_pad_nd": lambda x: aten.constant_pad_nd(x, [1, 2]),
    "flatten": lambda x: aten.flatten(x),
    "flip": lambda x: aten.flip(x, [0]),
    "index_put": lambda x: aten.index_put(x, [torch.tensor([0, 1])], x[:2]),
    "lerp": lambda x: aten.lerp(x, x, 0.3),
    "log_softmax": lambda x: aten.log_softmax(x, -1),
    "_log_softmax": lambda x: aten._log_softmax(x, -1, False),
    "masked_fill": lambda x: aten.masked_fill(x, MASK, 0.0),
    "pad": lambda x: aten.pad(x, [1, 2]),
    "pow": lambda x: aten.pow(x, 3),
    "repeat": lambda x: aten.repeat(x, [2, 1]),
    "reshape": lambda x: aten.reshape(x, [-1]),
    "roll": lambda x: aten.roll(x, [1], [0]),
    "slice_scatter": lambda x: aten.slice_scatter(x, x[:2], 0, 0, 2),
    "softmax": lambda x: aten.softmax(x, -1),
    "_softmax": lambda x: aten._softmax(x, -1, False),
    "_safe_softmax": lambda x: aten._safe_softmax(x, -1),
    "stack": lambda x: aten.stack([x, x]),
    "threshold": lambda x: aten.threshold(x, 0.5, 0.0),
    "to": lambda x: aten.to(x, torch.float64),
    "unflatten": lambda x: aten.unflatten(x, 0, [2, -1]),
    "_unsafe_view": lambda x: aten._unsafe_view(x, [-1]),
    "view": lambda x: aten.view(x, [-1]),
    "where": lambda x: aten.where(MASK, x, x),
}  # fmt: skip
BINARY = (
    "add", "atan2", "div", "eq", "fmod", "floor_divide", "ge", "greater", "greater_equal", "gt",
    "heaviside", "isclose", "le", "less", "less_equal", "lt", "maximum", "minimum", "mul", "ne",
    "not_equal", "remainder", "rsub", "sub", "special_xlog1py", "subtract", "true_divide", "xlogy",
)  # fmt: skip
# In FP16: four times 100, zero, and 49.5.
CLOSE = torch.tensor([99.975, 99.985, 1e-9, 100.02, 100.01, 49.49])
# The same for operators whose result depends on digits.
READERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "acos": lambda x: aten.acos(x / 100),
    "acosh": lambda x: aten.acosh(x / 100),
    "asin": lambda x: aten.asin(x / 100),
    "atanh": lambda x: aten.atanh(x / 100),
    "argsort": lambda x: aten.argsort.stable(x, stable=True),
    "bucketize": lambda x: aten.bucketize(x, CLOSE.sort()[0]),
    "grid_sampler": lambda x: aten.grid_sampler(IMAGE, _grid(x), 0, 0, True),
    "grid_sampler_2d": lambda x: aten.grid_sampler_2d(IMAGE, _grid(x), 0, 0, True),
    "grid_sampler_3d": lambda x: aten.grid_sampler_3d(
        IMAGE[..., None], F.pad(_grid(x), (1, 0))[:, None], 0, 0, True
    ),
    "heaviside": lambda x: aten.heaviside(x, torch.tensor(0.5)),
    "isclose": lambda x: aten.isclose(x, CLOSE, 1e-7),
    "kthvalue": lambda x: aten.kthvalue(x, 6),
    "max.dim": lambda x: aten.max(x, 0),
    "min.dim": lambda x: aten.min(x[:2].flip(0), 0),
    "argmin": lambda x: aten.argmin(x[:2].flip(0)),
    "searchsorted": lambda x: aten.searchsorted(CLOSE.sort()[0], x),
    "sort": lambda x: aten.sort(x, stable=True),
    "topk": lambda x: aten.topk(x, 2),
    "to": lambda x: aten.to(x, torch.int64),
    "_to_copy": lambda x: aten._to_copy(x, dtype=torch.int64),
    "type_as": lambda x: aten.type_as(x, torch.tensor(1)),
}  # fmt: skip


def _grid(x: torch.Tensor) -> torch.Tensor:
    """Places in a picture, most of them near the edge between its middle pixels."""
    return torch.stack([x, x], -1)[None, None] - 100


def call(name: str, x: torch.Tensor) -> Any:
    if name in CALLS:
        return CALLS[name](x)
    packet = getattr(aten, name.partition(".")[0])
    return packet(*([x, x] if name in BINARY else [x]))


def reader(name: str, x: torch.Tensor) -> Any:
    if name in READERS:
        return READERS[name](x)
    if name in BINARY:
        return getattr(aten, name)(x, CLOSE)
    return call(name, x)


@pytest.mark.parametrize("name", having(lambda r: r.bounded))
def test_bounded(name: str) -> None:
    for sign in (1.0, -1.0):
        assert call(name, sign * X * 1e30).abs().max() <= torch.finfo(torch.float16).max


@pytest.mark.parametrize("name", having(lambda r: r.elementwise and not r.random))
def test_elementwise(name: str) -> None:
    """One element changed: the result has changed there, or nowhere."""
    changed = X.clone()
    changed[2, 3] += 0.05
    differs = call(name, changed) != call(name, X)
    assert call(name, X).shape == X.shape
    differs[2, 3] = False
    assert not differs.any()


@pytest.mark.parametrize("name", having(lambda r: r.zero_absorbs))
def test_zero_absorbs(name: str) -> None:
    zero = torch.zeros_like(X)
    huge = torch.full_like(X, 1e30)
    results = {
        "mul": lambda: (aten.mul(zero, huge), aten.mul(huge, zero)),
        "dropout": lambda: (aten.dropout(zero, 0.5, True),),
        "feature_dropout": lambda: (aten.feature_dropout(zero, 0.5, True),),
    }[name]()
    assert all(torch.equal(result, zero) for result in results)


@pytest.mark.parametrize("name", having(lambda r: r.digits))
def test_digits(name: str) -> None:
    """Where what it reads is rounded to FP16, some result is another one, not a rounding of it."""
    exact, rounded = (pytree.tree_leaves(reader(name, x)) for x in (CLOSE, CLOSE.half().float()))
    assert any(
        (
            (a.double() - b.double()).abs().nan_to_num(9.0) > 2**-7 * a.double().abs().nan_to_num()
        ).any()
        for a, b in zip(exact, rounded, strict=True)
    )


@pytest.mark.parametrize("name", having(lambda r: r.adds))
def test_adds(name: str) -> None:
    one, small = torch.ones(3), torch.full((3,), 2.0**-25)
    packet = getattr(aten, name)
    assert torch.equal(packet(one, small).abs(), one)
    assert torch.equal(packet(small, one).abs(), one)


@pytest.mark.parametrize("name", having(lambda r: r.promotes))
def test_promotes(name: str) -> None:
    low, number = X.half(), torch.tensor(0.3)
    operands = (MASK, low, number) if name == "where" else (low, number)
    assert getattr(aten, name)(*operands).dtype is torch.float16


@pytest.mark.parametrize("name", having(lambda r: r.in_order))
def test_in_order(name: str) -> None:
    assert torch.equal(call(name, X).flatten(), X.flatten())


def test_reshapes_keep_the_order() -> None:
    assert not having(lambda r: r.kind is Kind.VIEW and r.dims == "reshape" and not r.in_order)


def test_hidden_writes() -> None:
    """What the schema doesn't say: running statistics and noise are written in place."""
    assert sorted(having(lambda r: r.writes)) == ["batch_norm", "instance_norm", "rrelu_with_noise"]
    for norm in (aten.batch_norm, aten.instance_norm):
        mean, var = torch.zeros(2), torch.ones(2)
        norm(IMAGE, None, None, mean, var, True, 0.1, 1e-5, False)
        assert bool(mean.any())
        assert bool((var != 1).any())
    noise = torch.zeros_like(X)
    aten.rrelu_with_noise(-X, noise, 0.1, 0.3, True)
    assert bool(noise.any())


# Where eager differs, and why the fact stands.
KEPT_OTHERWISE = {
    "dropout": "eager keeps the mask; compiled, it is drawn again from the seed",
    "max_pool2d": "eager keeps the operand for its shape; compiled, small offsets",
    "leaky_relu": "eager keeps the operand; the sign of the result says the same",
    "elu": "the same, where it isn't told that it works in place",
}


def kept(name: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The result, and the floating-point tensors that autograd keeps, single numbers left out."""
    found: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() and tensor.numel() > 1:
            found.append(tensor)
        return tensor

    x = X.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        result = call(name, x)
    return result, found


@pytest.mark.parametrize(
    ("name", "keeps"),
    [(name, keeps) for keeps in (Keeps.NOTHING, Keeps.RESULT)
     for name in having(lambda r, keeps=keeps: r.keeps is keeps) if name not in KEPT_OTHERWISE],
)  # fmt: skip
def test_keeps(name: str, keeps: Keeps) -> None:
    """Nothing, or its result."""
    result, found = kept(name)
    assert bool(found) is (keeps is Keeps.RESULT)
    assert all(tensor.data_ptr() == result.data_ptr() for tensor in found)


def test_what_keeps_less_is_an_operator_with_a_backward() -> None:
    assert not having(lambda r: r.keeps is not Keeps.OPERANDS and r.precision is Precision.KEEP)


@pytest.mark.parametrize("name", having(lambda r: r.recurrent))
def test_recurrent(name: str) -> None:
    """The layer's first weight stacks as many matrices as there are gates."""
    rule = TABLE[f"aten::{name}"].recurrent
    assert rule.module(3, 5).weight_ih_l0.shape == (rule.gates * 5, 3)


@pytest.mark.parametrize("name", having(lambda r: r.fill))
def test_fill(name: str) -> None:
    """Every overload has the argument, and all elements hold it."""
    argument = TABLE[f"aten::{name}"].fill
    packet = getattr(aten, name)
    for overload in (getattr(packet, one) for one in packet.overloads()):
        assert argument in [a.name for a in overload._schema.arguments]
    given = {"full": ([3], 2.5), "full_like": (X, 2.5), "new_full": (X, [3], 2.5)}
    assert bool((packet(*given.get(name, (2.5,))) == 2.5).all())


# How operators are called that pick elements, or whose backward looks for its result.
PICKERS: dict[str, Callable[[torch.Tensor], Any]] = {
    **CALLS,
    "max_pool1d": lambda x: aten.max_pool1d(x, [2]),
    "max_pool2d": lambda x: aten.max_pool2d(x[None], [2, 2]),
    "max_pool3d": lambda x: aten.max_pool3d(x[None, None], [1, 2, 2]),
    "adaptive_max_pool1d": lambda x: aten.adaptive_max_pool1d(x, [2])[0],
    "adaptive_max_pool2d": lambda x: aten.adaptive_max_pool2d(x[None], [2, 2])[0],
    "adaptive_max_pool3d": lambda x: aten.adaptive_max_pool3d(x[None, None], [1, 2, 2])[0],
    "max_pool1d_with_indices": lambda x: aten.max_pool1d_with_indices(x, [2])[0],
    "max_pool2d_with_indices": lambda x: aten.max_pool2d_with_indices(x[None], [2, 2])[0],
    "max_pool3d_with_indices": lambda x: aten.max_pool3d_with_indices(x[None, None], [1, 2, 2])[0],
    "max.dim": lambda x: aten.max(x, 0)[0],
    "min.dim": lambda x: aten.min(x, 0)[0],
    "masked_scatter": lambda x: aten.masked_scatter(x, MASK, x),
    "scatter": lambda x: aten.scatter(x, 0, torch.tensor([[0, 1]]), x),
    "index_copy": lambda x: aten.index_copy(x, 0, torch.tensor([0, 1]), x[:2]),
    "index_fill": lambda x: aten.index_fill(x, 0, torch.tensor([0]), 0.0),
    "select_scatter": lambda x: aten.select_scatter(x, x[0], 0, 1),
    "diagonal_scatter": lambda x: aten.diagonal_scatter(x, x[0, :4]),
    "block_diag": lambda x: aten.block_diag([x, x]),
    **{name: (lambda x, op=name: getattr(aten, op)([x, x]))
       for name in ("concat", "concatenate", "hstack", "vstack", "dstack", "column_stack")},
    **{name: (lambda x, op=name: getattr(aten, op)(x, [1, 1]))
       for name in ("reflection_pad1d", "replication_pad1d")},
    **{name: (lambda x, op=name: getattr(aten, op)(x[None], [1, 1, 1, 1]))
       for name in ("reflection_pad2d", "replication_pad2d")},
    **{name: (lambda x, op=name: getattr(aten, op)(x.view(1, 1, 2, 2, 6), [1] * 6))
       for name in ("reflection_pad3d", "replication_pad3d")},
    **{name: (lambda x, op=name: getattr(aten, op)(x, x.flip(0)))
       for name in ("maximum", "minimum", "fmax", "fmin")},
    "max.other": lambda x: aten.max(x, x.flip(0)),
    "min.other": lambda x: aten.min(x, x.flip(0)),
    "clip": lambda x: aten.clip(x, 0.2, 0.7),
    "hardtanh": lambda x: aten.hardtanh(x, 0.2, 0.7),
    "unique_dim": lambda x: aten.unique_dim(x, 0)[0],
}  # fmt: skip


@pytest.mark.parametrize("name", having(lambda r: r.picks))
def test_picks(name: str) -> None:
    """Each element of the result is one that it reads, or a number that it is told."""
    call = PICKERS.get(name) or getattr(aten, name.partition(".")[0])
    numbers = torch.tensor([0.0, 0.2, 0.7, 1.0])
    for result in pytree.tree_leaves(call(X)):
        if result.is_floating_point():
            assert bool(torch.isin(result, torch.cat([X.flatten(), numbers])).all())


INF = float("inf")
FINDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "aminmax": lambda x: aten.aminmax(x, dim=1),
    "norm": lambda x: aten.norm(x, INF, [1]),
    "linalg_vector_norm": lambda x: aten.linalg_vector_norm(x, INF, [1]),
    "linalg_norm": lambda x: aten.linalg_norm(x[0], INF),
    "pdist": lambda x: aten.pdist(x, INF),
    "dist": lambda x: aten.dist(x, torch.zeros(()), INF),
    "cdist": lambda x: aten.cdist(x, torch.zeros(2, 6), INF),
    "scatter_reduce": lambda x: aten.scatter_reduce(
        torch.zeros(2, 6), 0, torch.zeros(4, 6, dtype=torch.int64), x, "amax"
    ),
    "index_reduce": lambda x: aten.index_reduce(
        torch.zeros(2, 6), 0, torch.zeros(4, dtype=torch.int64), x, "amax"
    ),
    "segment_reduce": lambda x: aten.segment_reduce(
        x, "max", lengths=torch.tensor([2, 2]), axis=0, unsafe=True
    ),
}


def gradient(call: Callable[[torch.Tensor], Any], change: float) -> torch.Tensor:
    """Of a call of which all that was kept of its operand's size is a little larger then."""
    x = generated(4, 6).requires_grad_()

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        is_operand = tensor.is_floating_point() and tensor.numel() in (6, 24)
        return tensor + change if is_operand else tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        results = [t for t in pytree.tree_leaves(call(x)) if t.requires_grad]
    (found,) = torch.autograd.grad([t.sum() for t in results], x)
    return found


@pytest.mark.parametrize("name", having(lambda r: r.finds))
def test_finds(name: str) -> None:
    """The backward loses the gradient if what it reads is no longer what the result came from."""
    call = FINDERS.get(name) or getattr(aten, name)
    right, lost = gradient(call, 0.0), gradient(call, 2.0**-20)
    assert bool(right.isfinite().all())
    assert not torch.allclose(right, lost, atol=1e-2)


@pytest.mark.parametrize("name", having(lambda r: r.compares))
def test_compares(name: str) -> None:
    """The result, or a gradient, hangs on whether two arguments are equal."""

    def found(other: torch.Tensor) -> list[torch.Tensor]:
        x = X.clone().requires_grad_()
        if name in ("bucketize", "searchsorted"):
            row, places = x[0].sort()[0].detach(), other[0].sort()[0]
            pair = (places, row) if name == "bucketize" else (row, places)
            return [getattr(aten, name)(*pair)]
        packet = getattr(aten, name.partition(".")[0])
        result = packet(x, other, 0.0, 0.0) if name == "isclose" else packet(x, other)
        if result.requires_grad:
            return list(torch.autograd.grad(result.sum(), x))
        return [result]

    near = [found(X + step) for step in (0.0, 2.0**-20, -(2.0**-20))]
    assert any(not torch.equal(a, b) for one in near[1:] for a, b in zip(near[0], one, strict=True))
