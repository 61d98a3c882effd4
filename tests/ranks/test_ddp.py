"""Training under DistributedDataParallel, on several processes that talk through gloo."""

import copy
import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_training import OVERFLOW, Case, check_same, flat, sgd, train
from low_gradients import Net
from ranks import join, on_each_rank
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


def train_copies(rank: int, ranks: int, order: str, dtype: torch.dtype) -> None:
    """In FP16 with an overflow. Each weight and bias of the two layers has one copy after it."""
    case = Case(order=order, dtype=dtype, overflows=dtype is FP16)
    compiled = train(rank, ranks, case)
    assert len([k for p in compiled.parameters() for k in copies_of(p)]) == 4


ORDERS = ["DDP(mpcompile)", "mpcompile(DDP)", "mpcompile(DDP), optimizer first", "used before"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_one_process_trains_as_in_fp32(order: str, dtype: torch.dtype, group: None) -> None:
    train_copies(0, 1, order, dtype)


CASES = [
    Case(level="O1", ours=False),
    Case("sequential", "mpcompile(DDP)", "O1"),
    Case("sequential", "mpcompile(DDP)", "O1", BF16, ours=False),
    Case("sequential", "mpcompile(DDP)", engine={"gradient_as_bucket_view": True}),
    Case("own", "mpcompile(DDP)", engine={"static_graph": True}),
    Case("sequential", "DDP(mpcompile)", engine={"find_unused_parameters": True}),
    Case("own", "mpcompile(DDP), optimizer first", "O2", BF16),
    Case("own", "DDP(mpcompile)", splits=True),
    Case("sequential", "mpcompile(DDP)", ours=False, splits=True),
    Case("own", "DDP(mpcompile)", "O2", BF16, ours=False, engine={"gradient_as_bucket_view": True}),
    Case("sequential", "inside"),
    Case("sequential", "inside", "O1", ours=False),
]


def _two(rank: int) -> None:
    for order in ("DDP(mpcompile)", "mpcompile(DDP)"):
        train_copies(rank, 2, order, FP16)
    _train_parts(rank)
    for case in CASES:
        compiled = train(rank, 2, case)
        plans = compiled_plans(compiled)
        assert not any(plan.left for plan in plans)
        assert sum(plan.counts().get("LOW", 0) for plan in plans) >= 2, case
        if case.splits:
            assert len(plans) > 1
        if case.dtype is FP16:
            assert loss_scale_of(compiled).skipped_steps == 0


def test_two_processes_train_as_one() -> None:
    on_each_rank(_two)


def _four(rank: int) -> None:
    train(rank, 4, Case("sequential", "mpcompile(DDP)"))
    train(rank, 4, Case(level="O1", ours=False))


@pytest.mark.slow("trains on ranks")
def test_four_processes_train_as_one() -> None:
    on_each_rank(_four, ranks=4)


def _train_parts(rank: int) -> None:
    """Two layers compiled one by one, the rest in plain FP32, in one DDP."""
    for level in ("O1", "O2"):
        torch.manual_seed(0)
        net = Net()
        reference, model = copy.deepcopy(net), DistributedDataParallel(net)
        net.fc1 = mpcompile(net.fc1, dtype=FP16, level=level, emit="eager")
        net.fc2 = mpcompile(net.fc2, dtype=FP16, level=level, emit="eager")
        optimizer, plain = sgd(net), sgd(reference)
        for step in range(4):
            xs = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(step))
            overflows = step == OVERFLOW
            factor = 1e30 if overflows and rank == 1 else 1.0
            optimizer.zero_grad()
            (model(xs[rank]).square().mean() * factor).backward()
            optimizer.step()
            if not overflows:
                plain.zero_grad()
                reference(xs.flatten(0, 1)).square().mean().backward()
                plain.step()
        check_same(net, [loss_scale_of(m).value for m in (net.fc1, net.fc2)])
        assert (flat(net) - flat(reference)).norm() <= 1e-3 * flat(reference).norm()


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


def _hooks_of_torch(rank: int) -> None:
    """They get unscaled gradients in FP32; overflows are counted after them."""
    for name, dtype, level, ours in (
        ("fp16", FP16, "O1", False),
        ("fp16", FP16, "O2", True),
        ("builtin", FP16, "O2", False),
        ("bf16", FP16, "O1", True),
        ("bf16", BF16, "O1", False),
        ("bf16", BF16, "O2", True),
    ):
        case = Case(
            "own", "DDP(mpcompile)", level, dtype, ours,
            overflows=dtype is FP16, hook=HOOKS[name], near=NEAR[name],
        )  # fmt: skip
        train(rank, 2, case)


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
