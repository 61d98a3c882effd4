"""Where a policy or an autocast region gives a node another low dtype, the plan names that one."""

import copy
import json
from typing import Any

import pytest
import torch
from compare import COMBINED
from torch import nn

from mpcompile import LossScale, Policy, compiled_plans, explain, mpcompile


class Net(nn.Module):
    def __init__(self, autocast: torch.dtype | None = None) -> None:
        super().__init__()
        self.a, self.b, self.autocast = nn.Linear(16, 16), nn.Linear(16, 16), autocast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=self.autocast, enabled=self.autocast is not None):
            h = self.a(x)
        return self.b(h.float().relu())


WORDS = {torch.float16: "FP16", torch.bfloat16: "BF16"}


def saved(policy: Policy, path: Any) -> Any:
    policy.save(path)
    return path


# What gives a layer another dtype: of its word, and a folder.
POLICIES: dict[str, Any] = {
    "modules": lambda word, folder: Policy(modules={"a": word}),
    "a long word": lambda word, _: Policy(
        modules={"a": word.replace("p", "").replace("f", "float")}
    ),
    "capitals": lambda word, folder: Policy(modules={"a": word.upper()}),
    "a regex": lambda word, folder: Policy(modules={"^[a]$": word}),
    "the last that matches": lambda word, folder: Policy(modules={"a": "fp32", "^a": word}),
    "nodes": lambda word, folder: Policy(nodes={"linear": word}),
    "nodes before modules": lambda word, folder: Policy(
        modules={"a": "fp32"}, nodes={"linear": word}
    ),
    "a pin": lambda word, folder: Policy().with_pins(["linear"], word),
    "a pin with its reason": lambda word, folder: Policy().with_pins({"linear": "tried"}, word),
    "a TOML file": lambda word, folder: saved(Policy(modules={"a": word}), folder / "policy.toml"),
    "a JSON file": lambda word, folder: saved(Policy(nodes={"linear": word}), folder / "some.json"),
    "a copy": lambda word, folder: copy.deepcopy(Policy(modules={"a": word})),
    "autocast": lambda word, folder: None,
}


@COMBINED
@pytest.mark.filterwarnings("ignore:bf16 and fp16 are mixed")  # Inductor's, of its own kernels
@pytest.mark.parametrize("by", POLICIES)
def test_of_a_compiled_module(by: str, how: Any, tmp_path: Any) -> None:
    dtype, level = how["dtype"], how["level"]
    (other,) = WORDS.keys() - {dtype}
    model = Net(other if by == "autocast" else None)
    policy = POLICIES[by](WORDS[other].lower(), tmp_path)
    mpcompile(model, policy=policy, loss_scale=LossScale.dynamic(), **how)
    model(torch.rand(4, 16)).sum().backward()
    (plan,) = compiled_plans(model)
    name, own = (str(one).removeprefix("torch.") for one in (other, dtype))
    low = {node.module: node.low for node in plan.nodes if node.op == "aten::linear"}
    assert low == {"a": name, "b": ""}
    lines = str(plan).splitlines()
    words = f"{WORDS[other]}/{WORDS[dtype]}"  # as they come in the program
    assert lines[0].startswith(f"{level} on cpu: 2 of 2 products in {words}")
    rows = {line.split()[0]: line for line in lines if line[:2] in ("a ", "b ")}
    assert WORDS[other] in rows["a"]
    assert WORDS[dtype] in rows["b"]
    assert WORDS[other] in str(plan.why("a"))
    assert str(plan.full()).startswith(f"{level} {name}/{own} on cpu")
    data = json.loads(json.dumps(plan.to_dict()))
    assert [n["low"] for n in data["nodes"] if n["op"] == "aten::linear"] == [name, ""]
    assert type(plan).from_dict(data).low_dtypes == [name, own]


def test_of_an_explained_module(tmp_path: Any) -> None:
    html = tmp_path / "plan.html"
    plan = explain(
        Net(), torch.rand(4, 16),
        dtype=torch.float16, policy=Policy(modules={"a": "bf16", "b": "bf16"}),
    )  # fmt: skip
    plan.to_html(html)
    assert "2 of 2 products in BF16," in str(plan)
    text = html.read_text()
    assert "LOW, BF16" in text
    assert "FP16" not in text.partition("<script")[0]


def test_what_was_decided_for_all_is_said_once() -> None:
    model = mpcompile(Net(), dtype=torch.bfloat16, emit="eager")
    model(torch.rand(4, 16))
    (plan,) = compiled_plans(model)
    assert {node.low for node in plan.nodes} == {""}
    assert plan.low_dtypes == ["bfloat16"]
