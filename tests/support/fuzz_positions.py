"""Lines of positions, of bounds, and of integers that are made of numbers.

Positions are exact in FP32; what is computed of them alone is not disturbed for the comparison
(`fuzz_runs.Noise`). Bounds such as `1 - 1e-4` are no numbers of FP16.
"""

from __future__ import annotations

from fuzz_grower import Drawn, Grower, Maker
from fuzz_makers import expr

FLOAT = "dtype=torch.get_default_dtype()"


def _steps(g: Grower, a: str) -> str:
    """Positions along the last dimension, up to some hundreds: beyond 2048 FP16 has no odd ones."""
    start = g.of(0, 5, 300, 2047)
    return f"torch.arange({start}, {start} + {a}.shape[-1], {FLOAT})"


def _positions(g: Grower) -> str:
    a = g.any()
    steps = _steps(g, a)
    return g.of(
        f"{a} + {steps} / 64",
        f"{a} * torch.sin({steps} * 0.7)",
        f"torch.cos({steps} * 0.9) + {a}",
        f"{a} * ({steps} % 2)",
        f"torch.where({steps} % 2 == 1, {a}, 0.5)",
    )


def _phase(g: Grower) -> str:
    a = g.any()
    count = f"torch.arange({a}.shape[-1], {FLOAT})"
    return g.of(
        f"torch.sin({count} * 3 + {a})",
        f"torch.cos({count} + {a} * 0.5) * {a}",
        f"torch.sin({count} + 200 + {a})",
        f"(({count} + 900 + {a} * 0.5) * 0.3).cos()",
        f"({count} + 0.5 + {a}.tanh() * 0.3).sqrt()",
    )


def _numbered(g: Grower) -> str:
    """An index that is computed, not given: rows of a table."""
    a = g.last(8, dims=1)
    count = f"torch.arange(8, {FLOAT})"
    index = g.of(
        f"(({count} + 0.5 + {a}.tanh() * 0.3) % 8).floor().long()",
        f"({count} * 257 % 8).long()",
        f"torch.bucketize({a}, torch.tensor([-0.5, 0.0, 0.5], {FLOAT}))",
        f"({a}.sigmoid() * 7.9).long()",
        f"(({count} + 500.5 + {a}.tanh() * 0.3).floor() - 500).long().clamp(0, 7)",
    )
    return f"F.embedding({index}, w0)"


def _bounded(g: Grower) -> str:
    a = g.any()
    steep = f"({a} * {g.of(1, 9)}).sigmoid()"
    return g.of(
        f"torch.log(1 - {steep}.clamp(1e-4, 1 - 1e-4))",
        f"torch.log({steep}.clamp(1e-4, 1 - 1e-4))",
        f"torch.log1p(-{steep}.clamp(1e-4, 1 - 1e-4))",
        f"torch.atanh({a}.tanh().clamp(-1 + 1e-4, 1 - 1e-4)) * 0.5",
        f"1 / {a}.abs().clamp(min=0.1)",
        f"F.binary_cross_entropy({steep}.clamp(1e-4, 1 - 1e-4), {g.like(a)}.sigmoid().detach())",
    )


def _integers(g: Grower) -> Drawn:
    a = g.any()
    d = g.dim(a)
    return f"{g.new()} = " + g.of(
        f"{a}.argmax({d})",
        f"({a} > 0.1).sum({d})",
        f"({a} * 4).round().long()",
        f"{a}.topk(1, {d})[1]",
        f"({a} > {g.broad(a)}).any({d})",
        f"torch.isfinite({a})",
        f"({a} * 2).int()",
        f"{a}.sign().bool()",
        f"{a}.detach().argsort({d})",
    )


POSITIONS: dict[str, Maker] = {
    "positions": expr(_positions),
    "phase": expr(_phase),
    "numbered": expr(_numbered),
    "bounded": expr(_bounded),
    "integers": _integers,
}
