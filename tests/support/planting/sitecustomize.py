"""Plants a fault, or notes which tests reach the places of faults, as Python imports our modules.

Python imports this file at its start where its folder is on PYTHONPATH: in a test's processes, too.
`MPCOMPILE_FAULTS` is a JSON file: `{"faults": [...], "plant": number}`, or `{"faults": [...],
"reached": folder}`; each fault as `faults.Fault` has it.
"""

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
    of_file: dict[str, dict[int, faults.Fault]] = {}
    for number in numbers:
        fault = faults.Fault(**given["faults"][number])
        of_file.setdefault(str(root / fault.file), {})[number] = fault
    loader = importlib.machinery.SourceFileLoader
    usual = loader.get_code

    def get_code(self: importlib.machinery.SourceFileLoader, name: str) -> CodeType | None:
        mine = of_file.get(os.path.realpath(self.path))
        if not mine:
            return usual(self, name)
        source: Any = Path(self.path).read_bytes()
        if "plant" in given:
            (fault,) = mine.values()
            return compile(faults.planted(source, fault), self.path, "exec")
        drawn = {n: fault for n, fault in mine.items() if fault.at is not None}
        return compile(faults.watched(source, drawn), self.path, "exec")

    loader.get_code = get_code  # type: ignore[method-assign]


if _GIVEN:
    _install(json.loads(Path(_GIVEN).read_text()))
