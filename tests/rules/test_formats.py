"""A low precision is a description: one that rounds the operands of products further than the rest
is stored (FP8) goes through the passes as FP16 does.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from graphs import Stage
from torch import fx, nn

from mpcompile import ir
from mpcompile.passes.graph.place_casts import place_casts
from mpcompile.passes.graph.plan import plan
from mpcompile.passes.graph.plan_pads import plan_pads
from mpcompile.planner.objective import UNIT, Objective
from mpcompile.profile import Profile, Sample
from mpcompile.rules.formats import Format
from mpcompile.rules.policy import Precision

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
FP8 = Format(BF16, operands=E4M3)


def mlp(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.linear(F.gelu(F.linear(x, w, b)), v)


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((8, 16), (16, 16), (16,), (16, 16))
    return [torch.randn(s, generator=generator, requires_grad=True) for s in shapes]


def placed(format_: Format, level: str = "O2") -> Stage:
    stage = Stage(place_casts, mlp, *inputs(), low=format_, level=level)
    stage.run()  # and the specification holds
    return stage


def products(stage: Stage) -> list[fx.Node]:
    return [n for n in stage.gm.graph.nodes if ir.op_name(n) == "aten::linear"]


def behind(node: fx.Node) -> list[torch.dtype]:
    """The dtypes of the values that the node is computed from by casts and arithmetic of ours."""
    found, queue = [], [node]
    while queue:
        node = queue.pop()
        found.append(ir.dtype(node))
        if ir.role(node) is ir.Role.CAST:
            queue += node.all_input_nodes
    return found


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_operands_of_products_are_rounded(level: str) -> None:
    stage = placed(FP8, level)
    for linear in products(stage):
        assert ir.precision(linear) is Precision.LOW
        assert ir.mark(linear).format == FP8
        assert ir.dtype(linear) is BF16
        x, w, *bias = linear.all_input_nodes
        assert {ir.dtype(n) for n in (x, w, *bias)} == {BF16}
        assert E4M3 in behind(x)
        assert E4M3 in behind(w)
        assert all(E4M3 not in behind(b) for b in bias)  # added, not multiplied


def test_nothing_else_is_rounded_to_it() -> None:
    """Two products of two operands each; a format without a dtype for operands rounds none."""
    narrow = [n for n in placed(FP8).gm.graph.nodes if ir.tensor(n) is not None]
    assert sum(ir.dtype(n) is E4M3 for n in narrow) == 4
    plain = [n for n in placed(Format(BF16)).gm.graph.nodes if ir.tensor(n) is not None]
    assert not any(ir.dtype(n) is E4M3 for n in plain)


def test_the_numbers() -> None:
    """Forward and backward against FP64: as near as three bits of mantissa allow."""
    given = inputs()
    exact = [x.detach().double().requires_grad_() for x in given]
    wanted = mlp(*exact)
    found = placed(FP8).gm(*given)[0]
    assert found.dtype is torch.float32
    seed = torch.ones_like(wanted)
    wanted_grads = torch.autograd.grad(wanted, exact, seed)
    grads = torch.autograd.grad(found, given, seed.float())
    for a, b in zip((found, *grads), (wanted, *wanted_grads), strict=True):
        error = (a.double() - b).norm() / b.norm()
        assert error < 2 * 2**-4  # half a unit in the last place of each of two operands
        assert error > 0


def test_an_operand_that_is_written_to_is_rounded_for_each_reader() -> None:
    """The second product reads what the detached write between the two left."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        state = torch.as_strided(x.detach().clone(), (8, 16), (16, 1))
        first = F.linear(state, w)
        torch.as_strided(state, (8, 16), (16, 1)).mul_(3)
        return first + F.linear(state, w)

    x, w, *_ = inputs()
    stage = Stage(place_casts, program, x, w, low=FP8, level="O2")
    stage.run()
    first, second = (linear.args[0] for linear in products(stage))
    assert first is not second
    once = F.linear(x, w)
    assert (stage.gm(x, w)[0] - 4 * once).norm() < 2 * 2**-4 * (4 * once).norm()


@pytest.mark.parametrize(("format_", "multiple"), [(Format(BF16), 8), (FP8, 16)])
def test_dims_are_padded_to_the_operands_bytes(format_: Format, multiple: int) -> None:
    """Tensor Cores load rows in pieces of 16 bytes: 8 values in BF16, 16 in FP8."""
    stage = Stage(plan_pads, mlp, *inputs(), low=format_, pad="always")
    stage.run()
    found = [ir.alignment(node) for node in products(stage)]
    assert [alignment.multiple for alignment in found if alignment is not None] == [multiple] * 2


def test_a_tensor_of_zeros_stays_zero() -> None:
    given = [torch.zeros_like(x).requires_grad_() for x in inputs()]
    assert torch.equal(placed(FP8).gm(*given)[0], torch.zeros(8, 16))


def test_bytes_come_from_the_format() -> None:
    """The cast of a weight: 4 bytes read, the operand's written; its gradient 4."""
    samples = [Sample("gemm", d, (1, 8, 16, 16), 1e-4, 3e-4) for d in (BF16, torch.float32)]
    copies = [Sample("copy", torch.float32, (n,), n * 1e-9, n * 2e-9) for n in (1 << 10, 1 << 24)]
    profile = Profile("a CPU", "cpu", "2.13.0", "", 2, (*copies, *samples))

    def weights(format_: Format) -> int:
        stage = Stage(plan, Linear(), inputs()[0], low=format_, level="O1")
        stage.config = replace(stage.config, profile=profile)
        objective = Objective(stage.gm.graph, stage.config)
        (linear,) = products(stage)
        return objective.terms[linear].low["weights"] - objective.launch

    assert weights(Format(BF16)) == (4 + 2 + 4) * 16 * 16 * UNIT
    assert weights(FP8) == (4 + 1 + 4) * 16 * 16 * UNIT


class Linear(nn.Linear):
    def __init__(self) -> None:
        super().__init__(16, 16, bias=False)
