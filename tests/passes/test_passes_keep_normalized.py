"""keep_normalized: what a norm's backward reads is kept in half, the forward as it was."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import leaf
from functorch.compile import make_boxed_func
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.utils.checkpoint import checkpoint

from mpcompile.lower.joint import JointPasses, Partitioner
from mpcompile.passes.joint.keep_normalized import keep_normalized

ROWS, WIDTH = 24, 16
Norm = Callable[[Tensor], Tensor]


def rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def centred(x: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)


NORMS: dict[str, Norm] = {
    "layer_norm": lambda x: F.layer_norm(x, (WIDTH,)),
    "rms_norm": lambda x: F.rms_norm(x, (WIDTH,)),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "rms": rms,
    "centred": centred,
}


def program(norm: Norm, low: torch.dtype, x: Tensor, w: Tensor, v: Tensor, add: float) -> Tensor:
    stream = x.cumsum(0) + (x.to(low) @ w.to(low)).to(x.dtype) + add  # no sum is computed again
    return stream + (norm(stream).to(low) @ v.to(low)).to(x.dtype)


def run(
    function: Callable[..., Any], given: tuple[Tensor, ...], keeps: bool, dynamic: bool = False
) -> Any:
    """The result, the gradients, and the dtypes of what is kept of the stream's size."""
    kept: list[torch.dtype] = []

    def forward(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        results = gm.graph.output_node().args[0]
        values = [node.meta["val"] for node in results[1:] if node.op != "placeholder"]
        kept.extend(t.dtype for t in values if isinstance(t, Tensor) and t.shape == given[0].shape)
        return make_boxed_func(gm.forward)

    passes = JointPasses(parting=(keep_normalized,) if keeps else ())
    backend = aot_autograd(
        fw_compiler=forward, bw_compiler=lambda gm, inputs: make_boxed_func(gm.forward),
        partition_fn=Partitioner(None, passes), decompositions=select_decomp_table(),
    )  # fmt: skip
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
    results = compiled(*given)
    result = torch.cat(results) if isinstance(results, tuple) else results
    return result, torch.autograd.grad(result, given, weights(result)), kept


def weights(result: Tensor) -> Tensor:
    return torch.linspace(-1, 2, result.numel(), dtype=result.dtype).view_as(result)


def inputs() -> tuple[Tensor, ...]:
    return leaf(ROWS, WIDTH), leaf(WIDTH, WIDTH), leaf(WIDTH, WIDTH)


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("add", [0.0, 300.0])  # half has 2 or 0.25 between numbers of this size
def test_the_backward_reads_half(name: str, low: torch.dtype, add: float) -> None:
    given = inputs()
    before, exact, kept = run(functools.partial(program, NORMS[name], low, add=add), given, False)
    assert torch.float32 in kept
    after, rounded, kept = run(functools.partial(program, NORMS[name], low, add=add), given, True)
    assert torch.float32 not in kept
    assert torch.equal(before, after)
    wide = [t.detach().double().requires_grad_() for t in given]
    result = program(NORMS[name], torch.float64, *wide, add=add)
    for one, other, right in zip(
        rounded, exact, torch.autograd.grad(result, wide, weights(result)), strict=True
    ):
        assert error(one, right) < 1.3 * error(other, right) + torch.finfo(low).eps / 4
    assert not torch.equal(rounded[0], exact[0])


def error(gradient: Tensor, right: Tensor) -> float:
    return float((gradient - right).norm() / right.norm())


def test_symbolic_sizes() -> None:
    given = inputs()
    function = functools.partial(program, rms, torch.bfloat16, add=1.0)
    assert torch.float32 not in run(function, given, True, dynamic=True)[2]


def low(value: Tensor, weight: Tensor) -> Tensor:
    return (value.half() @ weight.half()).float()


def stream(x: Tensor, w: Tensor) -> Tensor:
    return x.cumsum(0) + low(x, w)


def test_an_operand_that_the_operand_of_another_reads() -> None:
    """The sine's backward reads the first in FP32, though the second norm is kept in half."""

    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        waves = (operand := stream(x, w)).sin()
        return operand + waves + low(rms(operand), v) + low(rms(waves), v)

    assert torch.float32 in run(function, inputs(), True)[2]


def around_its_mean(x: Tensor) -> Tensor:
    """The mean stays in what is divided by the spread around it: it may be any multiple."""
    return x * torch.rsqrt(x.var(-1, keepdim=True) + 1e-6)


def freed_of_another(x: Tensor) -> Tensor:
    var, mean = torch.var_mean(x, -1, keepdim=True)
    return (x - mean.exp()) * torch.rsqrt(var + 1e-6)


def times_its_spread(x: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6)


def of_anothers_spread(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.cos().pow(2).mean(-1, keepdim=True) + 1e-6)


def across(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """The rows' spread, of which there are as many as columns, applied to the columns."""
    square = stream(x[:WIDTH], w)
    return square + low(square * torch.rsqrt(square.pow(2).mean(-1) + 1e-6), v)


def checkpointed(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    inner = functools.partial(program, rms, torch.float16, add=0.0)
    result: Tensor = checkpoint(inner, x, w, v, use_reentrant=False)
    return result.cos()


@pytest.mark.parametrize(
    "norm", [around_its_mean, freed_of_another, times_its_spread, of_anothers_spread]
)
def test_what_is_no_norm_is_left(norm: Norm) -> None:
    test_left_as_it_is(functools.partial(program, norm, torch.float16, add=1.0))


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x, w, v: x + (rms(stream(x, w)) * w[:1]) @ v, id="in FP32"),
        pytest.param(lambda x, w, v: x + low(rms(x), v) * w.sum(), id="of an input"),
        pytest.param(lambda x, w, v: low(x, w) + low(rms(low(x, w)), v), id="widened"),
        pytest.param(lambda x, w, v: (s := stream(x, w), low(rms(s), v)), id="returned"),
        pytest.param(lambda x, w, v: (s := stream(x, w)).sin() + low(rms(s), v), id="read"),
        pytest.param(lambda x, w, v: ((s := stream(x, w)).sin(), low(rms(s), v)), id="read, too"),
        pytest.param(lambda x, w, v: (r := rms(stream(x, w))).sin() + low(r, v), id="result read"),
        pytest.param(
            lambda x, w, v: (
                (c := (s := stream(x, w)) - s.mean(-1, keepdim=True)).sin() + low(rms(c), v)
            ),
            id="centred read",
        ),
        across,
        checkpointed,
    ],
)
def test_left_as_it_is(function: Callable[..., Any]) -> None:
    given = inputs()
    before, exact, kept = run(function, given, False)
    after, grads, still = run(function, given, True)
    assert kept == still
    assert torch.equal(before, after)
    assert all(map(torch.equal, exact, grads))
