"""Plants a fault, or notes which tests reach the places of faults, as Python imports our modules.

Python imports this file at its start where its folder is on PYTHONPATH: in a test's processes, too.
`MPCOMPILE_FAULTS` is a JSON file: `{"faults": [...], "plant": number}`, or `{"faults": [...],
"reached": folder}`; each fault as `faults.Fault` or `mutants.Mutant` has it.
"""

import ast
import importlib.machinery
import json
import os
import sys
from pathlib import Path
from types import CodeType
from typing import Any

_GIVEN = os.environ.get("MPCOMPILE_FAULTS")
_seen: set[tuple[int, str]] = set()
_folder = ""


def reached(number: int) -> None:
    """Note that the present test has come to the place of a fault."""
    import torch

    if torch.compiler.is_dynamo_compiling():  # as Dynamo reads it: it is False wherever this runs
        return
    _note(number)


def _note(number: int) -> None:
    key = number, os.environ.get("PYTEST_CURRENT_TEST", "")
    if key not in _seen:
        _seen.add(key)
        with open(f"{_folder}/{number}", "a") as file:
            file.write(f"{key[1]}\n")


def _install(given: dict[str, Any]) -> None:
    global _folder
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import faults

    sys.path.pop(0)
    root = Path(__file__).parents[3]
    _folder = given.get("reached", "")
    numbers = [given["plant"]] if "plant" in given else range(len(given["faults"]))
    of_file: dict[str, dict[int, Any]] = {}
    for number in numbers:
        fault = given["faults"][number]
        of_file.setdefault(str(root / fault["file"]), {})[number] = fault
    loader = importlib.machinery.SourceFileLoader
    usual = loader.get_code

    def get_code(self: importlib.machinery.SourceFileLoader, name: str) -> CodeType | None:
        mine = of_file.get(os.path.realpath(self.path))
        if not mine:
            return usual(self, name)
        text = Path(self.path).read_text()
        if "plant" in given:
            (fault,) = mine.values()
            if "old" in fault:
                assert text.count(fault["old"]) == 1, fault["name"]
                return compile(text.replace(fault["old"], fault["new"]), self.path, "exec")
            tree = faults.planted(ast.parse(text), faults.Fault(**fault))
        else:
            tree = faults.watched(
                ast.parse(text), {n: faults.Fault(**f) for n, f in mine.items() if "old" not in f}
            )
        return compile(tree, self.path, "exec")

    loader.get_code = get_code  # type: ignore[method-assign]


if _GIVEN:
    _install(json.loads(Path(_GIVEN).read_text()))
