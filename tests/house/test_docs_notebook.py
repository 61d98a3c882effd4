"""docs/first_hour.ipynb runs in a kernel, from top to bottom, and shows what its text says."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
from documents import anchors
from lanes import limit
from repository import ROOT

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

NOTEBOOK = ROOT / "docs" / "first_hour.ipynb"


def test_it_is_kept_with_its_results() -> None:
    book = nbformat.read(NOTEBOOK, as_version=4)
    assert all(cell.outputs for cell in book.cells if "print(" in cell.source)


def test_its_links_resolve() -> None:
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        for link in re.findall(
            r"\]\(([^)]+)\)", cell.source if cell.cell_type == "markdown" else ""
        ):
            path, _, anchor = link.partition("#")
            target = (NOTEBOOK.parent / path).resolve()
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each part prints, by its heading."""
    folder: Path = tmp_path_factory.mktemp("notebook")
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    patch.setenv("OMP_NUM_THREADS", "1")
    book: Any = nbformat.read(NOTEBOOK, as_version=4)
    try:
        nbclient.NotebookClient(
            book,
            timeout=limit(),
            kernel_name="python3",
            resources={"metadata": {"path": str(folder)}},
        ).execute()
    finally:
        patch.undo()
    found: dict[str, str] = {}
    heading = ""
    for cell in book.cells:
        if cell.cell_type == "markdown":
            heading = next(iter(re.findall(r"^## \d\. (.+)$", cell.source, re.M)), heading)
        else:
            texts = [out.text for out in cell.outputs if out.output_type == "stream"]
            found[heading] = found.get(heading, "") + "".join(texts)
    return found


def numbers(text: str) -> list[float]:
    return [float(n) for n in re.findall(r"'(\d+\.\d+)'", text)]


@pytest.mark.slow("runs the notebook in a kernel")
def test_it_trains_as_in_fp32(printed: dict[str, str]) -> None:
    """Within 2**-11, FP16's rounding, for each of its 32 steps, of the fall of the loss; the texts
    are rounded to three digits.
    """
    plain = numbers(printed["A model in FP32"])
    mixed = numbers(printed["One line"])
    assert plain[0] - plain[-1] > 1
    close = 32 * 2**-11 * (plain[0] - plain[-1]) + 1e-3
    assert all(abs(a - b) <= close for a, b in zip(plain, mixed, strict=True))
    whole = numbers(printed["The optimizer, and the whole step"])
    assert whole[-1] < plain[0] / 2
    assert "torch.float32}" in printed["One line"]
    assert "float16" not in printed["One line"]


@pytest.mark.slow("runs the notebook in a kernel")
def test_the_plan_and_its_reasons(printed: dict[str, str]) -> None:
    assert "mean and variance of the row in FP32" in printed["The plan"]
    assert "100% of the FLOPs on Tensor Cores" in printed["The plan"]


@pytest.mark.slow("runs the notebook in a kernel")
def test_what_goes_wrong_is_found_and_mended(printed: dict[str, str]) -> None:
    text = printed["It goes wrong"]
    assert "loss: nan weights unchanged: True" in text
    assert "skipped: 1" in text
    assert re.search(r"^overflow: up ", text, re.M)
    mended, plain = re.findall(r"^(\S+) in FP32: (\S+)$", text, re.M)[0]
    assert float(mended) == pytest.approx(float(plain), rel=2e-2)


@pytest.mark.slow("runs the notebook in a kernel")
def test_the_checkpoint_is_the_model(printed: dict[str, str]) -> None:
    assert printed["Save and load"].strip().endswith("True")
