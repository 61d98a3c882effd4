"""Training under DistributedDataParallel, on several processes that talk through gloo."""

import functools
import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_training import Optimizing, Training, ours, sequential, sgd
from low_gradients import Net
from module_of import module_of
from ranks import join, on_each_rank
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from mpcompile import MPCompileError, compiled_plans, loss_scale_of, mpcompile
from mpcompile.ranks import ddp
from mpcompile.scaling.copies import copies_of

pytestmark = [
    pytest.mark.inside,
    pytest.mark.skipif(not dist.is_available(), reason="torch without distributed"),
]


FP16, BF16 = torch.float16, torch.bfloat16
# How far the parameters may be off, as a part of how far they have moved: some roundings.
CLOSE = {FP16: 2.0**-8, BF16: 2.0**-5}
OVERFLOWS = 2  # the step at which a gradient of the first rank overflows


def train(
    level: str = "O2", dtype: torch.dtype = FP16, optimizing: Optimizing = ours, *,
    overflows: bool = False, near: float = 0.0, **more: Any,
) -> nn.Module:  # fmt: skip
    """Some steps; all ranks must end alike, where one process would. Returns what is called."""
    options: dict[str, Any] = {"level": level, "dtype": dtype}
    if not overflows:
        options["loss_scale"] = "dynamic"
    run = Training(options=options, optimizing=optimizing, **more)
    for step in range(4):
        run.overflow([0]) if overflows and step == OVERFLOWS else run.step()
    run.check(max(near, CLOSE[dtype]), moved=True)
    return run.model


LAST = "engine, mpcompile, optimizer"
FIRST = "mpcompile, engine, optimizer"
OWNED, USED = "optimizer, engine, mpcompile", "mpcompile, optimizer, use, engine"


def train_copies(order: str, dtype: torch.dtype) -> None:
    """In FP16 with an overflow. Each weight and bias of the two layers has one copy after it."""
    model = train(dtype=dtype, order=order, overflows=dtype is FP16)
    assert len([k for p in model.parameters() for k in copies_of(p)]) == 4


@pytest.mark.parametrize("order", [FIRST, LAST, OWNED, USED])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_one_process_trains_as_in_fp32(order: str, dtype: torch.dtype, group: None) -> None:
    train_copies(order, dtype)


def around() -> Any:
    """A module whose DDP wraps an nn.Sequential."""
    return module_of(lambda m, x: m.net(x * 2).tanh(), net=sequential())


def inside(model: Any) -> nn.Module:
    model.net = DistributedDataParallel(model.net)
    return model  # type: ignore[no-any-return]


# Buckets so small that Dynamo splits the graph at them.
SPLITS = {"bucket_cap_mb": 1e-4}
CASES: list[dict[str, Any]] = [
    {"level": "O1", "optimizing": sgd, "order": FIRST},
    {"make": sequential, "level": "O1"},
    {"make": sequential, "level": "O1", "dtype": BF16, "optimizing": sgd},
    {"make": sequential, "settings": {"gradient_as_bucket_view": True}},
    {"settings": {"static_graph": True}},
    {"make": sequential, "order": FIRST, "settings": {"find_unused_parameters": True}},
    {"dtype": BF16, "order": OWNED},
    {"order": FIRST, "settings": SPLITS},
    {"make": sequential, "optimizing": sgd, "settings": SPLITS},
    {"dtype": BF16, "optimizing": sgd, "order": FIRST,
     "settings": {"gradient_as_bucket_view": True}},
    {"make": around, "engine": inside},
    {"make": around, "engine": inside, "level": "O1", "optimizing": sgd},
]  # fmt: skip


def _two(rank: int) -> None:
    for order in (FIRST, LAST):
        train_copies(order, FP16)
    _train_parts()
    for case in CASES:
        model = train(**case)
        plans = compiled_plans(model)
        assert not any(plan.left for plan in plans)
        assert sum(plan.counts().get("LOW", 0) for plan in plans) >= 2, case
        if case.get("settings") is SPLITS:
            assert len(plans) > 1
        if case.get("dtype", FP16) is FP16:
            assert loss_scale_of(model).skipped_steps == 0


def test_two_processes_train_as_one() -> None:
    on_each_rank(_two)


def _four(rank: int) -> None:
    train(make=sequential)
    train("O1", optimizing=sgd, order=FIRST)


@pytest.mark.slow("trains on ranks")
def test_four_processes_train_as_one() -> None:
    on_each_rank(_four, ranks=4)


def _train_parts() -> None:
    """Two layers compiled one by one, the rest in plain FP32, in one DDP."""

    def made(level: str) -> nn.Module:
        net = Net()
        for layer in (net.fc1, net.fc2):
            mpcompile(layer, dtype=FP16, level=level, emit="eager")
        return net

    for level in ("O1", "O2"):
        run = Training(functools.partial(made, level), order="engine, optimizer")
        assert len(run.scales) == 2
        run.step()
        run.step()
        run.overflow([1])
        run.step()
        run.check()


def bf16(state: Any, bucket: Any) -> Any:
    """Torch's own, which DDP takes on GPUs alone."""
    return default_hooks.bf16_compress_hook(state, bucket)


bf16.__annotations__.clear()  # DDP refuses them as text
HOOKS: dict[str, Any] = {
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": bf16,
    "builtin": dist.BuiltinCommHookType.FP16_COMPRESS,
}
# How far the parameters may be off after a hook's rounding, as a part of how far they have moved.
NEAR = {"fp16": 2.0**-9, "builtin": 2.0**-9, "bf16": 2.0**-6}


def hooked(name: str, net: nn.Module) -> nn.Module:
    model = DistributedDataParallel(net)
    if name == "builtin":
        model._register_builtin_comm_hook(HOOKS[name])  # type: ignore[operator]
    else:
        model.register_comm_hook(None, HOOKS[name])
    return model


def _hooks_of_torch(rank: int) -> None:
    """They get unscaled gradients in FP32; overflows are counted after them."""
    for name, dtype, level, optimizing in (
        ("fp16", FP16, "O1", sgd),
        ("fp16", FP16, "O2", ours),
        ("builtin", FP16, "O2", sgd),
        ("bf16", FP16, "O1", ours),
        ("bf16", BF16, "O1", sgd),
        ("bf16", BF16, "O2", ours),
    ):
        train(
            level, dtype, optimizing, order=FIRST, engine=functools.partial(hooked, name),
            overflows=dtype is FP16, near=NEAR[name],
        )  # fmt: skip


@pytest.mark.slow("trains on ranks")
def test_hooks_of_torch_send_gradients_low() -> None:
    on_each_rank(_hooks_of_torch)


def test_other_engines_in_a_ddp_are_refused(group: None) -> None:
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        reducer = DistributedDataParallel(Net())
    with pytest.raises(MPCompileError, match="Python reducer"):
        mpcompile(reducer)
    casting = DistributedDataParallel(mpcompile(Net(), emit="eager"))
    casting.mixed_precision = object()
    with pytest.raises(MPCompileError, match="mixed_precision"):
        mpcompile(casting)
    casting.module.train()
    with pytest.raises(MPCompileError, match="mixed_precision"):
        casting._run_ddp_forward(torch.randn(2, 8))


class Slow:
    """Its end takes a while, in which the thread that drops it waits for the GIL."""

    def __del__(self) -> None:
        time.sleep(0.5)


def _goes_right_after_a_backward(rank: int, folder: str) -> None:
    then = torch._C.Future.then

    def slowly(future: Any, callback: Any) -> Any:
        callback.slow = Slow()
        return then(future, callback)

    torch._C.Future.then = slowly  # type: ignore[method-assign]
    dist.destroy_process_group()  # whose group stays
    store = dist.FileStore(f"{folder}/first", 1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    model = mpcompile(DistributedDataParallel(Net()), level="O2", emit="eager")
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    model(torch.randn(2, 8)).sum().backward()
    dist.destroy_process_group()
    del model
    gc.collect()
    join(rank, 1, folder)


def test_a_ddp_goes_right_after_a_backward(tmp_path: Path) -> None:
    """The last reference to a group must not go in C++, which waits for gloo's threads with the GIL
    held, while one of them waits for the GIL.
    """
    on_each_rank(_goes_right_after_a_backward, str(tmp_path), ranks=1)


@pytest.mark.slow("trains on ranks")
def test_a_ddp_keeps_its_group_only_while_it_lives(group: None) -> None:
    def kept() -> list[Any]:
        return [module() for module, _ in ddp._held]

    models = [mpcompile(DistributedDataParallel(Net()), emit="eager") for _ in range(2)]
    for model in models:
        model(torch.randn(2, 8)).sum().backward()
    assert all(any(model is one for one in kept()) for model in models)
    del model, models
    gc.collect()
    torch._dynamo.reset()
    other = mpcompile(DistributedDataParallel(Net()), emit="eager")
    other(torch.randn(2, 8))
    assert kept() == [other]


def test_a_ddp_answers_for_what_it_wraps(group: None) -> None:
    inner = mpcompile(Net(), emit="eager")
    outer = mpcompile(DistributedDataParallel(Net()), emit="eager")
    assert loss_scale_of(DistributedDataParallel(inner)) is loss_scale_of(inner)
    assert loss_scale_of(outer).skipped_steps == 0
    outer(torch.randn(2, 8)).sum().backward()
    assert {node.module for node in compiled_plans(outer)[0].nodes} >= {"fc1", "fc2"}
