"""A device type that is made up here goes through planning, and nobody else names a type."""

import ast
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from profiles import from_ceilings
from repository import ROOT
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mpcompile import MPCompileError
from mpcompile.capture.surroundings import around_now
from mpcompile.compiler.plan_graph import Facts, plan_graph
from mpcompile.devices import registry
from mpcompile.devices.capabilities import Capabilities, TensorCores
from mpcompile.devices.registry import accumulate_in_fp32, capabilities, check_accumulation
from mpcompile.errors import MPCompileWarning
from mpcompile.lower.joint import JointPasses, joint_passes
from mpcompile.passes.joint.keep_normalized import keep_normalized
from mpcompile.passes.joint.lowered_faults import read_low_results, scatter_into_sums
from mpcompile.planner.graph_plan import GraphPlan
from mpcompile.planner.target import target_of
from mpcompile.profile import Profile, store
from mpcompile.rules.policy import Level, Target
from mpcompile.runtime.check_module import check_module
from mpcompile.settings import Settings

PLAIN = JointPasses(
    parting=(keep_normalized,), lowered=(read_low_results, scatter_into_sums), keeps_casts=True
)  # nothing of a device's own


class Toy(Capabilities):
    """Multiplies in BF16, in rows of 32 bytes; attention is slow in it, and sums may be low."""

    word = "NPU"
    auto = torch.bfloat16
    low_sums = True

    def units(self) -> str:
        return "BF16 (made up)"

    def has_units(self, dtype: torch.dtype) -> bool:
        return dtype is torch.bfloat16

    def matrix_units(self) -> TensorCores:
        return TensorCores(alignment=32, slowdown=8.0, balance=1.0)

    def has_slow_attention(self, dtype: torch.dtype) -> bool:
        return True

    def accumulate_in_fp32(self) -> None:
        type(self).low_sums = False

    def low_accumulation(self, dtype: torch.dtype) -> str | None:
        return "toy.low_sums" if self.low_sums else None

    def part(self) -> str:
        return "a toy"


class Plain(Capabilities):
    """Says of itself only what it must."""

    word = "NPU"
    auto = torch.float16


XPU = torch.device("xpu", 0)
"""A type that torch knows and mpcompile does not."""


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Toy, "low_sums", True)
    monkeypatch.setitem(registry.KINDS, "xpu", Toy)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.KINDS, "xpu", Plain)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.head = nn.Linear(64, 192), nn.Linear(64, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 64)).unbind(-2)
        return self.head(nn.functional.scaled_dot_product_attention(q, k, v))


def planned(target: Target, **options: Any) -> GraphPlan:
    """The plan of a small model. Its tensors are fakes; `target` alone says what they are for."""
    found: list[GraphPlan] = []

    def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Any:
        settings = Settings.parse(options)
        facts = Facts(target, around_now(gm, examples, target.device.type))
        found.append(plan_graph(gm, examples, facts, settings).plan)
        return gm.forward

    with FakeTensorMode():
        torch.compile(Block(), backend=backend, fullgraph=True)(torch.empty(2048, 32, 64))
    (one,) = found
    return one


def precisions(plan: GraphPlan, op: str) -> set[str]:
    return {node.precision for node in plan.nodes if node.op == op}


def test_it_is_refused_until_it_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Module()
    with FakeTensorMode():
        model.weight = nn.Parameter(torch.empty(4, 4, device=XPU))
    with pytest.raises(MPCompileError, match=r"weight is on xpu:0; supported devices: cuda, cpu$"):
        check_module(model, Settings.parse({}))
    monkeypatch.setitem(registry.KINDS, "xpu", Toy)
    check_module(model, Settings.parse({}))


@pytest.mark.usefixtures("toy")
def test_its_capabilities_make_the_plan() -> None:
    target = target_of(capabilities(XPU), None)
    plan = planned(target)
    assert (plan.device, plan.dtype) == ("xpu:0", "bfloat16")
    assert precisions(plan, "aten::linear") == {"LOW"}
    # Slow attention is written out as two products around a softmax.
    assert precisions(plan, "aten::matmul") == {"LOW"}
    assert precisions(plan, "aten::_softmax") | precisions(plan, "aten::softmax") == {"FULL"}
    assert not precisions(plan, "aten::scaled_dot_product_attention")
    # Rows of 32 bytes are 16 values: 1000 becomes 1008.
    (head,) = (node for node in plan.nodes if node.name == "linear_1")
    assert head.planned == "bf16[2048, 32, 1008]"
    assert joint_passes(Level.O1, XPU) == PLAIN


@pytest.mark.usefixtures("toy")
def test_a_dtype_that_it_has_no_units_for_needs_to_be_asked_for() -> None:
    assert target_of(capabilities(XPU), None).promised
    asked = target_of(capabilities(XPU), torch.float16)
    assert (asked.low, asked.promised, asked.profile) == (torch.float16, True, None)


@pytest.mark.usefixtures("plain")
def test_of_a_device_nobody_knows_anything_nothing_is_assumed() -> None:
    plan = planned(target_of(capabilities(XPU), None))
    linears = [node for node in plan.nodes if node.op == "aten::linear"]
    assert {node.precision for node in linears} == {"FULL"}
    assert all("xpu has no matrix units for f16" in node.reason for node in linears)
    assert precisions(plan, "aten::scaled_dot_product_attention") == {"FULL"}
    assert "stay FP32" in capabilities(XPU).why_auto()
    assert joint_passes(Level.O1, XPU) == PLAIN


@pytest.mark.usefixtures("plain")
def test_it_may_say_that_products_leave_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    assert joint_passes(Level.O1, XPU) == PLAIN
    monkeypatch.setattr(Plain, "products_leave_in_fp32", lambda self: True)
    assert len(joint_passes(Level.O1, XPU).joint) == 1


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize(("rate", "precision"), [(2e12, "LOW"), (5e11, "FULL")])
def test_its_profile_counts(
    rate: float, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {torch.float32: 1e12, torch.bfloat16: rate}
    empty = store.empty_profile(XPU)
    assert empty == Profile("a toy", "xpu", torch.__version__, "", 0, ())
    path = tmp_path / "toy.json"
    profile = from_ceilings(empty, bandwidth=1e13, rates=rates, launch=1e-9)
    store.write(replace(profile, origin="measured"), path)
    monkeypatch.setenv(store.VARIABLE, str(path))
    target = target_of(capabilities(XPU), None)
    assert target.profile == store.read(path)
    assert precisions(planned(target), "aten::linear") == {precision}
    assert target_of(capabilities("cpu"), None).profile != target.profile


@pytest.mark.usefixtures("toy")
def test_its_sums_are_set_and_checked() -> None:
    with pytest.warns(MPCompileWarning, match=r"toy.low_sums is True: parts of a product's sums"):
        check_accumulation(XPU, torch.bfloat16)
    accumulate_in_fp32()
    check_accumulation(XPU, torch.bfloat16)


# -- nobody else names a device type ---------------------------------------------------------------

TYPES = {"cpu", "cuda", "hip", "hpu", "meta", "mps", "mtia", "privateuseone", "xla", "xpu"}

# file -> the string that it may hold, and why.
MAY_NAME = {
    "mpcompile/planner/target.py": ("cpu", "a graph without tensors computes on the host"),
    "mpcompile/operators/rnn_layer.py": ("meta", "only a dtype is asked for"),
    "mpcompile/optim/compiled.py": ("meta", "only the size of the tensor counts"),
    "mpcompile/preview/stand_ins.py": ("cpu", "what lies on no device is planned as the host's"),
    "mpcompile/verify/first_call.py": ("meta", "only the strides of a result are kept"),
    "mpcompile/verify/verdicts.py": ("cpu", "what a C++ compiler makes runs on the host"),
}
# Attributes that ask for a device type without a string.
ASKING = {"is_cuda", "is_cpu", "is_xpu", "is_mps"}
MODULES = {
    f"torch.{name}" for name in ("cuda", "cpu", "xpu", "mps", "version", "backends.cuda",
                                 "backends.cpu", "backends.mps")
}  # fmt: skip


def names(path: Path) -> set[str]:
    """Device types that a file spells in code: whole strings, `torch.cuda`, `x.is_cuda`."""
    tree = ast.parse(path.read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value} if node.value.partition(":")[0] in TYPES else set()
        elif isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            found |= {text} if node.attr in ASKING or text in MODULES else set()
    return found


def test_only_devices_names_device_types() -> None:
    rooms = (ROOT / "mpcompile", ROOT / "passes")
    files = [path for room in rooms for path in sorted(room.rglob("*.py"))
             if not path.is_relative_to(ROOT / "mpcompile" / "devices")]  # fmt: skip
    assert len(files) > 80
    found = {str(path.relative_to(ROOT)): sorted(n) for path in files if (n := names(path))}
    assert found == {file: [name] for file, (name, _) in MAY_NAME.items()}


@pytest.mark.parametrize(("there", "said"), [(True, "91002"), (False, "no")])
def test_cudnn_is_named_by_its_version(
    there: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.backends.cudnn.is_available", lambda: there)
    monkeypatch.setattr("torch.backends.cudnn.version", lambda: 91002)
    assert capabilities("cuda").libraries()["cuDNN"] == said
