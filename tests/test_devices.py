"""What devices can do: data sheets, the capabilities of a type, and a type that is made up here."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mpcompile import MPCompileError
from mpcompile.backend import config_for, rewrite
from mpcompile.devices import registry
from mpcompile.devices.capabilities import Capabilities
from mpcompile.devices.cpu import CPU
from mpcompile.devices.facts import device_facts
from mpcompile.devices.generators import RandomState, unchanged
from mpcompile.devices.registry import capabilities, default_device, is_supported
from mpcompile.devices.tensor_cores import TensorCores, cuda_tensor_cores
from mpcompile.emit.accumulation import accumulate_in_fp32, check_accumulation
from mpcompile.emit.joint import joint_passes
from mpcompile.errors import MPCompileWarning
from mpcompile.inspect.plan import Plan
from mpcompile.planner.target import Target, target_for
from mpcompile.profile import store
from mpcompile.profile.ceilings import from_ceilings
from mpcompile.profile.key import Key, key_of
from mpcompile.rules.policy import Config
from mpcompile.settings import Settings, check_module
from mpcompile.state.later import Later

ROOT = Path(__file__).parent.parent

# -- data sheets -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "name", "expected"),
    [
        ((6, 1), "GTX 1080", "none (compute capability 6.1; they start with Volta, 7.0)"),
        ((7, 0), "V100", "FP16 (Volta, compute capability 7.0)"),
        ((7, 2), "Xavier", "FP16 (Volta, compute capability 7.2)"),
        ((7, 5), "T4", "FP16 (Turing, compute capability 7.5)"),
        ((7, 5), "NVIDIA GeForce GTX 1650", "none (GTX 16 series, compute capability 7.5)"),
        ((8, 0), "A100", "FP16, BF16, TF32 (Ampere, compute capability 8.0)"),
        ((8, 6), "RTX 3090", "FP16, BF16, TF32 (Ampere, compute capability 8.6)"),
        ((8, 9), "L40", "FP16, BF16, TF32, FP8 (Ada, compute capability 8.9)"),
        ((9, 0), "H200", "FP16, BF16, TF32, FP8 (Hopper, compute capability 9.0)"),
        ((10, 0), "B200", "FP16, BF16, TF32, FP8, FP4 (Blackwell, compute capability 10.0)"),
        ((12, 0), "RTX 5090", "FP16, BF16, TF32, FP8, FP4 (Blackwell, compute capability 12.0)"),
    ],
)
def test_tensor_cores_by_capability(capability: tuple[int, int], name: str, expected: str) -> None:
    assert cuda_tensor_cores(capability, name) == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"architecture": "x86_64", "avx512_bf16": True, "amx_bf16": False}, "AVX512-BF16"),
        (
            {"architecture": "x86_64", "avx512_bf16": True, "amx_bf16": True},
            "AMX-BF16, AVX512-BF16",
        ),
        ({"architecture": "aarch64", "sve_bf16": True, "bf16": True}, "SVE-BF16, NEON-BF16"),
        (
            {"architecture": "x86_64", "avx2": True, "bf16": True},
            "none (no BF16 or FP16 matrix instructions)",
        ),
    ],
)
def test_matrix_units_of_a_cpu(
    flags: dict[str, object], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpcompile.devices.cpu.cpu_flags", lambda: flags)
    assert capabilities("cpu").units() == expected


@pytest.mark.this_machine
@pytest.mark.parametrize("units", [True, False])
def test_auto_is_bf16_on_cpu(units: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"architecture": "x86_64", "avx512_bf16": units}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: flags)
    for limit in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(limit, raising=False)
    cpu = capabilities("cpu")
    assert cpu.auto is torch.bfloat16
    assert ("stay FP32" in cpu.why_auto()) is not units


@pytest.mark.parametrize("capability", [(6, 0), (9, 0)])
def test_auto_is_fp16_on_cuda(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    gpu = capabilities("cuda")
    assert gpu.auto is torch.float16
    expected = "products stay FP32" if capability < (7, 0) else "Tensor Cores (FP16, BF16, TF32"
    assert expected in gpu.why_auto()


def test_a_device_type_nobody_supports() -> None:
    with pytest.raises(MPCompileError, match="device type 'meta' is not supported"):
        capabilities("meta")
    assert not is_supported("meta")


@pytest.mark.gpu
def test_facts_of_the_gpu_at_hand() -> None:
    facts = device_facts("cuda")
    assert facts.dtype is torch.float16
    assert facts.name == torch.cuda.get_device_name(0)
    assert set(facts.libraries) == {"CUDA", "cuDNN", "Triton"}


# -- a device type that is made up -----------------------------------------------------------------


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


def planned(target: Target, **options: Any) -> tuple[Plan, Config]:
    """The plan of a small model. Its tensors are fakes; `target` alone says what they are for."""
    found: list[tuple[Plan, Config]] = []

    def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Any:
        config = config_for(target, Settings.parse(options), scaled=False, copied={})
        found.append((rewrite(gm, examples, config, dump=None)[1], config))
        return gm.forward

    with FakeTensorMode():
        torch.compile(Block(), backend=backend, fullgraph=True)(torch.empty(2048, 32, 64))
    (one,) = found
    return one


def precisions(plan: Plan, op: str) -> set[str]:
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
    target = target_for(capabilities(XPU), None)
    plan, config = planned(target)
    assert (plan.device, plan.dtype) == ("xpu:0", "bfloat16")
    assert precisions(plan, "aten::linear") == {"LOW"}
    # Slow attention is written out as two products around a softmax.
    assert precisions(plan, "aten::matmul") == {"LOW"}
    assert precisions(plan, "aten::_softmax") | precisions(plan, "aten::softmax") == {"FULL"}
    assert not precisions(plan, "aten::scaled_dot_product_attention")
    # Rows of 32 bytes are 16 values: 1000 becomes 1008.
    (head,) = (node for node in plan.nodes if node.name == "linear_1")
    assert head.planned == "bf16[2048, 32, 1008]"
    assert joint_passes(config) == ()


@pytest.mark.usefixtures("toy")
def test_a_dtype_that_it_has_no_units_for_needs_to_be_asked_for() -> None:
    assert target_for(capabilities(XPU), None).promised
    asked = target_for(capabilities(XPU), torch.float16)
    assert (asked.low, asked.promised, asked.profile) == (torch.float16, True, None)


@pytest.mark.usefixtures("plain")
def test_of_a_device_nobody_knows_anything_nothing_is_assumed() -> None:
    plan, config = planned(target_for(capabilities(XPU), None))
    linears = [node for node in plan.nodes if node.op == "aten::linear"]
    assert {node.precision for node in linears} == {"FULL"}
    assert all("xpu has no matrix units for f16" in node.reason for node in linears)
    assert precisions(plan, "aten::scaled_dot_product_attention") == {"FULL"}
    assert "stay FP32" in capabilities(XPU).why_auto()
    assert joint_passes(config) == ()


@pytest.mark.usefixtures("plain")
def test_it_may_say_that_products_leave_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    _, config = planned(target_for(capabilities(XPU), torch.float16))
    assert joint_passes(config) == ()
    monkeypatch.setattr(Plain, "products_leave_in_fp32", lambda self: True)
    assert len(joint_passes(config)) == 1


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize(("rate", "precision"), [(2e12, "LOW"), (5e11, "FULL")])
def test_its_profile_counts(
    rate: float, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {torch.float32: 1e12, torch.bfloat16: rate}
    key = key_of(XPU)
    assert key == Key("a toy", "xpu", torch.__version__, "", 0)
    path = tmp_path / "toy.json"
    store.write(from_ceilings(key, bandwidth=1e13, rates=rates, launch=1e-9), path)
    monkeypatch.setenv(store.VARIABLE, str(path))
    target = target_for(capabilities(XPU), None)
    assert target.profile == store.read(path)
    assert precisions(planned(target)[0], "aten::linear") == {precision}
    assert target_for(capabilities("cpu"), None).profile != target.profile


@pytest.mark.usefixtures("toy")
def test_its_sums_are_set_and_checked() -> None:
    with pytest.warns(MPCompileWarning, match=r"toy.low_sums is True: parts of a product's sums"):
        check_accumulation(XPU, torch.bfloat16)
    accumulate_in_fp32()
    check_accumulation(XPU, torch.bfloat16)


# -- running on a device ---------------------------------------------------------------------------


class Module:
    """What torch has for a device type, in place of `torch.xpu`: two devices, the first current."""

    def __init__(self) -> None:
        self.states = {0: 0, 1: 0}
        self.done = False
        self.recorded: list[Any] = []

    def device_count(self) -> int:
        return 2

    def current_stream(self, device: torch.device) -> str:
        return f"stream of {device}"

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return torch.tensor([self.states[device.index]], dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.states[device.index] = int(state)

    def Event(self) -> Any:
        module = self

        class Event:
            def record(self, stream: str) -> None:
                module.recorded.append(stream)

            def query(self) -> bool:
                return module.done

        return Event()


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    made = Module()
    monkeypatch.setitem(registry.KINDS, "xpu", Plain)
    monkeypatch.setattr(Plain, "_module", made)
    return made


@pytest.mark.usefixtures("module")
def test_a_device_that_is_there() -> None:
    assert capabilities("xpu:1").is_there()
    assert not capabilities("xpu:2").is_there()


def test_the_first_type_that_is_there_is_the_default(
    module: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "KINDS", {"xpu": Plain, "cpu": CPU})
    assert default_device() == torch.device("xpu", 0)
    monkeypatch.setattr(module, "device_count", lambda: 0)
    assert str(default_device()) == "cpu"


def test_random_numbers_of_the_host_and_of_devices_come_back(module: Module) -> None:
    devices = [torch.device("xpu", 1), torch.device("cpu"), torch.device("meta")]
    module.states = {0: 5, 1: 7}
    before = RandomState(devices)
    first = torch.rand(3)
    module.states = {0: 6, 1: 8}
    with unchanged(devices):
        before.restore()
        assert torch.equal(torch.rand(3), first)
        assert module.states == {0: 6, 1: 7}, "the first device is not among them"
    assert module.states == {0: 6, 1: 8}
    assert not torch.equal(torch.rand(3), first)


def test_what_fails_leaves_random_numbers_as_they_were(module: Module) -> None:
    state = torch.get_rng_state()

    def fail() -> None:
        module.states[0] = 1
        torch.rand(3)
        raise ValueError("so")

    with pytest.raises(ValueError, match="so"), unchanged([XPU]):
        fail()
    assert torch.equal(torch.get_rng_state(), state)
    assert module.states[0] == 0


def test_a_number_is_read_when_its_copy_is_there(
    module: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event stands behind the copy: on the stream of the number's device, not the current's."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr("mpcompile.state.later.capabilities", lambda device: Plain(second))
    second = torch.device("xpu", 1)
    later = Later(torch.tensor(3.0))
    assert module.recorded == ["stream of xpu:1"]
    assert later.read() is None
    module.done = True
    assert later.read() == 3.0


def test_on_the_host_a_number_is_there_at_once() -> None:
    assert Later(torch.tensor(3.0)).read() == 3.0


# -- nobody else names a device type ---------------------------------------------------------------

TYPES = {"cpu", "cuda", "hip", "hpu", "meta", "mps", "mtia", "privateuseone", "xla", "xpu"}

# file -> the string that it may hold, and why.
MAY_NAME = {
    "mpcompile/backend.py": ("cpu", "a graph without tensors computes on the host"),
    "mpcompile/optim/program.py": ("meta", "only the size of the tensor counts"),
    "mpcompile/preview/stand_ins.py": ("cpu", "what lies on no device is planned as the host's"),
    "mpcompile/state/later.py": ("cpu", "the mirror of a number is host memory"),
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


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('x.device.type == "cuda"', {"cuda"}),
        ('device in ("cpu", "cuda:0")', {"cpu", "cuda:0"}),
        ('SIZES["mps"]', {"mps"}),
        ("torch.cuda.synchronize()", {"torch.cuda"}),
        ("torch.version.hip is None", {"torch.version"}),
        ("x.is_cuda", {"x.is_cuda"}),
        ('help("auto, cpu, cuda or cuda:1")', set()),
        ("capabilities(x.device).asynchronous", set()),
    ],
)
def test_what_counts_as_naming_a_type(line: str, expected: set[str], tmp_path: Path) -> None:
    path = tmp_path / "line.py"
    path.write_text(line)
    assert names(path) == expected


def test_only_devices_names_device_types() -> None:
    rooms = (ROOT / "mpcompile", ROOT / "passes")
    files = [
        path
        for room in rooms
        for path in sorted(room.rglob("*.py"))
        if not path.is_relative_to(ROOT / "mpcompile" / "devices")
    ]
    assert len(files) > 80
    found = {str(path.relative_to(ROOT)): sorted(n) for path in files if (n := names(path))}
    assert found == {file: [name] for file, (name, _) in MAY_NAME.items()}
