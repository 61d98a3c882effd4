"""What runs low under dtype="auto" on machines other than this one: nothing that isn't promised."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import python
from torch import nn

from mpcompile import MPCompileWarning, Policy, compiled_plans, mpcompile
from mpcompile.capture import compile_log
from mpcompile.devices.capabilities import TensorCores
from mpcompile.devices.registry import capabilities, check_accumulation
from mpcompile.profile import store
from mpcompile.profile.store import empty_profile
from mpcompile.rules import Recurrent, kernels
from mpcompile.rules.table import TABLE

pytestmark = pytest.mark.this_machine

CPU, GPU = torch.device("cpu"), torch.device("cuda")

X86 = {"architecture": "x86_64", "avx2": True, "cpu_name": "a CPU"}
AVX512 = {**X86, "avx512_f": True}
AVX512_BF16 = {**AVX512, "avx512_bf16": True}
AMX = {**AVX512_BF16, "amx_bf16": True}
ARM = {"architecture": "aarch64"}
ARM_BF16 = {**ARM, "bf16": True}
UNKNOWN = {"architecture": "riscv64"}


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes this machine's CPU another one; `vectors` is what ATen uses of it."""

    def become(flags: dict[str, Any], vectors: str | None = None, **environment: str) -> None:
        default = "AVX512" if flags.get("avx512_f") else "AVX2"
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict(flags))
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: vectors or default)
        for variable in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
            monkeypatch.delenv(variable, raising=False)
        for variable, value in environment.items():
            monkeypatch.setenv(variable, value)
        compile_log.say_nothing_runs_low.cache_clear()

    return become


# -- facts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "units", "profile"),
    [
        (X86, "", "cpu-avx2"),
        ({**X86, "bf16": True}, "", "cpu-avx2"),  # a flag of ARM's
        (AVX512, "", "cpu-avx512"),
        (AVX512_BF16, "AVX512-BF16", "cpu-avx512-bf16"),
        (AMX, "AMX-BF16, AVX512-BF16", "cpu-amx-bf16"),
        (ARM, "", None),
        (ARM_BF16, "NEON-BF16", None),
        ({**ARM_BF16, "sve_bf16": True}, "SVE-BF16, NEON-BF16", None),
        (UNKNOWN, "", None),
    ],
)
def test_units_and_profile_of_a_cpu(
    flags: dict[str, Any], units: str, profile: str | None, cpu: Callable[..., None]
) -> None:
    """And "auto" is BF16 in any case."""
    cpu(flags)
    one = capabilities(CPU)
    assert one.units() == (units or "none (no BF16 or FP16 matrix instructions)")
    assert one.has_units(torch.bfloat16) is bool(units)
    assert one.auto is torch.bfloat16
    assert ("stay FP32" in one.why_auto()) is not bool(units)
    assert one.builtin_profile() == profile
    if profile is not None:
        assert store.builtin(profile).device_type == "cpu"


@pytest.mark.parametrize(
    ("told", "profile"),
    [
        ({"ONEDNN_MAX_CPU_ISA": "AVX2"}, "cpu-avx2"),
        ({"DNNL_MAX_CPU_ISA": "avx2_vnni"}, "cpu-avx2"),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}, "cpu-avx512"),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, "cpu-avx512-bf16"),
        ({"ONEDNN_MAX_CPU_ISA": "ALL"}, "cpu-amx-bf16"),
        ({"vectors": "AVX2"}, "cpu-avx2"),
        ({"vectors": "DEFAULT"}, "cpu-avx2"),
    ],
)
def test_what_the_libraries_are_told_counts(
    told: dict[str, str], profile: str, cpu: Callable[..., None]
) -> None:
    cpu(AMX, **told)
    assert capabilities(CPU).builtin_profile() == profile
    assert capabilities(CPU).has_units(torch.bfloat16) is profile.endswith("-bf16")


def test_a_limited_cpu_has_a_profile_of_its_own(cpu: Callable[..., None]) -> None:
    names = set()
    for limit in ("AVX2", "AVX512_CORE", "ALL"):
        cpu(AVX512_BF16, "AVX2" if limit == "AVX2" else "AVX512", ONEDNN_MAX_CPU_ISA=limit)
        names.add(empty_profile(CPU).device)
    assert names == {"a CPU (AVX2)", "a CPU (AVX512)", "a CPU (AVX512-BF16)"}


@pytest.mark.parametrize(("target", "units"), [("gfx90a:sramecc+", True), ("gfx1030", False)])
def test_units_of_an_amd_gpu(target: str, units: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        gcnArchName = target

    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    assert capabilities(GPU).has_units(torch.float16) is units
    assert capabilities(GPU).units().startswith("none") is not units


def test_what_is_nvidias_is_not_said_of_an_amd_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """ROCm has compute capabilities too: those of MI300 read as Hopper's."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 4))
    nvidia = capabilities(GPU)
    assert nvidia.matrix_units().slowdown > 1
    assert nvidia.products_leave_in_fp32()
    assert nvidia.builtin_profile() == "cuda-hopper"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    amd = capabilities(GPU)
    assert amd.matrix_units() == TensorCores()
    assert not amd.products_leave_in_fp32()
    assert amd.builtin_profile() is None


# -- plans -----------------------------------------------------------------------------------------


def precisions(level: str = "O1", dtype: Any = "auto", policy: Policy | None = None) -> list[str]:
    """Of the products of a small model."""
    net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    net = mpcompile(net, emit="eager", strict=True, level=level, dtype=dtype, policy=policy)
    net(torch.randn(16, 64)).sum().backward()
    (plan,) = compiled_plans(net)
    return [node.precision for node in plan.nodes if node.op == "aten::linear"]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("profile", ["none", ""])
def test_products_stay_in_fp32_without_units(
    level: str, profile: str, cpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(store.VARIABLE, profile)
    monkeypatch.setattr(store, "_from_cache", lambda device: None)
    for flags in (X86, AVX512, ARM, UNKNOWN):
        cpu(flags)
        assert precisions(level) == ["FULL", "FULL"]


def test_what_is_promised_runs_low_without_a_profile(cpu: Callable[..., None]) -> None:
    for flags in (AVX512_BF16, AMX, ARM_BF16):
        cpu(flags)
        assert precisions() == ["LOW", "LOW"]


def test_a_profile_overrules_a_data_sheet(
    cpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A measured gain counts where there are no units, too."""
    cpu(X86)
    monkeypatch.setenv(
        store.VARIABLE, str(Path(store.__file__).parent / "builtin" / "cpu-avx512-bf16.json")
    )
    net = nn.Linear(1024, 1024)
    mpcompile(net, emit="eager", strict=True)
    net(torch.randn(2048, 1024)).sum().backward()
    assert compiled_plans(net)[0].counts()["LOW"] == 1


def test_who_asks_for_it_gets_it(cpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(store.VARIABLE, "")
    cpu(X86)
    assert precisions(dtype=torch.bfloat16) == ["LOW", "LOW"]
    assert precisions(dtype=torch.float16) == ["LOW", "LOW"]
    assert precisions("O3") == ["LOW", "LOW"]
    assert precisions(policy=Policy(modules={"^0$": "low"})) == ["LOW", "FULL"]


def told(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What is said to users who did not ask for a log of all that happens."""
    return [record for record in caplog.records if record.name == "mpcompile"]


def test_it_is_said_once_and_in_one_line(
    cpu: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    cpu(X86)
    with caplog.at_level(logging.INFO, "mpcompile"):
        precisions(dtype=torch.bfloat16)
        mpcompile(nn.LayerNorm(8), emit="eager")(torch.randn(4, 8))  # has no product
        assert not told(caplog)
        precisions()
        precisions("O2")
    (record,) = told(caplog)
    text = record.getMessage()
    assert "stay in FP32" in text
    assert "mpcompile profile" in text
    assert "\n" not in text


def test_nothing_is_said_where_products_run_low(
    cpu: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    cpu(AVX512_BF16)
    with caplog.at_level(logging.INFO, "mpcompile"):
        precisions()
    assert not told(caplog)


def test_an_rnn_that_the_library_refuses_runs_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """As oneDNN does in BF16 on a CPU with AVX2."""

    def refuse(*args: Any) -> None:
        raise RuntimeError(
            "could not create a primitive descriptor for the LSTM forward propagation primitive"
        )

    monkeypatch.setattr(kernels, "_answers", {})
    layer = mpcompile(nn.LSTM(16, 16), emit="eager", strict=True, dtype=torch.bfloat16)
    lstm_row = TABLE["aten::lstm"]
    refused = replace(lstm_row, recurrent=Recurrent(4, refuse))  # type: ignore[arg-type]
    monkeypatch.setitem(TABLE, "aten::lstm", refused)
    layer(torch.randn(3, 2, 16))[0].sum().backward()
    (plan,) = compiled_plans(layer)
    (lstm,) = (node for node in plan.nodes if node.name == "lstm")
    assert lstm.precision == "FULL"
    assert lstm.reason == "no bf16 kernel on cpu"


PROGRAM = """
import json, torch
from benchmarks.models import Tagger, resnet18
from mpcompile import compiled_plans, mpcompile
from mpcompile.demo.gpt import GPT, GPTConfig
from mpcompile.rules.table import TABLE

tokens = torch.randint(0, 256, (2, 32))
cases = [
    (GPT(GPTConfig(layers=2)), tokens, tokens),
    (resnet18(), torch.randn(2, 3, 64, 64), torch.zeros(2, dtype=torch.long)),
    (Tagger(), tokens, tokens % 16),
]
for model, *inputs in cases:
    for level in ("O1", "O2"):
        loss = mpcompile(model, emit="eager", strict=True, level=level)(*inputs)
        (loss[0] if isinstance(loss, tuple) else loss).sum().backward()
    found = [n for plan in compiled_plans(model) for n in plan.nodes]
    products = [n for n in found if n.op in TABLE and TABLE[n.op].product]
    print(json.dumps([[n.precision for n in products], len(found)]))
"""


@pytest.mark.slow("processes that are told to be other machines")
@pytest.mark.sampled(2)
@pytest.mark.skipif(not torch.cpu.get_capabilities().get("avx2"), reason="told so, x86 is AVX2")
@pytest.mark.parametrize("profile", ["none", ""])
def test_models_on_a_cpu_told_to_be_avx2(profile: str, tmp_path: Path) -> None:
    environment = {
        "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", store.VARIABLE: profile,
        "XDG_CACHE_HOME": str(tmp_path),
    }  # fmt: skip
    run = python("-c", PROGRAM, **environment)
    for line in run.stdout.splitlines():
        products, _ = json.loads(line)
        assert products
        assert set(products) == {"FULL"}
    assert run.stderr.count("stay in FP32") == 1


# -- accumulation ----------------------------------------------------------------------------------

SETTINGS = """
import torch
torch.backends.cuda.is_built = lambda: True
matmul = torch.backends.cuda.matmul
read = lambda: (matmul.allow_fp16_reduced_precision_reduction,
                matmul.allow_bf16_reduced_precision_reduction)
before = read()
import mpcompile
assert read() == before == (True, True), "an import sets nothing"
{ask}
assert read() == (False, False), read()
"""


@pytest.mark.slow("processes that are told to be other machines")
@pytest.mark.parametrize(
    "ask",
    [
        "mpcompile.mpcompile(torch.nn.Linear(8, 8))",
        'torch.compile(torch.nn.Linear(8, 8), backend="mpcompile")',
    ],
)
def test_sums_are_fp32_before_anything_is_compiled(ask: str) -> None:
    python("-c", SETTINGS.format(ask=ask))


@pytest.mark.parametrize(
    ("low", "name"),
    [
        (torch.float16, "allow_fp16_reduced_precision_reduction"),
        (torch.bfloat16, "allow_bf16_reduced_precision_reduction"),
    ],
)
def test_who_allows_low_sums_again_is_told(
    low: torch.dtype, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Settings:
        allow_fp16_reduced_precision_reduction = False
        allow_bf16_reduced_precision_reduction = False

    monkeypatch.setattr(torch.backends.cuda, "matmul", Settings)
    check_accumulation(GPU, low)
    setattr(Settings, name, True)
    with pytest.warns(MPCompileWarning, match=name):
        check_accumulation(GPU, low)
