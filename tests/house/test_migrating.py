"""The scripts in examples/migrating/: the one after mpcompile trains as the one before in FP32."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow("trains both sides of each script")

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "migrating"
STEPS = 20

every_script = pytest.mark.parametrize("name", ["nanogpt", "timm", "dcgan"])
saving = pytest.mark.parametrize("name", ["nanogpt", "timm"])


@pytest.fixture(autouse=True)
def beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python has it when a script runs: its folder can be imported from."""
    monkeypatch.syspath_prepend(SCRIPTS)


def script(name: str) -> ModuleType:
    return importlib.import_module(name)


def trained(name: str, **arguments: Any) -> list[float]:
    if name.endswith("_after"):
        arguments = {"emit": "eager", **arguments}
    return script(name).main(**arguments)


@every_script
def test_the_loss_ends_as_in_fp32(name: str) -> None:
    """A rounding to FP16 moves a number by 2**-11 of itself at most. Each gradient is rounded on
    its way forward and on its way back, and what one step is off by, the next ones keep: so a
    curve may be off by 2 * 2**-11 of its whole fall for each step.
    """
    wanted = torch.tensor(trained(f"{name}_before", steps=STEPS, dtype=torch.float32))
    found = torch.tensor(trained(f"{name}_after", steps=STEPS))
    fall = wanted.max() - wanted.min()
    assert fall > 0.3, "it trains"
    assert (found - wanted).abs().max() <= 2 * 2**-11 * STEPS * fall
    assert not torch.equal(found, wanted), "nothing ran in FP16"


@every_script
def test_the_script_before_runs_with_autocast(name: str) -> None:
    losses = trained(f"{name}_before", steps=4)
    assert torch.tensor(losses).isfinite().all()


@saving
def test_a_checkpoint_goes_on_where_it_ended(name: str, tmp_path: Path) -> None:
    """Also one that the script before has written, with the state of its GradScaler."""
    kept, scaled = tmp_path / "after.pt", tmp_path / "before.pt"
    first = trained(f"{name}_after", steps=10, checkpoint=kept)
    trained(f"{name}_before", steps=10, checkpoint=scaled)
    for checkpoint in (kept, scaled):
        again = trained(f"{name}_after", steps=STEPS, checkpoint=checkpoint)
        assert again[0] < first[0] - (first[0] - first[-1]) / 2


@every_script
def test_a_script_is_short(name: str) -> None:
    for when in ("before", "after"):
        assert len((SCRIPTS / f"{name}_{when}.py").read_text().splitlines()) <= 120
