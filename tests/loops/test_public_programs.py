"""Ten public training scripts in FP16 and BF16: gradients as good as autocast's, nothing left in
FP32, and losses that fall as in FP32.

Gradients are those of one step from the same weights, for several batches; an error is relative to
FP64's gradients. Over all parameters together it is at most `MOST` times that of eager autocast on
the same batch, by the median of the batches; and so for each parameter, plus one rounding to the
low dtype.
"""

import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import pytest
import torch
from public_programs import SCRIPTS, Script
from public_runs import AUTOCAST, FP32, FP64, WAYS, Running, States, products, running, widened
from torch import Tensor

from mpcompile import MPCompileWarning

pytestmark = pytest.mark.slow("scripts of others, trained several ways")

BEFORE, STEPS, MOST = 4, 6, 1.5

DTYPES = (torch.float16, torch.bfloat16)


def rows(names: Iterable[str], ways: Iterable[str]) -> list[Any]:
    return [
        pytest.param(name, dtype, way, id=f"{name}-{str(dtype).removeprefix('torch.')}-{way}")
        for way in ways
        for dtype in DTYPES
        for name in names
    ]


ROWS = rows(SCRIPTS, WAYS)

# Whole steps that no graph can hold, and what the one warning says.
IN_PIECES = {
    # torch's TransformerEncoder asks whether its mask is causal
    "word_transformer": "makes a Python number of a tensor's value",
    "vector_quantize": "Data-dependent branching",
}
# oneDNN's kernel is for BF16 alone on most CPUs
IN_PIECES_FP16 = {"word_lstm": "recurrent layer that would be unrolled"}

Gradients = dict[str, "Tensor | None"]


@dataclass
class Measured:
    """What a script did in one way.

    Attributes:
        gradients: of each draw.
        losses: of each step, on the first draw's batch.
        products: of the last step, with their dtypes.
    """

    gradients: list[Gradients]
    losses: list[float]
    products: list[str]


def rounding(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def measure(run: Running, states: States, draws: Sequence[Sequence[Tensor]]) -> Measured:
    """After steps that are not looked at: where a model breaks graphs in loops, each of the first
    compiles more of it.
    """
    gradients, losses = [], []
    for i, batch in enumerate([draws[0]] * BEFORE + [*draws]):
        run.load(states)
        torch.manual_seed(i)
        run.take(batch)
        gradients.append(run.gradients())
    run.load(states)
    for _ in range(STEPS):
        torch.manual_seed(0)
        losses.append(run.take(draws[0]))
    return Measured(gradients[BEFORE:], losses, products(lambda: run.take(draws[0])))


def begun(script: Script) -> tuple[list[dict[str, Tensor]], list[tuple[Tensor, ...]]]:
    """Weights and buffers as the first step finds and leaves them, and batches."""
    torch.manual_seed(0)
    states = [model.state_dict() for model in script.models()]
    draws = [script.batch() for _ in range(script.draws)]
    first = running(script, states, FP32, rate=0.0)
    first.take(draws[0])
    return [
        {name: value.clone() for name, value in model.state_dict().items()}
        for model in first.models
    ], draws


def errors(found: Measured, reference: Measured) -> dict[str, list[float]]:
    """Of each draw, for each parameter and, by the name "", for all of them together."""
    each: dict[str, list[float]] = {}
    for ours, right in zip(found.gradients, reference.gradients, strict=True):
        assert ours.keys() == right.keys()
        off = square = torch.zeros((), dtype=torch.float64)
        for name, wanted in right.items():
            got = ours[name]
            assert (got is None) == (wanted is None), f"{name}: a gradient is missing"
            if got is None or wanted is None:
                continue
            assert bool(got.isfinite().all()), f"{name}: not finite"
            assert bool(got.any()) or not bool(wanted.any()), f"{name}: all zero"
            wrong = (got - wanted).square().sum()
            off, square = off + wrong, square + wanted.square().sum()
            each.setdefault(name, []).append(float((wrong / wanted.square().sum()).sqrt()))
        each.setdefault("", []).append(float((off / square).sqrt()))
    return each


@pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")  # torch, as oneDNN is left out
@pytest.mark.sampled(22)
@pytest.mark.parametrize(("name", "dtype", "way"), ROWS)
def test_a_script_trains(name: str, dtype: torch.dtype, way: str) -> None:
    compare(name, dtype, way, says(name, dtype, way))


INDUCTOR = [
    ("mnist", torch.float16, "O2"),
    ("vae", torch.bfloat16, "O1"),
    ("nanogpt", torch.bfloat16, "O2"),
]


@pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")
@pytest.mark.usefixtures("own_inductor_cache")
@pytest.mark.sampled(len(INDUCTOR))
@pytest.mark.parametrize(("name", "dtype", "way"), INDUCTOR)
def test_under_inductor(name: str, dtype: torch.dtype, way: str) -> None:
    with torch._inductor.config.patch(fallback_random=True):  # dropout as elsewhere
        compare(name, dtype, way, [], emit="inductor")


def says(name: str, dtype: torch.dtype, way: str) -> list[str]:
    """What the warnings of a script say, one each."""
    in_pieces = IN_PIECES.get(name) or (dtype is torch.float16 and IN_PIECES_FP16.get(name))
    if way.startswith("whole"):
        return [f"runs in pieces .*{in_pieces}"] if in_pieces else []
    return []


def compare(
    name: str, dtype: torch.dtype, way: str, warned: list[str], emit: str = "aot_eager"
) -> None:
    script = SCRIPTS[name]
    states, draws = begun(script)
    right = measure(running(script, states, FP64), states, [widened(b) for b in draws])
    peer = measure(running(script, states, AUTOCAST, dtype), states, draws)
    plain = measure(running(script, states, FP32), states, draws)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MPCompileWarning)
        run = running(script, states, way, dtype, emit=emit)
        ours = measure(run, states, draws)
    said = [str(w.message) for w in caught]
    assert len(said) == len(warned), said
    assert all(map(re.search, warned, said)), said
    left = [p.left for p in run.plans() if p.left and "updates parameters" not in p.left]
    assert run.plans()
    assert not left
    assert in_fp32(ours) <= in_fp32(peer), ours.products
    near(ours, peer, right, dtype)
    follows(ours, peer, plain, dtype)
    assert name == "dcgan" or ours.losses[-1] < ours.losses[0]


def in_fp32(run: Measured) -> int:
    """How many of its products."""
    return sum(product.endswith("float") for product in run.products)


def near(ours: Measured, peer: Measured, right: Measured, dtype: torch.dtype) -> None:
    found, allowed = errors(ours, right), errors(peer, right)
    for name, each in found.items():
        spare = rounding(dtype) if name else 0.0
        # On the same batch: after a ReLU, errors of one way differ by a factor of ten.
        over = median(e - spare - MOST * a for e, a in zip(each, allowed[name], strict=True))
        assert over <= 0, f"{name or 'all'}: {median(each):.2g} against {median(allowed[name]):.2g}"


def follows(ours: Measured, peer: Measured, plain: Measured, dtype: torch.dtype) -> None:
    """No loss is further from FP32's than the worst of the peer's, by the same rule."""
    most = max(abs(p - q) for p, q in zip(peer.losses, plain.losses, strict=True))
    for got, wanted in zip(ours.losses, plain.losses, strict=True):
        allowed = MOST * most + rounding(dtype) * abs(wanted)
        assert abs(got - wanted) <= allowed, f"{ours.losses} against {plain.losses}"
