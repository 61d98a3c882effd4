"""Run a program as it stands and rewritten, and compare every number that comes out."""

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import mpcompile
from mpcompile.planner.graph_plan import GraphPlan

# Relative to the norm of each tensor: a few roundings deep in FP16 (2**-11) or BF16 (2**-8).
TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 6e-2}


LEVELS = pytest.mark.parametrize("level", ["O1", "O2"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
EMITS = pytest.mark.parametrize(
    "emit", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow("Inductor"))]
)
# Both levels, both ways of running: by autograd, and by AOTAutograd's forward and backward graphs.
SETTINGS = pytest.mark.parametrize(("level", "emit"), [("O1", "eager"), ("O2", "aot_eager")])
# Both levels, both low dtypes, both ways of compiling.
COMBINED = pytest.mark.parametrize(
    "how",
    [
        pytest.param(
            {"level": level, "dtype": dtype, "emit": emit},
            id=f"{level}-{str(dtype).removeprefix('torch.')}-{emit}",
            marks=[pytest.mark.slow("Inductor")] if emit == "inductor" else [],
        )
        for level in ("O1", "O2")
        for dtype in TOLERANCE
        for emit in ("aot_eager", "inductor")
    ],
)


def leaf(*size: int) -> torch.Tensor:
    return torch.randn(size, requires_grad=True)


class MLP(nn.Module):
    """A residual branch with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.norm(self.up(x))))


@dataclass
class Compared:
    """What the rewritten run left behind, for further questions.

    Attributes:
        model: the compiled model or function.
        reference: the FP32 model that ran beside it.
    """

    model: Any
    reference: Any

    @property
    def plans(self) -> list[GraphPlan]:
        """One for each graph compiled until now."""
        return mpcompile.compiled_plans(self.model)

    def ops(self, precision: str) -> list[str]:
        """The operators that run in this precision, in program order, over all graphs."""
        return [
            node.op.removeprefix("aten::")
            for plan in self.plans
            for node in plan.nodes
            if node.precision == precision and node.rule not in ("cast", "scale", "pad")
        ]


def check(
    program: Any,
    *inputs: Any,
    low: Sequence[str] = (),
    dtype: torch.dtype = torch.float16,
    tolerance: float | None = None,
    steps: int = 1,
    prepare: Callable[[Any], None] = lambda model: None,
    **options: Any,
) -> Compared:
    """Assert that the program rewritten agrees with the program in FP32 eager.

    Compared are outputs (structure, dtype, values), the gradients of the parameters and of each
    input that needs one (a weighted sum of the differentiable outputs is differentiated), buffers,
    and what the program wrote into its inputs. Strict: no graph may be left as it was.

    Args:
        program: a module (copied for the FP32 run) or a function.
        inputs: each run gets its own copies.
        low: operators that must run in the low dtype.
        steps: forward and backward passes, one after the other, gradients summed.
        prepare: called on both models, e.g. to put hooks on them.
        options: for `mpcompile()`.
    """
    tolerance = tolerance or TOLERANCE[dtype]
    is_module = isinstance(program, nn.Module)
    reference = copy.deepcopy(program) if is_module else program
    options = {"emit": "eager", "strict": True, "loss_scale": 1024.0, **options}
    fast = mpcompile.mpcompile(program, dtype=dtype, **options)
    prepare(reference)
    prepare(fast)
    expected = _run(reference, inputs, steps, is_module)
    actual = _run(fast, inputs, steps, is_module)

    assert actual.keys() == expected.keys()
    for what, wanted in expected.items():
        assert_near(actual[what], wanted, what, tolerance)
    result = Compared(fast, reference)
    for op in low:
        assert op in result.ops("LOW"), "\n".join([f"{op} is not low", *map(str, result.plans)])
    return result


def _run(program: Any, inputs: Sequence[Any], steps: int, is_module: bool) -> dict[str, Any]:
    """Everything that comes out, by name."""
    torch.manual_seed(1)
    own = [
        x.detach().clone().requires_grad_(x.requires_grad) if _is_tensor(x) else x for x in inputs
    ]
    found: dict[str, Any] = {}
    for step in range(steps):
        output = program(*own)
        leaves, structure = pytree.tree_flatten(output)
        found[f"structure {step}"] = str(structure)
        found.update({f"output {step}.{i}": _frozen(leaf) for i, leaf in enumerate(leaves)})
        roots = [leaf for leaf in leaves if _is_tensor(leaf) and leaf.requires_grad]
        found[f"differentiable {step}"] = len(roots)
        if roots:
            torch.autograd.backward([weighted_sum(root) for root in roots])
    for i, x in enumerate(own):
        if _is_tensor(x):
            found[f"input {i}"] = _frozen(x)
            found[f"gradient of input {i}"] = x.grad
    if is_module:
        for name, parameter in program.named_parameters():
            found[f"gradient of {name}"] = parameter.grad
        for name, buffer in program.named_buffers():
            found[f"buffer {name}"] = _frozen(buffer)
    return found


def weighted_sum(x: torch.Tensor) -> torch.Tensor:
    """A scalar whose gradient differs at every element and is small, as a mean loss's is."""
    x = x.abs() if x.is_complex() else x
    weights = torch.linspace(-1, 1.5, x.numel(), dtype=x.dtype).view(x.shape)
    return (x * weights).sum() / x.numel()


def assert_near(actual: Any, wanted: Any, what: str, tolerance: float) -> None:
    """Same dtype and shape; the norm of the difference within `tolerance` of the norm."""
    if not _is_tensor(wanted):
        assert actual == wanted, f"{what}: {actual} instead of {wanted}"
        return
    assert _is_tensor(actual), f"{what}: {actual} instead of a tensor"
    for mine, theirs in ((actual.dtype, wanted.dtype), (actual.shape, wanted.shape)):
        assert mine == theirs, f"{what}: {mine} instead of {theirs}"
    assert actual.layout == wanted.layout, what
    if wanted.is_sparse:
        actual, wanted = actual.to_dense(), wanted.to_dense()
    if not (wanted.is_floating_point() or wanted.is_complex()):
        assert torch.equal(actual, wanted), what
        return
    assert torch.equal(actual.isfinite(), wanted.isfinite()), f"{what}: not finite elsewhere"
    finite = wanted.isfinite()
    error = (actual[finite] - wanted[finite]).norm()
    assert error <= tolerance * wanted[finite].norm(), f"{what}: off by {error}\n{actual}\n{wanted}"


def fallback_reason(program: Any, *inputs: Any, **options: Any) -> str:
    """Why the program was left in FP32: the one warning it gives; its results must be FP32's."""
    options = {"dtype": torch.float16, "emit": "eager", **options}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        is_module = isinstance(program, nn.Module)
        reference = copy.deepcopy(program) if is_module else program
        expected = _run(reference, inputs, 1, is_module)
        caught.clear()
        actual = _run(mpcompile.mpcompile(program, **options), inputs, 1, is_module)
    for what, wanted in expected.items():
        assert_near(actual[what], wanted, what, 1e-5)
    (warning,) = caught
    assert warning.category is mpcompile.MPCompileWarning, warning
    return str(warning.message)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _frozen(value: Any) -> Any:
    return value.detach().clone() if _is_tensor(value) else value
