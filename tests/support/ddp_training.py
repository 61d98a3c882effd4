"""Training under DistributedDataParallel (DDP), beside one process in FP64 on the global batch."""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from low_gradients import Net
from module_of import module_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from mpcompile import LossScale, MPOptimizer, loss_scale_of, mpcompile

# How far the parameters may be off, as a part of how far they have moved: some roundings.
CLOSE = {torch.float16: 2.0**-8, torch.bfloat16: 2.0**-5}
OVERFLOW = 2  # the step at which a gradient of the first rank overflows


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))


def around(net: nn.Module) -> Any:
    """A module whose DDP wraps an nn.Sequential."""
    return module_of(lambda m, x: m.net(x * 2).tanh(), net=net)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def held(optimizer: torch.optim.Optimizer, by_us: bool) -> torch.optim.Optimizer:
    return MPOptimizer(optimizer, emit="eager") if by_us else optimizer


def everyones(value: Any) -> list[Any]:
    """What each rank passed."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def flat(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def check_same(*values: Any) -> None:
    """All ranks have the same, bit for bit."""
    for value in values:
        plain = flat(value).tolist() if isinstance(value, nn.Module) else value
        first, *others = everyones(plain)
        assert all(other == first for other in others), everyones(plain)


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        root: what DDP wraps: a module of one's own, or an nn.Sequential.
        order: what is around what; "inside": the compiled module holds the DDP; "used before": as
            "DDP(mpcompile)", after a backward without the DDP.
        ours: whether an MPOptimizer steps.
        engine: further arguments of DDP.
        splits: whether buckets are so small that Dynamo splits the graph at them.
        overflows: whether a gradient of the first rank does, in one of the steps.
        hook: a communication hook of DDP's.
        near: how far off the hook's rounding may leave the parameters, if farther than `CLOSE`.
    """

    root: str = "own"
    order: str = "DDP(mpcompile)"
    level: str = "O2"
    dtype: torch.dtype = torch.float16
    ours: bool = True
    engine: dict[str, Any] = field(default_factory=dict)
    splits: bool = False
    overflows: bool = False
    hook: Any = None
    near: float = 0.0


def made(case: Case) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, nn.Module]:
    """The model to call, the module that was compiled, the optimizer, and the FP64 reference."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    engine = dict(case.engine)
    dist._DEFAULT_FIRST_BUCKET_BYTES = 64 if case.splits else 2**20
    if case.splits:
        engine["bucket_cap_mb"] = 1e-4
    options: dict[str, Any] = {"dtype": case.dtype, "emit": "eager", "strict": True}
    options["level"] = case.level
    if case.overflows:
        options["loss_scale"] = LossScale.dynamic(init_scale=2.0**10)
    net: Any = Net() if case.root == "own" else sequential()
    if case.order == "inside":
        net = around(net)
    reference = copy.deepcopy(net).double()
    optimizer = sgd(net)
    if case.order.endswith("optimizer first"):
        optimizer = held(optimizer, case.ours)
    if case.order == "inside":
        net.net = DDP(net.net, **engine)
        model = compiled = mpcompile(net, **options)
    elif case.order in ("DDP(mpcompile)", "used before"):
        compiled = mpcompile(net, **options)
        if case.order == "used before":
            optimizer = held(optimizer, case.ours)
            net(torch.randn(4, 8)).mean().backward()  # low gradients, stored in their dtype
        model = DDP(compiled, **engine)
    else:
        model = compiled = mpcompile(DDP(net, **engine), **options)
    if not isinstance(optimizer, MPOptimizer):
        optimizer = held(optimizer, case.ours)
    if isinstance(case.hook, dist.BuiltinCommHookType):
        model._register_builtin_comm_hook(case.hook)  # type: ignore[operator]
    elif case.hook is not None:
        model.register_comm_hook(None, case.hook)  # type: ignore[operator]
    return model, compiled, optimizer, reference


def train(rank: int, ranks: int, case: Case, steps: int = 4) -> nn.Module:
    """Some steps; all ranks must end alike, where one process would. Returns what was compiled."""
    model, compiled, optimizer, reference = made(case)
    plain, start = sgd(reference), flat(reference)
    data = torch.randn(steps, ranks, 4, 8, generator=torch.Generator().manual_seed(1))
    for step, xs in enumerate(data):
        overflows, before = case.overflows and step == OVERFLOW, flat(model)
        optimizer.zero_grad()
        factor = 1e30 if overflows and rank == 0 else 1.0
        (model(xs[rank]).square().mean() * factor).backward()
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
        optimizer.step()
        assert torch.equal(before, flat(model)) == overflows, f"{case}: rank {rank}, step {step}"
        if isinstance(optimizer, MPOptimizer):
            assert bool(optimizer.skipped) == overflows, f"{case}: rank {rank}, step {step}"
        if overflows:
            continue
        plain.zero_grad()
        loss = torch.stack([reference(x.double()).square().mean() for x in xs]).mean()
        loss.backward()
        plain.step()
    check_same(model)
    if case.overflows:
        scale = loss_scale_of(compiled)
        check_same(scale.state_dict())
        assert (scale.value, scale.skipped_steps) == (2.0**9, 1), case
    wanted = flat(reference)
    off, moved = (flat(model) - wanted).norm(), (wanted - start).norm()
    assert off <= max(case.near, CLOSE[case.dtype]) * moved, f"{case}: {off / moved}"
    return compiled
