"""CONTRIBUTING's how-tos, done as they say in a copy of the sources (options: test_settings)."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from repository import PACKAGE, PASSES, ROOT, SUPPORT

pytestmark = pytest.mark.slow("works in a copy of the tree")


class Copy:
    """A copy of the sources, to be edited."""

    def __init__(self, root: Path) -> None:
        self.root = root
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(PASSES, root / "passes", ignore=ignore)
        shutil.copytree(PACKAGE, root / "mpcompile", symlinks=True, ignore=ignore)

    def insert(self, path: str, text: str, *, after: str) -> None:
        """Add lines after the one line that starts so."""
        lines = (self.root / path).read_text().splitlines(keepends=True)
        (at,) = [i for i, line in enumerate(lines) if line.strip().startswith(after)]
        (self.root / path).write_text("".join([*lines[: at + 1], text, *lines[at + 1 :]]))

    def run(self, *arguments: str) -> str:
        """What Python prints there; fails if it fails."""
        environment = {**os.environ, "PYTHONPATH": str(self.root), "COLUMNS": "200"}
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.root, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path / "sources")


def howto(title: str) -> str:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    return text.partition(f"## How to add {title}\n")[2].partition("\n## ")[0].strip()


TITLES = (
    "an operator or a precision rule", "a pass", "a device type",
    "a kind of product", "an option",
)  # fmt: skip


@pytest.mark.parametrize("title", TITLES)
def test_a_howto_is_short(title: str) -> None:
    lines = howto(title).splitlines()
    assert 3 <= len(lines) < 15


HELP = "import sys; from mpcompile.cli import main; main(['plan', '--help'])"

OPERATOR = """
import torch
from mpcompile import compiled_plans, mpcompile

library = torch.library.Library("mylib", "DEF")
library.define("project(Tensor x, Tensor w) -> Tensor")
library.impl("project", lambda x, w: x @ w, "CompositeExplicitAutograd")
library.impl("project", lambda x, w: x @ w, "Meta")
w = torch.nn.Parameter(torch.randn(17, 9))
model = torch.nn.Linear(13, 17)

def f(x):
    return torch.ops.mylib.project(model(x), w)

with torch.no_grad():
    run = mpcompile(f, dtype=torch.float16, emit="eager", pad="always", strict=True)
    run(torch.randn(8, 13))
(plan,) = compiled_plans(run)
(node,) = [n for n in plan.nodes if n.op == "mylib::project"]
print(node.precision, node.planned, node.reason)
"""


def test_add_an_operator(copy: Copy) -> None:
    """Without its row it keeps its dtypes; with it, it runs low, padded as a product is."""
    assert copy.run("-c", OPERATOR).startswith("KEEP f32[8, 9] no rule")
    row = (
        '_row(LOW, "a product of ours", "mylib::project", product="x[m,k] w[k,n] -> [m,n]",\n'
        "     multiplies=True)\n"
    )
    copy.insert("mpcompile/rules/table.py", row, after='_row(LOW, _WHY, "addmv mv"')
    assert copy.run("-c", OPERATOR) == "LOW f16[8, 16] a product of ours\n"
    page = copy.run(str(SUPPORT / "operators_page.py"))
    line = "* `mylib::project`: product: `x[m,k] w[k,n] -> [m,n]`; multiplies"
    assert "**A product of ours.**" in page
    assert line in page
    assert line not in (ROOT / "docs" / "operators.md").read_text()


PASS = '''"""Write `relu` for `clamp_min` at zero. A rewriting pass; needs no marks."""

from __future__ import annotations

from torch import fx

from mpcompile import ir
from mpcompile.ir import aten
from mpcompile.rules.policy import Config


def name_relus(gm: fx.GraphModule, config: Config) -> bool:
    found = gm.graph.find_nodes(op="call_function", target=aten.clamp_min.default)
    for node in found:
        if ir.argument(node, "min") == 0:
            node.target, node.args = aten.relu.default, node.args[:1]
    return bool(found)
'''
USE_PASS = """
import torch, sys
from mpcompile import MPCompileError, compiled_plans, mpcompile

def f(x):
    return x.clamp_min(0) + 1

run = mpcompile(f, emit="eager", strict=True, disable_passes=sys.argv[1:])
run(torch.randn(4))
(plan,) = compiled_plans(run)
print([n.op for n in plan.nodes], "name_relus" in plan.changed, "name_relus" in plan.seconds)
"""


def add_pass(copy: Copy, text: str, *, after: str) -> None:
    (copy.root / "passes" / "graph" / "name_relus.py").write_text(text)
    for line, before in (
        ("from ..passes.graph.name_relus import name_relus", "from ..passes.graph.plan "),
        ("    name_relus,", after),
        ('    "name_relus": "clamp_min stays",', "MAY_BE_DISABLED: Mapping"),
    ):
        copy.insert("mpcompile/capture/pipeline.py", f"{line}\n", after=before)


def test_add_a_pass(copy: Copy) -> None:
    add_pass(copy, PASS, after="drop_noop_casts,")
    assert copy.run("-c", USE_PASS) == "['aten::relu', 'aten::add'] True True\n"
    without = copy.run("-c", USE_PASS, "name_relus")
    assert without == "['aten::clamp_min', 'aten::add'] False False\n"
    assert "name_relus" in copy.run("-c", HELP)


def test_a_pass_that_breaks_a_promise_is_named(copy: Copy) -> None:
    """The promises hold after a pass that nobody has written a check for."""
    careless = PASS.replace(
        "    return bool(found)",
        "    for node in gm.graph.find_nodes(op='call_function', target=aten.add.Tensor):\n"
        "        ir.set_mark(node, ir.Mark(Precision.LOW, ir.By.PLAN, 'no', config.low))\n"
        "    return bool(found)",
    ).replace("import Config", "import Config, Precision")
    add_pass(copy, careless, after="place_casts,  #")
    text = USE_PASS.replace(
        "run(torch.randn(4))",
        "try:\n    run(torch.randn(4))\n    sys.exit(1)\n"
        "except MPCompileError as error:\n    print(error); sys.exit()",
    )
    assert "after name_relus: add reads" in copy.run("-c", text)
