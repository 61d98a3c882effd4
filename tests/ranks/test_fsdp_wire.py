"""What FSDP2 exchanges at O2: half of the bytes, and nothing that changes what a graph computes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import on_each_rank
from torch import nn

from mpcompile import Policy, mpcompile

if not dist.is_available():
    pytest.skip("torch without distributed", allow_module_level=True)

from fsdp_training import Training, shard_root, whole
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

pytestmark = pytest.mark.slow("trains on ranks")


@contextmanager
def counted() -> Iterator[list[tuple[str, int]]]:
    """The collectives of FSDP that run meanwhile: (name, bytes that one rank sends or receives)."""
    sent: list[tuple[str, int]] = []

    def counting(name: str, call: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
            sent.append((name, max(t.numel() * t.itemsize for t in tensors)))
            return call(*args, **kwargs)

        return run

    gather, reduce = collectives.DefaultAllGather, collectives.DefaultReduceScatter
    with (
        mock.patch.object(gather, "__call__", counting("gather", gather.__call__)),
        mock.patch.object(reduce, "__call__", counting("reduce", reduce.__call__)),
    ):
        yield sent


def bytes_of(run: Training) -> dict[str, int]:
    """The bytes of one step, by the kind of collective."""
    with counted() as sent:
        run.step()
    return {kind: sum(n for k, n in sent if k == kind) for kind in ("gather", "reduce")}


def elements(model: nn.Module, *, norms: bool) -> int:
    """How many elements are gathered: shards are padded to the same length on each rank."""
    ranks, total = dist.get_world_size(), 0
    for name, p in model.named_parameters():
        if ("norm" in name) == norms:
            total += -(-p.shape[0] // ranks) * ranks * p[0].numel()
    return total


def _half_the_bytes(rank: int) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        run = Training(shard=shard_root, options={"level": "O2", "dtype": dtype})
        others, norms = (elements(run.twin, norms=norms) for norms in (False, True))
        full = {"gather": 4 * (others + norms), "reduce": 4 * (others + norms)}
        # The first forward gathers in FP32: ranks agree in the first backward.
        assert bytes_of(run) == {**full, "reduce": full["reduce"] // 2}
        # Norms read their parameters in FP32; a row of bytes is a multiple of 4.
        low = bytes_of(run)
        gathered = 4 * norms + 2 * others
        assert gathered <= low["gather"] < gathered + 4 * dist.get_world_size()
        assert low["reduce"] == 2 * (others + norms)
        run.check(2e-3)
        for options in ({"level": "O1"}, {"level": "O2", "reduce": "fp32"}):
            run = Training(shard=shard_root, options={"dtype": dtype, **options})
            assert bytes_of(run) == bytes_of(run) == full


def _as_one_process(rank: int) -> None:
    """What is gathered low gives the results of the whole model, bit for bit."""
    for dtype in (torch.float16, torch.bfloat16):
        run = Training(shard=shard_root, options={"level": "O2", "dtype": dtype})
        run.step()
        run.step()
        alone = copy.deepcopy(run.twin)
        for p, q in zip(alone.parameters(), run.model.parameters(), strict=True):
            p.data.copy_(whole(q))
        mpcompile(alone, level="O2", dtype=dtype, emit="eager")
        x = torch.randn(4, 8)
        with counted() as sent:
            result = run.model(x)
        assert torch.equal(result, alone(x))
        sizes = 4 * elements(run.twin, norms=True) + 4 * elements(run.twin, norms=False)
        assert 0 < sum(n for _, n in sent) < sizes


def _pinned(rank: int) -> None:
    """What the policy keeps in FP32 is gathered in FP32, and a user's own collectives stay."""
    policy = Policy(modules={"last": "fp32"})
    run = Training(shard=shard_root, options={"level": "O2", "policy": policy})
    plain = Training(shard=shard_root, options={"level": "O2"})
    run.step()
    plain.step()
    more = 2 * (run.twin.last.weight.numel() + run.twin.last.bias.numel())  # type: ignore[union-attr,operator]
    assert bytes_of(run)["gather"] - bytes_of(plain)["gather"] == more

    class Own(collectives.DefaultAllGather):
        pass

    own = Training(shard=shard_root, options={"level": "O2"})
    own.model.set_custom_all_gather(Own())  # type: ignore[operator]
    total = elements(own.twin, norms=True) + elements(own.twin, norms=False)
    assert bytes_of(own) == bytes_of(own) == {"gather": 4 * total, "reduce": 2 * total}
    own.check()


class Tied(nn.Module):
    """An embedding whose matrix is that of the last layer too, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 12, bias=False)
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = F.gelu(self.frozen(self.embed(x))) @ self.head.weight
        return y


def _settings_of_fsdp(rank: int) -> None:
    sharding: list[dict[str, Any]] = [
        {"reshard_after_forward": False},
        {"reshard_after_forward": 2},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        {"mp_policy": MixedPrecisionPolicy(output_dtype=torch.float32)},
        {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))},
    ]
    for options in sharding:
        run = Training(options={"level": "O2"}, sharding=options)
        run.step()
        run.step()
        run.overflow([3])
        run.step()
        run.check()
    tied = Training(make=Tied, shard=shard_root, options={"level": "O2"})
    tied.step()
    tied.step()
    tied.overflow([1])
    tied.step()
    tied.check()


def _in_turn(rank: int) -> None:
    for check in (_half_the_bytes, _as_one_process, _pinned):
        check(rank)


def test_parameters_and_gradients_travel_low() -> None:
    on_each_rank(_in_turn)


def test_settings_of_fully_shard_on_four_ranks() -> None:
    on_each_rank(_settings_of_fsdp, ranks=4)
