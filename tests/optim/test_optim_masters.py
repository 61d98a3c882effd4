"""FP32 masters of parameters that are BF16 or FP16 themselves, beside masters kept by hand."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from as_written import MakesState
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Muon, NAdam, Optimizer, RMSprop

from mpcompile import LossScale, MPCompileError, MPOptimizer
from mpcompile.optim.checks import check_group
from mpcompile.optim.eager import op_by_op
from mpcompile.scaling import parameters

SHAPES = ((6, 5), (5,), ())
BF16 = torch.bfloat16


class ByHand:
    """The same parameters twice: an MPOptimizer's, and copies of masters that a plain optimizer
    updates. Both are stepped with equal gradients.
    """

    def __init__(
        self,
        make: Callable[[list[Any]], Optimizer],
        *,
        dtype: torch.dtype = BF16,
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.params = [nn.Parameter(torch.randn(s).to(dtype)) for s in shapes]
        self.start = [p.detach().clone() for p in self.params]
        self.masters = [nn.Parameter(p.detach().float()) for p in self.params]
        self.optimizer = MPOptimizer(make(self.params), **{"emit": "eager", **options})
        self.plain = make(self.masters)
        self.max_grad_norm = options.get("max_grad_norm")

    def step(self, absent: Sequence[int] = (), size: float = 1.0) -> None:
        for i, (p, m) in enumerate(zip(self.params, self.masters, strict=True)):
            grad = torch.randn(p.shape).to(p.dtype) * size
            p.grad, m.grad = (None, None) if i in absent else (grad, grad.float())
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.masters, self.max_grad_norm)
        self.optimizer.step()
        self.plain.step()

    def agree(self) -> None:
        for p, m in zip(self.params, self.masters, strict=True):
            state, plain = dict(self.optimizer.state.get(p, {})), dict(self.plain.state.get(m, {}))
            torch.testing.assert_close(state.pop("master", m), m.detach(), rtol=1e-6, atol=1e-8)
            torch.testing.assert_close(state, plain, rtol=1e-5, atol=1e-8)
            rounded = self.optimizer.state[p]["master"] if p in self.optimizer.state else p
            assert torch.equal(p, rounded.to(p.dtype))


MAKE: dict[str, Callable[[list[Any]], Optimizer]] = {
    "adamw": lambda p: AdamW(p, lr=1e-6, weight_decay=0.1),
    "amsgrad": lambda p: AdamW(p, lr=1e-6, amsgrad=True),
    "momentum": lambda p: SGD(p, lr=1e-5, momentum=0.9),
    "rmsprop": lambda p: RMSprop(p, lr=1e-6, centered=True),
    "nadam": lambda p: NAdam(p, lr=1e-6),
    "adafactor": lambda p: Adafactor(p, lr=1e-5),
    "muon": lambda p: Muon([q for q in p if q.ndim == 2], lr=1e-5),
}


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("name", MAKE)
def test_a_step_is_that_of_fp32_masters(name: str, dtype: torch.dtype) -> None:
    both = ByHand(MAKE[name], dtype=dtype)
    for _ in range(4):
        both.step()
    both.agree()
    assert both.optimizer.compilations == 1


@pytest.mark.slow("trains with several optimizers")
def test_as_inductor_compiles_it() -> None:
    both = ByHand(MAKE["adamw"], emit="inductor", max_grad_norm=0.5)
    for _ in range(3):
        both.step()
    both.agree()


def test_a_hundred_small_steps_move_the_weights() -> None:
    """At lr 1e-6, where BF16 weights without masters stay where they are."""
    both = ByHand(lambda p: AdamW(p, lr=1e-6), shapes=[(64, 64)])
    alone = [nn.Parameter(p.detach().clone()) for p in both.params]
    plain = AdamW(alone, lr=1e-6)
    for _ in range(100):
        torch.manual_seed(1)  # gradients of one sign add up: 100 steps of about lr each
        both.step()
        alone[0].grad = both.params[0].grad
        plain.step()
    both.agree()
    master = both.optimizer.state[both.params[0]]["master"]
    assert ((master - both.start[0].float()).abs() > 5e-5).all()

    def moved(param: torch.Tensor) -> float:
        return (param != both.start[0]).float().mean().item()

    exact = (both.masters[0].to(BF16) != both.start[0]).float().mean().item()
    assert moved(both.params[0]) == exact > 4 * moved(alone[0])


def test_gradients_that_are_absent_in_turn() -> None:
    both = ByHand(MAKE["adamw"])
    for absent in [(0,), (1,), (2,), (), (0, 2), (1,), ()]:
        both.step(absent)
    both.agree()
    assert both.optimizer.compilations <= 4


def test_operator_by_operator() -> None:
    both = ByHand(MAKE["adamw"], max_grad_norm=1.0)
    for _ in range(3):
        with op_by_op():
            both.step()
    both.step()
    both.agree()


def test_state_of_a_users_class_is_fp32() -> None:
    both = ByHand(lambda p: MakesState(p, lr=1e-5))
    for _ in range(3):
        both.step()
    both.agree()
    assert both.optimizer.state[both.params[0]]["mean"].dtype is torch.float32


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("through", ["no_grad", "data", "load_state_dict"])
def test_what_the_user_writes_holds(through: str, eager: bool) -> None:
    both = ByHand(MAKE["adamw"])
    both.step()
    param, kept = both.params[0], both.masters[0].detach()[0].clone()
    with torch.no_grad():
        wanted = param.detach().clone()
        wanted[1:] = torch.randn(wanted[1:].shape).to(BF16)  # the first row stays as it is
        if through == "no_grad":
            param.copy_(wanted)
        elif through == "data":
            param.data[1:] = wanted[1:]
        else:
            nn.ParameterList(both.params).load_state_dict(
                {str(i): wanted if i == 0 else p for i, p in enumerate(both.params)}
            )
        both.masters[0][1:] = wanted[1:].float()
    torch.testing.assert_close(both.optimizer.state[param]["master"][0], kept)
    if eager:
        with op_by_op():
            both.step()
    else:
        both.step()
    both.agree()


def test_weights_that_were_swapped_for_an_evaluation_come_back_exactly() -> None:
    both = ByHand(MAKE["adamw"])
    both.step()
    own = [p.detach().clone() for p in both.params]
    with torch.no_grad():
        for p in both.params:
            p.zero_()
        for p, before in zip(both.params, own, strict=True):
            p.copy_(before)
    both.step()
    both.agree()


def test_a_skipped_step_keeps_what_the_user_wrote() -> None:
    both = ByHand(MAKE["adamw"])
    scale = LossScale.dynamic()
    for p in both.params:  # as a scaled graph notes it
        parameters.note(p, scales=(scale,))
    both.step()
    with torch.no_grad():
        both.params[0].fill_(3.0)
    moments = copy.deepcopy(both.optimizer.state[both.params[0]]["exp_avg"])
    for p in both.params:
        p.grad = torch.full_like(p, torch.inf)
    both.optimizer.step()
    assert both.optimizer.skipped
    assert (both.params[0] == 3.0).all()
    assert (both.optimizer.state[both.params[0]]["master"] == 3.0).all()
    assert torch.equal(both.optimizer.state[both.params[0]]["exp_avg"], moments)


def test_fp32_gradients_of_bf16_weights() -> None:
    """`grad_dtype`, for long accumulations: the step reads them as they are."""
    both = ByHand(MAKE["adamw"])
    for p, m in zip(both.params, both.masters, strict=True):
        p.grad_dtype = torch.float32
        m.grad = torch.randn(p.shape)
        p.grad = m.grad.clone()
    both.optimizer.step()
    both.plain.step()
    both.agree()


# -- checkpoints --------------------------------------------------------------------------------


def test_a_checkpoint_goes_on_exactly() -> None:
    both = ByHand(MAKE["adamw"])
    for _ in range(2):
        both.step()
    saved = copy.deepcopy(both.optimizer.state_dict())
    params = [nn.Parameter(p.detach().clone()) for p in both.params]
    optimizer = MPOptimizer(MAKE["adamw"](params), emit="eager")
    optimizer.load_state_dict(saved)
    both.step()
    for p, q in zip(params, both.params, strict=True):
        p.grad = q.grad
    optimizer.step()
    for p, q in zip(params, both.params, strict=True):
        assert torch.equal(optimizer.state[p]["master"], both.optimizer.state[q]["master"])
        assert torch.equal(optimizer.state[p]["exp_avg_sq"], both.optimizer.state[q]["exp_avg_sq"])


def test_a_plain_optimizers_checkpoint_is_widened() -> None:
    params = [nn.Parameter(torch.randn(s).to(BF16)) for s in SHAPES]
    plain = AdamW(params, lr=1e-3)
    for p in params:
        p.grad = torch.randn_like(p)
    plain.step()
    optimizer = MPOptimizer(AdamW(params, lr=1e-3), emit="eager")
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    before = [p.detach().clone() for p in params]
    for p in params:
        mean = optimizer.state[p]["exp_avg"]
        assert mean.dtype is torch.float32
        assert torch.equal(mean, plain.state[p]["exp_avg"].float())
        p.grad = torch.zeros_like(p)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    for p, start in zip(params, before, strict=True):
        assert torch.equal(optimizer.state[p]["master"], start.float())


def test_a_plain_optimizer_loads_the_state() -> None:
    both = ByHand(MAKE["adamw"])
    both.step()
    params = [nn.Parameter(p.detach().clone()) for p in both.params]
    plain = AdamW(params, lr=1e-3)
    saved = copy.deepcopy(both.optimizer.state_dict())
    plain.load_state_dict({k: v for k, v in saved.items() if k != "loss_scale"})
    for p in params:
        p.grad = torch.ones_like(p)
    plain.step()
    assert plain.state[params[0]]["exp_avg"].dtype is BF16
    # And back, where the masters that it saved are those of before its steps.
    back = MPOptimizer(AdamW(params, lr=0.0), emit="eager")
    back.load_state_dict({**copy.deepcopy(plain.state_dict()), "loss_scale": []})
    back.param_groups[0]["lr"] = 0.0
    before = [p.detach().clone() for p in params]
    back.step()
    for p, start in zip(params, before, strict=True):
        assert torch.equal(p, start)
        assert torch.equal(back.state[p]["master"], start.float())


def test_an_optimizer_that_has_stepped_without_masters_is_widened() -> None:
    params = [nn.Parameter(torch.randn(4, 4).to(BF16))]
    plain = AdamW(params, lr=1e-3)
    params[0].grad = torch.randn_like(params[0])
    plain.step()
    optimizer = MPOptimizer(plain, emit="eager")
    optimizer.step()
    held = optimizer.state[params[0]]
    assert {k: v.dtype for k, v in held.items()} == dict.fromkeys(held, torch.float32)
    assert torch.equal(held["master"].to(BF16), params[0])


def test_weights_that_become_fp32_need_no_master() -> None:
    both = ByHand(MAKE["adamw"])
    both.step()
    for p in both.params:
        p.grad = None
        p.data = p.data.float()
        p.grad = torch.ones_like(p)
    both.optimizer.step()
    assert all("master" not in both.optimizer.state[p] for p in both.params)


def test_memory() -> None:
    """Sixteen bytes for AdamW, and two for a BF16 gradient: FP32 masters by hand take as many."""
    both = ByHand(MAKE["adamw"], shapes=[(64, 64)])
    both.step()
    held = both.optimizer.memory()
    assert held["masters"] == 4.0
    assert held["copies"] == held["gradients"] == 2.0
    assert held["state"] == pytest.approx(8.0, abs=0.01)


def test_zero_is_refused() -> None:
    """As an MPOptimizer over a `ZeroRedundancyOptimizer` asks it of each param group."""
    for dtype in (torch.float16, BF16):
        with pytest.raises(MPCompileError, match="use FSDP2"):
            check_group(
                "ZeroRedundancyOptimizer", {"params": [nn.Parameter(torch.ones(2).to(dtype))]}
            )
    check_group("ZeroRedundancyOptimizer", {"params": [nn.Parameter(torch.ones(2))]})
