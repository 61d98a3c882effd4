"""The shape of the repository: layers, the link to the passes, the entry points."""

import ast
import functools
import importlib
import importlib.metadata
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from repository import PACKAGE, PASSES, ROOT, imported, is_file, sources, unit_of

import mpcompile
from mpcompile.torch_inside.version import RANGE

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Bottom first. A room (a folder, or a module that stands on top) imports only from those before its
# own; those of one layer do not know each other. The package root, at the very top, only gathers
# what users import.
LAYERS = (
    {"_version", "errors", "logs"},
    {"stored", "torch_inside"},
    {"devices", "ranks"},
    {"operators"},
    {"profile"},
    {"rules"},
    {"ir"},
    {"padding", "verify"},
    {"planner"},
    {"passes"},
    {"capture", "lower", "plans", "scaling"},
    {"observe"},
    {"settings"},
    {"runtime"},
    {"compiler", "optim"},
    {"whole_step"},
    {"api", "diagnosis", "preview"},
    {"integrations", "steps"},
    {"demo"},
    {"cli"},
    {"__main__"},
)
PASSES_MAY_IMPORT = {"errors", "torch_inside", "devices", "rules", "ir", "padding", "planner"}


def height(unit: str) -> int:
    for index, layer in enumerate(LAYERS):
        if unit in layer:
            return index
    raise AssertionError(f"mpcompile.{unit} stands in no layer: place it in LAYERS")


def name_of(path: Path) -> str:
    """`mpcompile/plans/model_plan.py` -> `"plans.model_plan"`; of an `__init__.py`, its room."""
    root = PASSES.parent if path.is_relative_to(PASSES) else PACKAGE
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def file_of(target: str) -> str:
    """The file that a dotted path names, or names something of: `name_of` of it."""
    while target and not (PACKAGE / target.replace(".", "/")).is_dir():
        if (PACKAGE / f"{target.replace('.', '/')}.py").is_file():
            return target
        target = target.rpartition(".")[0]
    return target


@functools.cache
def project() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)


# -- layers ----------------------------------------------------------------------------------------


def test_imports_point_downward() -> None:
    for path in sources():
        unit = unit_of(path)
        for target in imported(path) if path != PACKAGE / "__init__.py" else ():
            assert target != "<root>", f"{path} imports names of the package root, the top of all"
            other = target.split(".")[0]
            if other != unit:
                assert height(other) < height(unit), f"{path}: {unit} must not import {other}"


def test_the_files_import_each_other_in_no_circle() -> None:
    """Within a room neither, and not for their types either."""
    left = {name_of(path): {file_of(target) for target in imported(path)} for path in sources()}
    for name, read in left.items():
        read.discard(name)
    while free := [name for name, read in left.items() if not read & left.keys()]:
        for name in free:
            del left[name]
    assert not left


def test_every_layer_exists() -> None:
    for unit in set().union(*LAYERS):
        assert is_file(unit) or (PACKAGE / unit).is_dir(), f"{unit} is gone: take it out of LAYERS"


def test_a_pass_file_has_its_passes_for_public_functions_and_imports_only_the_vocabulary() -> None:
    for path in PASSES.rglob("*.py"):
        rooms = {target.split(".")[0] for target in imported(path)}
        assert rooms <= PASSES_MAY_IMPORT, path
        if path.stem == "__init__":
            continue
        tree = ast.parse(path.read_text())
        functions = [n.name for n in tree.body if isinstance(n, ast.FunctionDef)]
        public = [name for name in functions if not name.startswith("_")]
        contract = ast.get_docstring(tree)
        assert contract, f"the contract of {path.stem} stands in its docstring"
        several = len(public) > 1  # of one subject
        named = several and all(f"`{name}`" in contract for name in public)
        assert named or public == [path.stem], path


# -- the link --------------------------------------------------------------------------------------


def test_the_link_to_the_passes_is_relative() -> None:
    link = PACKAGE / "passes"
    assert link.is_symlink()
    assert os.readlink(link) == os.path.join("..", "passes")
    module = importlib.import_module("mpcompile.passes.graph.noop_casts")
    assert Path(str(module.__file__)).resolve() == PASSES / "graph" / "noop_casts.py"


# -- metadata --------------------------------------------------------------------------------------


def test_entry_points_name_what_exists() -> None:
    metadata = project()["project"]
    backends = metadata["entry-points"]["torch_dynamo_backends"]
    assert set(backends) == {"mpcompile"}
    assert set(metadata["scripts"]) == {"mpcompile"}
    for target in (*backends.values(), *metadata["scripts"].values()):
        module, name = target.split(":")
        assert callable(getattr(importlib.import_module(module), name))


def test_the_version_stands_in_one_place() -> None:
    version = mpcompile.__version__
    assert "version" in project()["project"]["dynamic"]
    assert version not in (ROOT / "pyproject.toml").read_text()
    holders = [p for p in sources() if f'"{version}"' in p.read_text()]
    assert holders == [PACKAGE / "_version.py"]
    released = rf"^## \[{re.escape(version)}\] - ([\d-]+)$"
    (date,) = re.findall(released, (ROOT / "CHANGELOG.md").read_text(), re.M)
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {version}\ndate-released: {date}\n" in citation


def test_the_installed_metadata_agrees() -> None:
    try:
        installed = importlib.metadata.distribution("mpcompile")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("mpcompile runs from the source tree, not installed")
    assert installed.version == mpcompile.__version__
    groups = {entry.group for entry in installed.entry_points if entry.name == "mpcompile"}
    assert groups == {"console_scripts", "torch_dynamo_backends"}


def test_the_torch_range_is_the_one_checked_at_run_time() -> None:
    assert f"torch{RANGE}" in project()["project"]["dependencies"]
