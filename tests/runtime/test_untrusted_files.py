"""Files that others made: reading a policy, profile, plan or scale runs no code in them."""

import ast
import json
from pathlib import Path
from typing import Any

import plans
import pytest
from processes import python
from repository import ROOT, sources

from mpcompile import Policy

pytestmark = pytest.mark.slow("opens files in processes of their own")

EVIL = "__import__('pathlib').Path('ran').touch()"
FORBIDDEN = {"pickle", "marshal", "shelve", "dill", "yaml"}

# Each file is read twice: the first time, torch and Python may import or generate code.
PROGRAM = """
import sys
from pathlib import Path
import mpcompile
from mpcompile.plans.model_plan import Plan
from mpcompile.profile import store

READ = {"policy": mpcompile.Policy.load, "plan": Plan.load, "profile": store.read}
files = [Path(file) for file in sys.argv[1:]]
outcomes, seen, watching = {}, set(), False
sys.addaudithook(lambda event, _: seen.add(event) if watching else None)
for watching in (False, True):
    for file in files:
        try:
            READ[file.stem.split("_")[0]](file)
        except mpcompile.MPCompileError:
            outcomes[file] = "refused"
        else:
            outcomes[file] = "read"
watching = False
for file in files:
    print(file.stem, outcomes[file])
print("did", sorted(seen - {"open", "object.__getattr__", "sys._getframe"}))
"""


def test_nothing_of_ours_reads_what_could_be_code() -> None:
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [alias.name for alias in node.names]
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert FORBIDDEN.isdisjoint(name.split(".")[0] for name in names), path
            elif isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("eval", "exec"), f"{path}:{node.lineno}"
                if called == "torch.load":
                    safe = {k.arg: ast.unparse(k.value) for k in node.keywords}.get("weights_only")
                    assert safe == "True", f"{path}:{node.lineno}"


def poisoned(data: Any) -> Any:
    """The same shape, with code in place of every text."""
    if isinstance(data, dict):
        return {key: poisoned(value) for key, value in data.items()}
    if isinstance(data, list):
        return [poisoned(value) for value in data]
    return EVIL if isinstance(data, str) else data


def test_reading_a_file_runs_nothing(tmp_path: Path) -> None:
    policy = Policy(full={"softmax"}, modules={"up": "fp32"}, nodes={"linear": "fp32"})
    policy.save(tmp_path / "policy_good.toml")
    policy.save(tmp_path / "policy_good.json")
    plans.plan(plans.graph()).save(tmp_path / "plan_good.json")
    built_in = next((ROOT / "mpcompile" / "profile" / "builtin").glob("*.json"))
    (tmp_path / "profile_good.json").write_text(built_in.read_text())
    for good in sorted(tmp_path.glob("*_good.json")):
        bad = good.with_name(good.name.replace("good", "bad"))
        bad.write_text(json.dumps(poisoned(json.loads(good.read_text()))))
    evil = json.dumps(EVIL)
    (tmp_path / "policy_bad.toml").write_text(f"full = [{evil}]\n[modules]\n{evil} = {evil}\n")

    files = sorted(map(str, tmp_path.glob("p*_*.*")))
    done = python("-c", PROGRAM, *files, cwd=tmp_path)
    *read, did = done.stdout.splitlines()
    assert len(read) == len(files) == 8
    assert {line for line in read if "good" in line and not line.endswith(" read")} == set()
    assert {line for line in read if "policy_bad" in line} == {"policy_bad refused"}
    assert did == "did []"
    assert not (tmp_path / "ran").exists()
