"""What docs/migrating.md and the README change, run before and after: the same weights."""

import copy
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from documents import README, blocks
from loops import TOLERANCE, assert_moved_alike
from module_of import module_of
from repository import ROOT
from torch import nn

from mpcompile import MPOptimizer, loss_scale_of, mpcompile
from mpcompile.settings import Settings

Names = dict[str, Any]


def run(block: str, names: Names) -> Names:
    exec(compile(block, "block", "exec"), names)
    return names


def net() -> Any:
    """What the page calls `model`: (B, 16) -> (B, 8)."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(m.up(x))
        for block in m.blocks:
            x = x + F.gelu(block(x))
        return m.lm_head(x)

    blocks = nn.ModuleList([nn.Linear(16, 16)])
    return module_of(forward, up=nn.Linear(16, 16), blocks=blocks, lm_head=nn.Linear(16, 8))


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a block compiles is run by `emit="eager"`, unless the block says otherwise."""

    def parse(request: Names) -> Settings:
        asked = request.get("emit") == "inductor" and not request.get("recompute")
        return plain({**request, "emit": "eager"} if asked else request)

    plain, made = Settings.parse, functools.partialmethod(MPOptimizer.__init__, emit="eager")
    monkeypatch.setattr(Settings, "parse", parse)
    monkeypatch.setattr(MPOptimizer, "__init__", made)


PAGE = ROOT / "docs" / "migrating.md"
MINUS_NOT_RUN = r"^\*Not run by the tests: the lines with a minus, [^*]+\*\n\n"
HALF = re.compile(MINUS_NOT_RUN + r"```diff\n(.*?)^```$", re.M | re.S)


def small_blocks() -> dict[str, str]:
    """Heading -> block."""
    text = PAGE.read_text()
    found = {"README": blocks(README, "diff")[0]}
    for part in re.split(r"^##+ ", text, flags=re.M)[1:]:
        heading = part.partition("\n")[0]
        for number, block in enumerate(re.findall(r"^```diff\n(.*?)^```$", part, re.M | re.S)):
            found[f"{heading} {number}" if number else heading] = block
    return found


def side(block: str, sign: str) -> str:
    """The lines of one side: those with this sign, and those without any."""
    lines = [line for line in block.splitlines() if line[:1] in (sign, " ", "")]
    return "\n".join(line[1:] for line in lines) + "\n"


BLOCKS = small_blocks()
AFTER_ALONE = HALF.findall(PAGE.read_text())


def given(*, after: bool, compiled: bool) -> dict[str, Any]:
    """What the page takes as given. The model is plain where the block compiles it."""
    torch.manual_seed(0)
    model, other = net(), torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
    names = {
        "torch": torch, "F": F, "copy": copy, "device": "cpu", "model": model, "other": other,
        "mpcompile": functools.partial(mpcompile, dtype=torch.float16),
        "start": copy.deepcopy(model), "loss_scale_of": loss_scale_of,
        "batches": [(torch.randn(16, 16), torch.randint(8, (16,))) for _ in range(4)],
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    }  # fmt: skip
    if compiled:
        mpcompile(model, dtype=torch.float16, emit="eager")
    if not after:
        names["scaler"] = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return names


def moved(names: dict[str, Any]) -> dict[str, torch.Tensor]:
    before = dict(names["start"].named_parameters())
    model = getattr(names["model"], "_orig_mod", names["model"])  # as torch.compile has it
    return {name: (p - before[name]).detach() for name, p in model.named_parameters()}


@pytest.mark.slow_rows("trains both sides of each block")
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_trains_alike(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against autocast and GradScaler as they stand there, and, where only one side can run,
    against the same loop in FP32. Both round: twice the tolerance of one.
    """
    monkeypatch.chdir(tmp_path)
    block = BLOCKS[name]
    makes_its_own = "model = mpcompile(" in block or "train_step(" in block
    after = run(side(block, "+"), given(after=True, compiled=not makes_its_own))
    if block in AFTER_ALONE:
        assert any(p.abs().sum() > 0 for p in moved(after).values())
        return
    before = run(side(block, "-"), given(after=False, compiled=False))
    torch.testing.assert_close(after["loss"], before["loss"], rtol=6e-2, atol=6e-3)
    if name != "Evaluation":
        assert any(p.abs().sum() > 0 for p in moved(before).values())
    assert_moved_alike(moved(after), moved(before), 2 * TOLERANCE[torch.float16])


def test_each_half_that_is_not_run_says_so() -> None:
    assert set(AFTER_ALONE) <= set(BLOCKS.values())
    for block in BLOCKS.values():
        foreign = "paddle" in block or "apex" in block
        assert foreign == (block in AFTER_ALONE)


def test_all_blocks_are_seen() -> None:
    assert len(blocks(PAGE, "diff")) == len(BLOCKS) - 1
