"""Every block of Python in every document runs; one that can't says so on its page.

The blocks of a page run one after the other over the same names, in a folder of their own, from an
empty namespace: pasted into a file they run, too. What the other pages take as given (a process
group, models of other libraries) is made here. Only the README runs through Inductor.
"""

import logging
import re
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from documented import Names, Net, eager, run
from documents import DOCUMENTS, README, blocks
from repository import ROOT
from torch.utils.data import DataLoader, TensorDataset

from mpcompile import compiled_plans

__all__ = ["eager"]

DOCS = ROOT / "docs"
NOT_RUN = re.compile(r"^\*Not run by the tests: [^*]+\*\n\n(```python\n.*?^```$)", re.M | re.S)
ELSEWHERE = {README, DOCS / "ci.md"}  # below, and in test_docs_ci.py


def runnable(document: Path) -> list[str]:
    """The blocks that are not marked as not run."""
    marked = "".join(NOT_RUN.findall(document.read_text()))
    return [block for block in blocks(document) if block not in marked]


PAGES = sorted(page for page in DOCUMENTS if blocks(page) and page not in ELSEWHERE)


@pytest.mark.slow("runs what the documents show")
def test_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Its blocks as they stand, in their order, from an empty namespace, through Inductor."""
    quick_start = README.read_text().partition("## Quick start")[2].partition("\n## ")[0]
    assert quick_start.count("```python") == 3
    assert "mpcompile(model)" in quick_start
    assert 'backend="mpcompile"' in quick_start
    shown = blocks(README)
    assert len(shown) >= 4
    names = run(shown, {"__name__": "readme"})

    model, loss = names["model"], names["loss"]
    assert torch.isfinite(loss)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    (plan,) = compiled_plans(model)
    linears = [node.precision for node in plan.nodes if node.op == "aten::linear"]
    assert linears == ["LOW", "LOW"]
    printed = capsys.readouterr().out
    assert str(plan) in printed

    before = [p.detach().clone() for p in model.parameters()]
    model(names["x"]).square().mean().backward()
    names["optimizer"].step()  # that of the block on MPOptimizer
    assert not names["optimizer"].skipped
    assert names["optimizer"].grad_norm > 0
    for old, parameter in zip(before, model.parameters(), strict=True):
        assert not torch.equal(old, parameter)

    names["other"](names["x"]).sum().backward()
    assert {p.grad.dtype for p in names["other"].parameters()} == {torch.float32}


# -- what pages take as given ----------------------------------------------------------------------


def a_script(ends: ExitStack) -> Names:
    """Nothing: an empty module, whose classes can be pickled."""
    module = types.ModuleType("page")
    sys.modules["page"] = module
    ends.callback(sys.modules.pop, "page")
    return vars(module)


def a_group_of_one(ends: ExitStack) -> Names:
    """A class of models, and a process group of this process alone."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    ends.callback(dist.destroy_process_group)
    return {"Net": Net}


def trainers(ends: ExitStack) -> Names:
    """What trainers.md takes as given: models of these libraries, their data and settings."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from lightning_nets import Net as Module
    from lightning_nets import batches
    from small_gpt import gpt, rows
    from transformers import TrainingArguments

    ends.callback(PartialState._reset_state)
    ends.callback(GradientState._reset_state)
    ends.callback(AcceleratorState._reset_state, reset_partial_state=True)
    args = TrainingArguments(output_dir="out", max_steps=1, use_cpu=True, report_to=[],
                             disable_tqdm=True, save_strategy="no")  # fmt: skip
    model = Net()
    batch = TensorDataset(torch.randn(4, 16), torch.randint(8, (4,)))
    return {"module": Module(), "train_batches": batches(2), "test_batches": batches(2),
            "transformer": gpt(), "args": args, "rows": rows(8, 0), "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "loader": DataLoader(batch, batch_size=2), "loss_of": F.cross_entropy}  # fmt: skip


GIVEN: dict[str, Callable[[ExitStack], Names]] = {
    "distributed.md": a_group_of_one,
    "trainers.md": trainers,
}


@pytest.fixture
def own_handlers() -> Iterator[None]:
    """Handlers that a block sets are taken away again."""
    logger = logging.getLogger("mpcompile")
    before, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = before
    logger.setLevel(level)


@pytest.mark.slow_rows("runs what the documents show")
@pytest.mark.filterwarnings("ignore:.* was compiled but never called")  # blocks leave that out
@pytest.mark.filterwarnings("ignore:::lightning")
@pytest.mark.usefixtures("eager", "own_handlers")
@pytest.mark.parametrize("document", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_runs(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with ExitStack() as ends:
        run(runnable(document), GIVEN.get(document.name, a_script)(ends))


def test_what_is_not_run_says_so() -> None:
    text = "*Not run by the tests: it needs a Cray.*\n\n```python\n1 / 0\n```\n"
    assert NOT_RUN.search(text)
    assert not NOT_RUN.search(text.replace("Not run", "Never run"))
