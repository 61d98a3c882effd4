"""`torch.distributed.checkpoint` saves FP32 numbers, and loads them on another number of ranks."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import on_each_rank
from trained_on_ranks import WAYS, Training, leaves, network

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")

SAVED, STEPS = 3, 5


def save(rank: int, folder: Path, names: list[str]) -> None:
    """Train, save, and train on."""
    for name in names:
        torch._dynamo.reset()
        training = Training(WAYS[name])
        training.train(0, SAVED)
        scale = training.scale.state_dict()
        training.save(folder / name)
        assert training.scale.state_dict() == scale  # saving counts as no step
        saved = training.whole()
        training.train(SAVED, STEPS)
        end = training.whole()
        if rank == 0:
            torch.save({"saved": saved, "end": end}, folder / f"{name}.pt")


def load(rank: int, folder: Path, names: list[str]) -> None:
    """Go on from what was saved; the other number of ranks rounds the averages otherwise."""
    for name in names:
        torch._dynamo.reset()
        expected = torch.load(folder / f"{name}.pt", weights_only=True)
        training = Training(WAYS[name], seed=1)  # other weights than those that were saved
        training.load(folder / name)
        assert leaves(training.whole()) == leaves(expected["saved"]), name
        training.train(SAVED, STEPS)
        found = training.whole()
        assert found["scale"] == expected["end"]["scale"], name
        moved, off = 0.0, 0.0
        for key, end in expected["end"]["model"].items():
            moved += float((end - expected["saved"]["model"][key]).square().sum())
            off += float((end - found["model"][key]).square().sum())
        assert off < 1e-2**2 * moved, (name, off, moved)


def load_elsewhere(rank: int, folder: Path) -> None:
    """What either engine has saved goes into the other."""
    for name, other in (("DDP-O2-MPOptimizer", "FSDP2-O1"), ("FSDP2-O2-MPOptimizer", "DDP-O1")):
        torch._dynamo.reset()
        expected = torch.load(folder / f"{name}.pt", weights_only=True)["saved"]
        training = Training(WAYS[other], seed=1)
        training.load(folder / name)
        found = training.whole()
        for part in ("model", "scale"):
            assert leaves(found[part]) == leaves(expected[part]), name
        assert leaves(found["optimizer"]["state"]) == leaves(expected["optimizer"]["state"]), name


@pytest.mark.slow("trains on ranks")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (2, 1),
        pytest.param(2, 4, marks=pytest.mark.sweep("four ranks")),
        pytest.param(4, 2, marks=pytest.mark.sweep("four ranks")),
    ],
)
def test_another_number_of_ranks(before: int, after: int, tmp_path: Path) -> None:
    on_each_rank(save, tmp_path, list(WAYS), ranks=before)
    check_dtypes(tmp_path)
    on_each_rank(load, tmp_path, list(WAYS), ranks=after)
    if before != 4:
        on_each_rank(load_elsewhere, tmp_path, ranks=2)


def check_dtypes(folder: Path) -> None:
    """All numbers of model and optimizer are in FP32, in a file that names the plain parameters."""
    plain = {f"model.{name}" for name, _ in network().named_parameters()}
    for name in WAYS:
        items = dcp.FileSystemReader(folder / name).read_metadata().state_dict_metadata
        tensors = {key: item for key, item in items.items() if hasattr(item, "properties")}
        assert {item.properties.dtype for item in tensors.values()} == {torch.float32}, name
        assert {key for key in tensors if key.startswith("model.")} == plain, name
        assert {"scale.scale", "scale.good_steps", "scale.skipped_steps"} <= items.keys(), name
