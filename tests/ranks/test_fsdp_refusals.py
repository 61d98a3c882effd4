"""What mpcompile can't train under torch's sharding engines is refused, not trained wrongly."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_each_rank
from torch import nn

from mpcompile import MPCompileError, mpcompile

if not dist.is_available():
    pytest.skip("torch without distributed", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def compiled(model: nn.Module) -> nn.Module:
    return mpcompile(model, dtype=torch.float16, emit="eager")


def refused(make: Any, match: str) -> None:
    """At the call of mpcompile, or, where the engine comes after it, in the first forward."""
    with pytest.raises(MPCompileError, match=match):
        compiled(make(net()))
    model = make(compiled(net()))
    with pytest.raises(MPCompileError, match=match):
        model(torch.randn(2, 8))


def _refusals(rank: int) -> None:
    for policy, match in (
        (MixedPrecisionPolicy(param_dtype=torch.bfloat16), "Leave param_dtype out"),
        (MixedPrecisionPolicy(output_dtype=torch.bfloat16), "Leave output_dtype out"),
    ):
        refused(lambda model, policy=policy: fully_shard(model, mp_policy=policy), match)

    for whole in (True, False):
        refused(
            lambda model, whole=whole: FullyShardedDataParallel(
                model, use_orig_params=whole, device_id=torch.device("cpu")
            ),
            "fully_shard",
        )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}

    def split(model: nn.Module) -> nn.Module:
        return parallelize_module(model, mesh["tensor"], plan)  # type: ignore[arg-type]

    refused(split, "tensor parallelism")
    refused(lambda model: fully_shard(split(model), mesh=mesh["data"]), "tensor parallelism")


def test_engines_and_dtypes_that_do_not_go_with_it() -> None:
    on_each_rank(_refusals, ranks=4)
