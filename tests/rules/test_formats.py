"""A low precision is a description that may round operands further; and a policy may name a low
dtype of its own for a part of the model.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import LEVELS, SETTINGS, Compared, check
from graphs import Stage
from torch import fx, nn

from mpcompile import LossScale, MPOptimizer, Policy, compiled_plans, ir, mpcompile
from mpcompile.passes.graph.place_casts import place_casts
from mpcompile.passes.graph.plan import plan
from mpcompile.passes.graph.plan_pads import plan_pads
from mpcompile.planner.objective import UNIT, Objective
from mpcompile.profile import Profile, Sample
from mpcompile.rules.formats import Format
from mpcompile.rules.policy import Precision

# -- formats ---------------------------------------------------------------------------------------


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


def after(node: fx.Node) -> list[torch.dtype]:
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
        assert E4M3 in after(x)
        assert E4M3 in after(w)
        assert all(E4M3 not in after(b) for b in bias)  # added, not multiplied


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


# -- dtypes of a policy ----------------------------------------------------------------------------


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8))


def planned(result: Compared) -> dict[str, str]:
    """Module -> the dtype that its operator's result has."""
    (plan,) = result.plans
    rules = ("cast", "scale")
    return {n.module: n.planned.partition("[")[0] for n in plan.nodes if n.rule not in rules}


@SETTINGS
def test_a_bf16_module_in_an_fp16_compile(level: str, emit: str) -> None:
    policy = Policy(modules={r"^0$": "bf16", r"^3$": "low"})
    result = check(
        layers(), torch.randn(8, 16), level=level, emit=emit, policy=policy, tolerance=5e-2, steps=2
    )
    assert planned(result)["0"] == "bf16"
    assert planned(result)["3"] == "f16"


@SETTINGS
def test_an_fp16_module_in_a_bf16_compile_that_scales(level: str, emit: str) -> None:
    policy = Policy(modules={r"^3$": "float16"})
    result = check(
        layers(), torch.randn(8, 16), dtype=torch.bfloat16, level=level, emit=emit, policy=policy,
        loss_scale=LossScale.static(1024.0),
    )  # fmt: skip
    assert planned(result)["0"] == "bf16"
    assert planned(result)["3"] == "f16"


def test_a_node() -> None:
    policy = Policy(nodes={"linear_1": "bfloat16"})
    result = check(layers(), torch.randn(8, 16), policy=policy, tolerance=5e-2)
    assert planned(result)["3"] == "bf16"


def test_the_last_pattern_that_matches_names_the_dtype() -> None:
    policy = Policy(modules={"0": "bf16", "^0": "low"})
    assert planned(check(layers(), torch.randn(8, 16), policy=policy))["0"] == "f16"


@LEVELS
def test_under_a_generated_step(level: str) -> None:
    """O2 stores FP16 copies; what a BF16 part reads, it casts itself, and its gradient is FP32."""
    model = layers()
    options: dict[str, Any] = {"dtype": torch.float16, "emit": "aot_eager", "level": level}
    mpcompile(model, policy=Policy(modules={r"^0$": "bf16"}), strict=True, **options)
    optimizer = MPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), emit="eager")
    before = [p.detach().clone() for p in model.parameters()]
    x = torch.randn(8, 16)
    model(x).square().mean().backward()
    optimizer.step()
    assert not optimizer.skipped
    reference = layers()
    with torch.no_grad():
        for p, value in zip(reference.parameters(), before, strict=True):
            p.copy_(value)
    reference(x).square().mean().backward()
    for p, q, value in zip(model.parameters(), reference.parameters(), before, strict=True):
        moved, wanted = p.detach() - value, -0.1 * q.grad
        assert (moved - wanted).norm() <= 5e-2 * wanted.norm()
    assert any(n.planned.startswith("bf16") for n in compiled_plans(model)[0].nodes)


def test_policies_of_different_dtypes_differ() -> None:
    low, half, brain = (Policy(modules={"0": word}) for word in ("low", "fp16", "bf16"))
    assert len({low, half, brain}) == 3
    assert brain == Policy(modules={"0": "BF16"})


@pytest.mark.parametrize("dtype", [torch.float16, "float16"])
def test_naming_the_dtype_of_the_rest_changes_nothing(dtype: Any) -> None:
    mpcompile(layers(), dtype=dtype, policy=Policy(modules={"0": "fp16"}))


@pytest.mark.parametrize(
    ("regex", "matched"),
    [
        ("^dec$", {"dec.fc", "dec.head.fc"}),
        (r"\.head", {"dec.head.fc"}),
        (r"^(?!.*head)", {"fc", "dec.fc"}),
        (r"^(?!.*head).*fc$", {"fc", "dec.fc"}),
        (r"(?<!dec\.)fc$", {"fc", "dec.head.fc"}),
    ],
)
def test_a_regex_for_a_module_is_for_all_in_it_unless_it_says_not(
    regex: str, matched: set[str]
) -> None:
    policy = Policy(modules={regex: "fp32"})
    paths = ("fc", "dec.fc", "dec.head.fc")
    assert {path for path in paths if policy.for_module(path)} == matched
