"""What a step decides: of which gradients it skips, by what it clips, how the loss scales move."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mpcompile import ir
from mpcompile.ir.scale import STATE_DTYPES, ScaleRule, ScaleState
from mpcompile.ir.step_config import FACTOR, NORM, SKIPPED, Gradient, Slot
from mpcompile.optim.decide import decided, graph_of_decision, norms_of, written_by_decision
from mpcompile.optim.members import StepConfig
from mpcompile.ranks.shards import Connected

DYNAMIC, STATIC = ScaleRule(min_scale=1.0), ScaleRule("static")
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
OF_0, OF_1, OF_BOTH = Gradient(F32, (0,)), Gradient(F32, (1,)), Gradient(F32, (0, 1))


def config(*gradients: Gradient, **others: Any) -> StepConfig:
    gradients = gradients or (OF_0,)
    options = {"copies": (None,) * len(gradients), "scales": (STATIC,), **others}
    return StepConfig(gradients=gradients, **options)


def inputs(
    one: StepConfig, gradients: list[torch.Tensor], *, flags: tuple[int, ...] = (0, 0)
) -> dict[Slot, torch.Tensor]:
    """All inputs of a decision over these gradients; scales are at their start."""
    found = norms_of(gradients, one) if one.checked or one.clipped else {}
    state = ScaleState(1024.0)
    for k in range(len(one.scales)):
        found[Slot("scale", k, "flag")] = torch.tensor(flags[k])
        found[Slot("scale", k, "first")] = torch.tensor(True)
        for name, dtype in STATE_DTYPES.items():
            found[Slot("scale", k, name)] = torch.tensor(getattr(state, name), dtype=dtype)
    return found


def decide(one: StepConfig, *gradients: torch.Tensor, **options: Any) -> dict[Slot, torch.Tensor]:
    return decided(one, inputs(one, list(gradients), **options))


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("dtype", [F32, BF16, F64])
@pytest.mark.parametrize("bad", [None, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("sizes", [((2, 3), (4,), (5,)), ((0,), (70, 70)), ((),), ((5000,),)])
def test_a_gradient_that_is_not_finite_skips(
    sizes: tuple[tuple[int, ...], ...], bad: float | None, dtype: torch.dtype,
    max_grad_norm: float | None,
) -> None:  # fmt: skip
    gradients = [torch.ones(size, dtype=dtype) for size in sizes]
    if bad is not None:
        gradients[-1].view(-1)[-1] = bad
    one = config(*(Gradient(dtype, (0,)) for _ in sizes), max_grad_norm=max_grad_norm)
    found = decide(one, *gradients)
    assert found[SKIPPED].item() is (bad is not None)
    assert found[Slot("scale", 0, "skipped_steps")].item() == (bad is not None)


def test_what_adds_up_to_nothing_is_no_overflow() -> None:
    assert not decide(config(), torch.tensor([1e38, 1e38, -1e38, -1e38]))[SKIPPED]
    assert decide(config(), torch.tensor([math.inf, -math.inf]))[SKIPPED]


def test_each_scale_looks_at_its_own_gradients() -> None:
    """A parameter that both models read counts for both; an overflow of any skips all."""
    one = config(OF_0, OF_1, OF_BOTH, scales=(DYNAMIC, DYNAMIC))
    fine, bad = torch.ones(2), torch.tensor([1.0, math.nan])
    moved = [Slot("scale", 0, "scale"), Slot("scale", 1, "scale")]
    for gradients, halved in (
        ((bad, fine, fine), (True, False)),
        ((fine, bad, fine), (False, True)),
        ((fine, fine, bad), (True, True)),
    ):
        found = decide(one, *gradients)
        assert found[SKIPPED]
        assert [found[slot].item() for slot in moved] == [512.0 if h else 1024.0 for h in halved]
    found = decide(one, fine, fine, fine, flags=(0, 3))  # another optimizer's gradients
    assert found[SKIPPED]
    assert [found[slot].item() for slot in moved] == [1024.0, 512.0]


def test_it_clips_as_torch_does() -> None:
    gradients = [torch.randn(3, 4), torch.randn(5), torch.randn(7)]
    one = config(OF_0, OF_0, OF_0, max_grad_norm=0.5)
    found = decide(one, *gradients)
    params = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for p, g in zip(params, gradients, strict=True):
        p.grad = g.clone()
    norm = torch.nn.utils.clip_grad_norm_(params, 0.5)
    torch.testing.assert_close(found[NORM], norm)
    torch.testing.assert_close(gradients[0] * found[FACTOR], params[0].grad)
    assert decide(one, *(g * 1e-3 for g in gradients))[FACTOR] == 1.0


def test_an_element_on_two_ranks_counts_once() -> None:
    """Each takes half of its square."""
    one = config(Gradient(F32, (0,), replicas=2), OF_0, max_grad_norm=1.0)
    found = decide(one, torch.tensor([4.0]), torch.tensor([1.0]))
    assert found[NORM].item() == pytest.approx(math.sqrt(8 + 1))


def test_norms_of_fp64_are_fp64() -> None:
    one = config(Gradient(F64, (0,)), max_grad_norm=1.0)
    found = decide(one, torch.full((2,), 1e100, dtype=F64))
    assert (found[FACTOR].dtype, found[SKIPPED].item()) == (F64, False)


def test_what_is_not_asked_for_is_not_decided() -> None:
    assert written_by_decision(config(checked=False)) == []
    assert set(decide(config(checked=False, max_grad_norm=1.0), torch.ones(2))) == {FACTOR, NORM}


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("bad", [False, True])
def test_the_graph_writes_what_is_decided(bad: bool, max_grad_norm: float | None) -> None:
    one = config(OF_0, OF_1, scales=(DYNAMIC, STATIC), max_grad_norm=max_grad_norm)
    gradients = [torch.randn(3), torch.tensor([1.0, math.inf if bad else 2.0])]
    values = inputs(one, gradients)
    meant = decided(one, values)
    held = {slot: torch.zeros_like(meant[slot]) for slot in meant if slot not in values}
    values |= held
    gm = graph_of_decision(one, values)
    places = [ir.slot_of(n) for n in gm.graph.find_nodes(op="placeholder")]
    gm(*(values[slot] for slot in places))
    assert {slot: values[slot] for slot in meant} == meant
    written = {ir.slot_of(target) for _, target, _ in ir.writes(gm.graph)}
    constant = {s for s in meant if s.index == 1 and s.kind == "scale" and s.key != "skipped_steps"}
    assert written == set(meant) - constant
    assert all(ir.mark(n).reason for n in gm.graph.nodes if n.op == "call_function")


# -- ranks ------------------------------------------------------------------------------------

distributed = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


def text_of(one: StepConfig) -> str:
    values = inputs(one, [torch.ones(3)])
    held = {SKIPPED: torch.tensor(False), FACTOR: torch.ones(()), NORM: torch.ones(())}
    known = {**values, **{s: held[s] for s in written_by_decision(one) if s in held}}
    return ir.render(graph_of_decision(one, known).graph)


@distributed
def test_ranks_agree_in_one_sum() -> None:
    """A sum over the first group, then over the second."""
    text = text_of(config(max_grad_norm=0.5, ranks=Connected(("0", "1"), "cpu", True)))
    assert (text.count("all_reduce("), text.count("f64[2] = stack(")) == (2, 1)
    assert "all_reduce(" not in text_of(config(max_grad_norm=0.5))


@distributed
def test_ranks_agree_only_on_what_is_decided() -> None:
    ranks = Connected(("0",), "cpu", True)
    assert "f64[1] = stack(" in text_of(config(ranks=ranks))
    assert "f64[1] = stack(" in text_of(config(ranks=ranks, max_grad_norm=0.5, checked=False))


@distributed
def test_ranks_agree_on_the_device_that_the_group_exchanges() -> None:
    """FSDP's CPUOffloadPolicy keeps parameters on the host, and its group exchanges CUDA's."""
    text = text_of(config(ranks=Connected(("0",), "meta", True)))
    there, back = (line for line in text.splitlines() if "device=" in line)
    assert ("type='meta'" in there, "type='cpu'" in back) == (True, True)
