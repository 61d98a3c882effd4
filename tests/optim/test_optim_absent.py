"""Steps in which other parameters lack a gradient each time: layers that are dropped, experts
without tokens. Each parameter is what plain PyTorch makes of it.
"""

import functools
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from as_written import MakesState
from ranks import on_each_rank
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import SGD, AdamW, Optimizer, RAdam
from twins import Make, Twins

from mpcompile import LossScale, MPCompileWarning, MPOptimizer, loss_scale_of, mpcompile
from mpcompile.optim import compiled_steps, updates

LAYERS, STEPS = 6, 40
SHAPES = ((3, 4), ())


class Partly(AdamW):
    """Makes some of its state in the step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if "mean" not in state:
                        state["mean"] = torch.zeros_like(p)
                    state["mean"].lerp_(p.grad, 0.5)


optim = torch.optim
MAKERS: dict[str, Make] = {
    "SGD": functools.partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "AdamW": functools.partial(AdamW, lr=0.1, weight_decay=0.1),
    "amsgrad": functools.partial(AdamW, lr=0.1, amsgrad=True),
    "NAdam": functools.partial(optim.NAdam, lr=0.1, decoupled_weight_decay=True, weight_decay=0.1),
    "RMSprop": functools.partial(optim.RMSprop, lr=0.1, momentum=0.9, centered=True),
    "Adagrad": functools.partial(optim.Adagrad, lr=0.1, lr_decay=0.1),
    "Adafactor": functools.partial(optim.Adafactor, lr=0.1, weight_decay=0.1),
    "ASGD": functools.partial(optim.ASGD, lr=0.1, t0=3),
    "Rprop": functools.partial(optim.Rprop, lr=0.1),
}
MAKE_STATE: dict[str, Make] = {
    "as written": MakesState,
    "some of it": functools.partial(Partly, lr=0.1),
    "momentum": functools.partial(SGD, lr=0.1, momentum=0.9, dampening=0.5),
}
"""Those that make state in a step."""


def tensors() -> list[torch.Tensor]:
    return [torch.randn(shape) for _ in range(LAYERS) for shape in SHAPES]


def dropped(steps: int = STEPS, late: int = 22) -> Iterator[list[bool]]:
    """For each step and parameter whether it has a gradient: the last layer has none at first."""
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        kept = torch.rand(LAYERS, generator=generator) < 0.6
        kept[-1] &= step >= late
        kept[0] |= not kept.any()
        yield [bool(k) for k in kept for _ in SHAPES]


def gradients(twins: Twins, kept: list[bool]) -> list[torch.Tensor | None]:
    return [torch.randn_like(p) if k else None for p, k in zip(twins.mine, kept, strict=True)]


def train(twins: Twins, steps: int = STEPS) -> None:
    """Drop layers; the learning rate falls, and every seventh step overflows."""
    for step, kept in enumerate(dropped(steps)):
        for optimizer in twins.both:
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        twins.give(gradients(twins, kept))
        if step % 7 == 6:
            before = [p.detach().clone() for p in twins.mine]
            next(p.grad for p in reversed(twins.mine) if p.grad is not None).fill_(torch.inf)
            twins.optimizer.step()
            assert twins.optimizer.skipped
            torch.testing.assert_close([*twins.mine], before, rtol=0, atol=0)
            continue
        for optimizer in twins.both:
            optimizer.step()
        assert not twins.optimizer.skipped


def check(twins: Twins) -> None:
    """The states are equal in all: which parameters have one, and each entry."""
    twins.agree()
    mine, theirs = twins.optimizer.state_dict(), twins.reference.state_dict()
    assert mine["state"].keys() == theirs["state"].keys()
    for index, entry in theirs["state"].items():
        torch.testing.assert_close(mine["state"][index], entry, rtol=1e-5, atol=1e-6)


@pytest.mark.slow_rows("steps of many patterns of absent gradients")
@pytest.mark.parametrize(
    ("name", "multi_tensor"),
    [("SGD", True), ("AdamW", True), *((name, False) for name in (*MAKERS, *MAKE_STATE))],
)
def test_dropped_layers(name: str, multi_tensor: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the graphs of a CPU, and (`multi_tensor`) by those that a GPU gets."""
    if multi_tensor:
        told = SimpleNamespace(multi_tensor=True)
        monkeypatch.setattr(updates, "capabilities", lambda device: told)
    twins = Twins({**MAKERS, **MAKE_STATE}[name], tensors())
    train(twins)
    check(twins)
    assert twins.optimizer.compilations <= (6 if name in MAKE_STATE else 3)


@pytest.mark.slow("steps of many patterns of absent gradients")
@pytest.mark.parametrize("make", [AdamW, RAdam])
def test_compiled(make: Make) -> None:
    """Of each kind those that have a gradient are called."""
    sizes = ((3, 4), (), (1 << 7, 1 << 8))
    start = [torch.randn(s) for _ in range(3) for s in sizes]
    twins = Twins(
        functools.partial(make, lr=0.1), start, emit="inductor", loss_scale=LossScale.none()
    )
    patterns = [(1, 1, 0), (1, 0, 1), (0, 1, 1), (1, 1, 1), (0, 0, 1), (0, 1, 0), (1, 1, 0)]
    for kept in patterns:
        twins.step(gradients(twins, [bool(k) for k in kept for _ in sizes]))
    check(twins)
    assert twins.optimizer.compilations == 1


@pytest.mark.slow("steps of many patterns of absent gradients")
def test_two_groups_of_which_one_is_all_absent() -> None:
    def make(params: list[nn.Parameter]) -> Optimizer:
        first, second = params[:6], params[6:]
        return AdamW([{"params": first}, {"params": second, "lr": 0.01, "betas": (0.5, 0.9)}], 0.1)

    twins = Twins(make, tensors())
    for step, kept in enumerate(dropped(late=0)):
        part = range(6) if step % 3 else range(6, 12)
        only = [k and i in part for i, k in enumerate(kept)]
        if step == 20:
            for optimizer in twins.both:
                optimizer.param_groups[1]["weight_decay"] = 0.2  # compiles each once more
        twins.step(gradients(twins, only))
    check(twins)
    assert twins.optimizer.compilations <= 6


def test_gradients_that_lie_otherwise_from_step_to_step() -> None:
    twins = Twins(MAKERS["AdamW"], [torch.randn(3, 4) for _ in range(4)])
    for step in range(12):
        found: list[torch.Tensor | None] = [
            torch.randn(4, 3).t() if (step >> i) & 1 else torch.randn(3, 4) for i in range(4)
        ]
        found[step % 4] = None
        twins.step(found)
    check(twins)
    assert twins.optimizer.compilations <= 3


def test_a_parameter_that_is_taken_out_of_its_group() -> None:
    """It is trained elsewhere from then on, and so it has gradients still."""
    twins = Twins(MAKERS["AdamW"], [torch.randn(3) for _ in range(4)])
    for missing in range(6):
        twins.step(gradients(twins, [i != missing % 4 for i in range(4)]))
    for optimizer in twins.both:
        del optimizer.param_groups[0]["params"][2]
    for missing in range(4):
        twins.step(gradients(twins, [i != missing for i in range(4)]))
    twins.agree()


def _shards(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    start = [torch.randn(3, 2) for _ in range(4)]
    mine = [nn.Parameter(distribute_tensor(t, mesh, [Shard(0)])) for t in start]
    theirs = [nn.Parameter(t.clone()) for t in start]
    optimizer = MPOptimizer(AdamW(mine, lr=0.1), emit="eager", max_grad_norm=1.0)
    reference = AdamW(theirs, lr=0.1)
    for kept in [
        (1, 1, 1, 0),
        (0, 1, 1, 0),
        (1, 0, 1, 0),
        (0, 0, 1, 1),
        (1, 1, 0, 1),
        (0, 1, 0, 0),
    ]:
        for p, q, keep in zip(mine, theirs, kept, strict=True):
            grad = torch.randn(3, 2)
            p.grad = distribute_tensor(grad, mesh, [Shard(0)]) if keep else None
            q.grad = grad if keep else None
        torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        optimizer.step()
        reference.step()
        assert [p in optimizer.state for p in mine] == [q in reference.state for q in theirs]
    for p, q in zip(mine, theirs, strict=True):
        whole: Any = p.data
        torch.testing.assert_close(whole.full_tensor(), q.data)
    assert optimizer.compilations == 1


@pytest.mark.slow("steps of many patterns of absent gradients")
@pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
def test_shards() -> None:
    on_each_rank(_shards)


# -- steps that no one program covers -------------------------------------------------------------


class Mixing(Optimizer):
    """Divides by the norm of all gradients."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            present = [p for p in group["params"] if p.grad is not None]
            factor = self.factor([p.grad for p in present])
            for p in present:
                p.sub_(p.grad * factor * group["lr"])

    def factor(self, grads: list[Any]) -> Any:
        return 1 / torch.stack([g.square().sum() for g in grads]).sum().sqrt()


class Counting(Mixing):
    """Divides by their number, of which a graph knows nothing."""

    def factor(self, grads: list[Any]) -> Any:
        return 1 / len(grads)


@pytest.mark.slow("steps of many patterns of absent gradients")
@pytest.mark.parametrize("make", [Mixing, Counting])
def test_a_step_that_mixes_parameters(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pattern has a program, up to a number; then such steps run operator by operator."""
    monkeypatch.setattr(compiled_steps, "_MOST", 5)
    twins = Twins(make, tensors())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(twins, 20)
    check(twins)
    assert twins.optimizer.compilations == 5
    (warning,) = (w.message for w in caught if w.category is MPCompileWarning)
    assert "depends on which others" in str(warning)


class Chosen(Mixing):
    """Does something else to parameters that are marked; they are stored like the others."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (getattr(p, "marked", 0.0) or group["lr"]))


def test_a_step_that_chooses_by_parameter() -> None:
    twins = Twins(Chosen, [torch.randn(3) for _ in range(4)])
    for rate, kept in ((0.5, (1, 1, 0, 0)), (0.5, (1, 0, 1, 1)), (0.7, (0, 1, 0, 1))):
        twins.mine[3].marked = twins.theirs[3].marked = rate
        twins.step([torch.randn(3) if k else None for k in kept])
    check(twins)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, kept: tuple[bool, ...]) -> torch.Tensor:
        for layer, keep in zip(self.layers, kept, strict=True):
            if keep:
                x = x + torch.relu(layer(x))
        return self.head(x)


@pytest.mark.slow("steps of many patterns of absent gradients")
@pytest.mark.parametrize(("dtype", "level"), [(torch.float16, "O2"), (torch.bfloat16, "O1")])
def test_a_model_that_drops_layers(dtype: torch.dtype, level: str) -> None:
    """What each step does not reach stays as it was, and so does its working copy at O2."""
    model = Layers()
    compiled = mpcompile(
        model, dtype=dtype, level=level, emit="eager", loss_scale=LossScale.dynamic(2.0**8)
    )  # fmt: skip
    optimizer = MPOptimizer(AdamW(model.parameters(), lr=0.01), emit="eager", max_grad_norm=1.0)
    for step in range(8):
        kept = tuple(bool((step * 5 + 3) >> i & 1) for i in range(4))
        optimizer.zero_grad()
        compiled(torch.randn(4, 8), kept).square().mean().backward()
        before = {n: (p.detach().clone(), _copied(optimizer.state.get(p, {})))
                  for n, p in model.named_parameters()}  # fmt: skip
        optimizer.step()
        assert not optimizer.skipped
        for name, p in model.named_parameters():
            same = torch.equal(before[name][0], p)
            assert same is (p.grad is None), name
            if p.grad is None:
                assert _copied(optimizer.state.get(p, {})) == before[name][1]
    assert optimizer.compilations == 1
    assert loss_scale_of(compiled).skipped_steps == 0


@pytest.mark.slow("steps of many patterns of absent gradients")
def test_experts_that_have_another_loss_scale_than_the_rest() -> None:
    """Those that have not run yet are taken to be like the others."""
    head = mpcompile(nn.Linear(4, 2), dtype=torch.float16, emit="eager", loss_scale=8.0)
    experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))  # uncompiled: not scaled
    params = [*experts.parameters(), *head.parameters()]
    optimizer = MPOptimizer(AdamW(params, lr=0.01), emit="eager")
    for step in range(10):
        optimizer.zero_grad()
        used = {7 - step % 8, 3 * step % 8}
        hidden = torch.stack([experts[i](torch.randn(3, 4)) for i in used]).sum(0)
        head(hidden).square().mean().backward()
        optimizer.step()
    assert optimizer.compilations == 1


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v.tolist() for k, v in state.items()}
