"""Faults of Inductor and of the C++ compiler: right values through mpcompile."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import python
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from mpcompile.devices import cxx
from mpcompile.devices.cxx import GCC_FLAG
from mpcompile.lower import write_order
from mpcompile.lower.write_order import inductor_for
from mpcompile.passes.joint.lowered_faults import (
    order_pools,
    read_low_results,
    scatter_into_sums,
    widen_maxima,
)

pytestmark = pytest.mark.inside

Program = Callable[..., Any]
PLAIN: Any = {"verify": False}  # nothing is compared at the first call


def traced(program: Program, *inputs: torch.Tensor) -> fx.GraphModule:
    return make_fx(program, tracing_mode="fake")(*inputs)


def targets(gm: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


def same_values(gm: fx.GraphModule, program: Program, *inputs: torch.Tensor) -> None:
    gm.graph.lint()
    gm.recompile()
    for mine, true in zip(gm(*inputs), program(*inputs), strict=True):
        assert torch.equal(mine, true)
        assert mine.dtype is true.dtype


# -- maxima ---------------------------------------------------------------------------------------


def maxima(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.amax(1), x.transpose(1, 2).amax(2, keepdim=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_maxima_are_taken_in_fp32(dtype: torch.dtype) -> None:
    x = torch.randn(4, 6, 8).to(dtype)
    gm = traced(maxima, x)
    assert widen_maxima(gm.graph)
    assert not widen_maxima(gm.graph)
    assert targets(gm).count("prims.convert_element_type.default") == 4
    same_values(gm, maxima, x)


def test_one_maximum_and_those_in_fp32_stay() -> None:
    assert not widen_maxima(traced(maxima, torch.randn(4, 6, 8)).graph)
    assert not widen_maxima(traced(lambda x: x.amax(1), torch.randn(4, 6, 8).half()).graph)


# -- results that are read ------------------------------------------------------------------------


def widened(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    logits = torch.ops.prims.convert_element_type(x @ w, torch.float32).view(2, 2, 8)
    return logits, logits.amax(-1), logits.exp().sum(-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_others_read_what_a_result_was_widened_from(dtype: torch.dtype) -> None:
    x, w = torch.randn(4, 6).to(dtype), torch.randn(6, 8).to(dtype)
    gm = traced(widened, x, w)
    assert read_low_results(gm.graph)
    assert not read_low_results(gm.graph)
    result, *_ = gm.graph.output_node().args[0]
    assert list(result.users) == [gm.graph.output_node()]
    assert "aten.mm.default" in {str(n.target) for n in gm.graph.nodes if len(n.users) == 2}
    same_values(gm, widened, x, w)


def read_by_a_product(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    wide = torch.ops.prims.convert_element_type(x @ w, torch.float32)
    return wide, wide @ wide.mT  # reads it from memory in any case


def made_by_a_kernel(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    wide = torch.ops.prims.convert_element_type((x @ w).exp(), torch.float32)
    return wide, wide.amax(-1)  # one kernel makes both


def read_by_none(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (torch.ops.prims.convert_element_type(x @ w, torch.float32),)


def widened_as_given(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    wide = torch.ops.prims.convert_element_type(x, torch.float32)
    return wide, wide.amax(-1)  # the caller's memory may be written later on


@pytest.mark.parametrize("program", [read_by_a_product, made_by_a_kernel, read_by_none,
                                     widened_as_given])  # fmt: skip
def test_where_nothing_is_gained_all_read_the_result(program: Program) -> None:
    gm = traced(program, torch.randn(4, 6).half(), torch.randn(6, 8).half())
    assert not read_low_results(gm.graph)


# -- sums of rows ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("sum_", "onto", "taken"), [
    (lambda rows, head: (head + rows,), 0.0, True),
    (lambda rows, head: (head + rows,), 1.0, False),
    (lambda rows, head: (head + rows, rows), 0.0, False),  # read by another
    (lambda rows, head: (head + 2 * rows,), 0.0, False),
    (lambda rows, head: (torch.add(head, rows, alpha=2),), 0.0, False),
    (lambda rows, head: (rows + head[:1],), 0.0, False),  # of another shape
    (lambda rows, head: (rows + head.t().contiguous().t(),), 0.0, False),  # laid out otherwise
    (lambda rows, head: (rows + 1.0,), 0.0, False),
    (lambda rows, head: (rows + rows,), 0.0, False),
    (lambda rows, head: (rows, head), 0.0, False),
])  # fmt: skip
def test_an_embeddings_gradient_is_added_to_that_of_the_head(
    sum_: Program, onto: float, taken: bool
) -> None:
    """Tokens that occur twice, and one that is masked."""

    def program(tokens: torch.Tensor, g: torch.Tensor, head: torch.Tensor) -> Any:
        put: Any = torch.ops.aten._unsafe_masked_index_put_accumulate
        seen, table = (tokens != 3).unsqueeze(-1), torch.full((8, 4), onto, dtype=g.dtype)
        return sum_(put(table, seen, [tokens], g), head.to(g.dtype))

    inputs = torch.tensor([1, 5, 5, 3]), torch.randn(4, 4), torch.randn(8, 4).half()
    exact = program(inputs[0], *(x.double() for x in inputs[1:]))
    gm = traced(program, *inputs)
    assert scatter_into_sums(gm.graph) is taken
    assert not scatter_into_sums(gm.graph)
    gm.graph.eliminate_dead_code()
    assert {"aten.full.default", "aten.add.Tensor"}.isdisjoint(targets(gm)) is taken
    gm.recompile()
    assert all((one - two).abs().max() < 1e-6 for one, two in zip(gm(*inputs), exact, strict=True))


@pytest.mark.slow("compiles by Inductor")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_two_maxima_compile(dtype: torch.dtype) -> None:
    x = torch.randn(4, 64, 128).to(dtype)
    results = torch.compile(maxima, backend="mpcompile", options=PLAIN)(x)
    assert all(map(torch.equal, results, maxima(x)))


# -- pools ----------------------------------------------------------------------------------------


def transposed(*shape: int) -> torch.Tensor:
    return torch.randn(*shape[:-2], shape[-1], shape[-2]).mT


def pool3(x: torch.Tensor) -> Any:
    return torch.ops.aten.max_pool3d_with_indices(x, [3], [2])


def pool2(x: torch.Tensor) -> Any:
    return torch.ops.aten.max_pool2d_with_indices(x, [6, 6])


@pytest.mark.parametrize(
    ("pool", "x", "strides"),
    [
        (pool3, transposed(2, 2, 6, 6, 5), (360, 180, 30, 5, 1)),
        (pool2, transposed(1, 2, 12, 13), (312, 156, 13, 1)),
        (pool3, torch.randn(2, 2, 6, 6, 5).to(memory_format=torch.channels_last_3d), None),
        (pool3, torch.randn(2, 2, 6, 6, 5), None),
    ],
    ids=["volume", "image", "channels_last", "contiguous"],
)
def test_what_a_large_pool_reads_lies_in_order(
    pool: Program, x: torch.Tensor, strides: tuple[int, ...] | None
) -> None:
    gm = traced(pool, x)
    assert order_pools(gm.graph)
    (laid,) = (n for n in gm.graph.nodes if "force_stride_order" in str(n.target))
    assert laid.meta["val"].stride() == (strides or x.stride())
    same_values(gm, pool, x)


def test_small_windows_are_written_out() -> None:
    def pool(x: torch.Tensor) -> Any:
        return torch.ops.aten.max_pool2d_with_indices(x, [5, 5])

    assert not order_pools(traced(pool, transposed(1, 2, 12, 13)).graph)


@pytest.mark.slow("compiles by Inductor")
@pytest.mark.parametrize("low", [torch.float32, torch.bfloat16])
def test_places_and_gradients_of_large_pools(low: torch.dtype) -> None:
    def program(x: torch.Tensor) -> Any:
        return F.max_pool3d(x * 2, 3, stride=2, ceil_mode=True, return_indices=True)

    def gradient(run: Program) -> torch.Tensor:
        y = x.clone().requires_grad_()
        run(y)[0].float().sin().sum().backward()
        return y.grad  # type: ignore[return-value]

    x = transposed(2, 2, 6, 6, 5).to(low)
    run = torch.compile(program, backend="mpcompile", options=PLAIN)
    assert all(map(torch.equal, run(x), program(x)))
    assert torch.equal(gradient(run), gradient(program))


# -- the C++ compiler -----------------------------------------------------------------------------

CONTRACT = "cpp.enable_floating_point_contract_flag"


@pytest.mark.parametrize("miscopies", [True, False])
def test_the_flag_is_for_such_compilers(miscopies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_order, "miscopies_tiles", lambda: miscopies)
    given = inductor_for(None, {CONTRACT: "fast"}).config.get(CONTRACT)
    assert given == (f"fast {GCC_FLAG}" if miscopies else "fast")
    ours = inductor_for(None, None).config.get(CONTRACT)
    assert ours == (f"off {GCC_FLAG}" if miscopies else None)
    if ours:
        assert inductor_for(None, {CONTRACT: ours}).config[CONTRACT] == ours  # once is enough
    assert torch._inductor.config.cpp.enable_floating_point_contract_flag == "off"


@pytest.mark.parametrize(
    ("says", "vectors", "miscopies"),
    [
        ("  -mtune=                     \t\tgeneric\n", True, True),
        ("  -mtune=                     \t\tgeneric\n", False, False),
        ("  -mtune=                     \t\tznver3\n", True, False),
        ("", True, False),
    ],
)
def test_which_compilers(
    says: str, vectors: bool, miscopies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cxx, "said", lambda compiler, *asked: says)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_f": vectors})
    assert cxx.miscopies_tiles() is miscopies


def test_what_is_no_compiler_says_nothing() -> None:
    assert cxx.tuning(None) is None
    assert cxx.tuning("/no/such/compiler") is None
    assert cxx.tuning(sys.executable) is None


_TILES = """
import sys, torch, mpcompile
def f(x, y): return x.t() + y, x.t() * y
torch.manual_seed(0)
x, y = torch.randn(128, 64).bfloat16(), torch.randn(64, 128).bfloat16()
for backend, options in (("mpcompile", {"verify": False}), ("inductor", None)):
    torch._dynamo.reset()
    found = torch.compile(f, backend=backend, options=options)(x, y)
    print(sum(int((a != b).sum()) for a, b in zip(found, f(x, y))))
"""


@pytest.mark.slow("compiles by Inductor, in a process of its own")
def test_tiles_where_gcc_does_not_know_the_cpu(tmp_path: Path) -> None:
    """A g++ that is told to tune for no CPU: ours are right; torch's own need not be."""
    gcc = shutil.which("g++")
    if gcc is None:
        pytest.skip("no g++")
    wrapper = tmp_path / "g++"
    wrapper.write_text(f'#!/bin/sh\nexec {gcc} "$@" -mtune=generic\n')
    wrapper.chmod(0o755)
    run = python("-c", _TILES, CXX=str(wrapper), TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    ours, theirs = map(int, run.stdout.split())
    assert ours == 0
    version = cxx.said(gcc, "-dumpversion").strip()
    if torch.cpu.get_capabilities().get("avx512_f") and version == "12":
        assert theirs > 0, "this g++ is right: see GCC_MISCOPIES_TILES in torch_faults.py"
