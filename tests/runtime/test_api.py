"""The front door: what comes back, what is refused, and that nothing about the module changes."""

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from block_net import Net
from module_of import module_of
from torch import nn

from mpcompile import MPCompileError, MPCompileWarning, Policy, compiled_plans, explain, mpcompile
from mpcompile.errors import in_one_line
from mpcompile.torch_inside.version import check_torch_version, warn_of_version


def run(model: Any, **kwargs: Any) -> tuple[torch.Tensor, list[Any]]:
    compiled = mpcompile(model, emit="eager", strict=True, **kwargs)
    out = compiled(torch.randn(4, 8))
    out.square().sum().backward()
    return out, compiled_plans(compiled)


def precisions(plan: Any) -> dict[str, str]:
    return {n.name: n.precision for n in plan.nodes if n.rule not in ("cast", "scale")}


# -- the module stays the module ------------------------------------------------------------------


def test_returns_the_same_module_with_the_same_state() -> None:
    model = Net()
    keys = list(model.state_dict())
    assert mpcompile(model, emit="eager") is model
    model(torch.randn(4, 8))
    assert list(model.state_dict()) == keys
    assert all(p.dtype is torch.float32 for p in model.parameters())


def test_copies_and_pickles_are_plain_fp32_models() -> None:
    model = mpcompile(Net(), dtype=torch.float16, emit="eager")
    x = torch.randn(4, 8)
    low = model(x)
    restored = torch.load(_saved(model), weights_only=False)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), restored):
        exact = twin(x)
        assert not torch.equal(exact, low)
        torch.testing.assert_close(exact, low, rtol=1e-2, atol=1e-2)
        mpcompile(twin, dtype=torch.float16, emit="eager")
        torch.testing.assert_close(twin(x), low, rtol=0, atol=0)


def _saved(model: nn.Module) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return buffer


def test_a_function_comes_back_compiled() -> None:
    weight = torch.randn(4, 8, requires_grad=True)

    @mpcompile(dtype=torch.float16, emit="eager", strict=True)
    def head(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight)

    head(torch.randn(2, 8)).sum().backward()
    assert weight.grad is not None
    assert [n.precision for n in compiled_plans(head)[0].nodes if n.op == "aten::linear"] == ["LOW"]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_model_that_writes_to_a_half_input_is_refused(mode: Any) -> None:
    """In it, `x.float()` would be the widened input itself, and the caller's is not written."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        before = x.float()
        x.mul_(2)
        return m.fc(x) + before

    model = module_of(forward, fc=nn.Linear(8, 8))
    mpcompile(model, dtype=torch.bfloat16, emit="eager", strict=True)
    with mode():
        model(torch.randn(4, 8))
        for _ in range(2):
            with pytest.raises(MPCompileError, match="writes to an input in half precision"):
                model(torch.randn(4, 8, dtype=torch.bfloat16))


def test_half_inputs_are_found_at_any_depth() -> None:
    def nested(m: Any, n: int, pair: Any, *, more: list[torch.Tensor]) -> torch.Tensor:
        return m.fc(pair[1]["x"]) * n + m.fc(more[0])

    model = module_of(nested, fc=nn.Linear(8, 4))
    mpcompile(model, dtype=torch.float16, emit="eager", strict=True)
    x, y = torch.randn(2, 8).half(), torch.randn(2, 8).half()
    out = model(2, (1, {"x": x}), more=[y])
    wanted = model.forward(2, (1, {"x": x.float()}), more=[y.float()])
    torch.testing.assert_close(out, wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.slow("compiles several models")
def test_many_models_of_one_class_do_not_exhaust_the_recompile_limit() -> None:
    for _ in range(torch._dynamo.config.recompile_limit + 2):
        _, plans = run(Net())
        assert len(plans) == 1


# -- levels, dtypes, policy -----------------------------------------------------------------------


def test_levels() -> None:
    names = ("linear", "relu", "layer_norm", "linear_1", "softmax")
    rows = {}
    for level in ("O1", "O2", "O3"):
        out, (plan,) = run(Net(), level=level, dtype=torch.float16)
        assert out.dtype is torch.float32
        rows[level] = [precisions(plan)[n] for n in names]
    assert rows == {
        "O1": ["LOW", "FULL", "FULL", "LOW", "FULL"],  # relu feeds a norm only: free in FP32
        "O2": ["LOW", "LOW", "FULL", "LOW", "FULL"],  # stored low
        "O3": ["LOW", "LOW", "LOW", "LOW", "LOW"],
    }


def test_o0_is_the_fp32_program() -> None:
    model = Net()
    x = torch.randn(4, 8)
    expected = model(x)
    compiled = mpcompile(model, level="O0", emit="eager")
    torch.testing.assert_close(compiled(x), expected, rtol=0, atol=0)
    (plan,) = compiled_plans(compiled)
    assert (plan.level, plan.dtype, plan.nodes, plan.casts) == ("O0", "float32", (), 0)
    assert plan.left == 'level="O0" was asked for'


# Words of torch, Lightning and Hugging Face, too.
DTYPES: dict[Any, str] = {
    **dict.fromkeys((torch.float16, "float16", "fp16", "half", "16-mixed", "FP16"), "float16"),
    **dict.fromkeys((torch.bfloat16, "auto", "bf16", "bf16-mixed"), "bfloat16"),
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype: Any) -> None:
    _, (plan,) = run(Net(), dtype=dtype)
    assert plan.dtype == DTYPES[dtype]
    short = {"float16": "f16", "bfloat16": "bf16"}[plan.dtype]
    assert next(n.planned for n in plan.nodes if n.name == "linear") == f"{short}[4, 16]"


def test_policy_precedence_is_node_then_module_then_op() -> None:
    policy = Policy(low=["linear"], modules={"fc": "fp32", "fc2": "keep"}, nodes={"linear": "low"})
    _, (plan,) = run(Net(), policy=policy)
    assert precisions(plan)["linear"] == "LOW"
    assert precisions(plan)["linear_1"] == "KEEP"  # the last matching regex


def test_a_policy_for_a_module_is_for_all_that_is_in_it() -> None:
    """Also where the regex ends with the module's own name."""
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 4))
    policy = Policy(modules={r"^0$": "fp32", r"^0\.1$": "low"})
    _, (plan,) = run(model, policy=policy, dtype=torch.float16)
    decided = {n.module: n.precision for n in plan.nodes if n.op == "aten::linear"}
    assert decided == {"0.0": "FULL", "0.1": "LOW", "1": "LOW"}


# -- what bad input gets --------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["precision", "mixed_precision", "amp", "fp16"])
def test_others_words_for_dtype_lead_to_it_everywhere(option: str) -> None:
    hint = f"'{option}': the low dtype is dtype="
    backend = torch.compile(Net(), backend="mpcompile", options={option: "bf16"})
    with pytest.raises(Exception, match=f"unknown option {hint}"):
        backend(torch.randn(2, 8))
    with pytest.raises(MPCompileError, match=f"unexpected keyword argument {hint}"):
        explain(Net(), torch.randn(2, 8), **{option: "bf16"})


def test_what_found_no_place_is_said() -> None:
    model = mpcompile(Net(), emit="eager", fuse_head=True)
    with torch.no_grad():
        model(torch.randn(4, 8))  # an evaluation has no loss
    with pytest.warns(MPCompileWarning, match="no cross_entropy in what was compiled: compute the"):
        model(torch.randn(4, 8))


def test_errors_found_while_compiling_come_out_as_they_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MPCOMPILE_PROFILE", str(tmp_path / "none.json"))
    with pytest.raises(MPCompileError, match=r"none\.json"):
        mpcompile(Net(), emit="eager")(torch.randn(4, 8))
    with pytest.raises(MPCompileError, match=r"none\.json"):
        mpcompile(lambda x: x @ x, emit="eager")(torch.randn(4, 4))


def test_what_a_cpp_compiler_said_is_in_the_reason() -> None:
    from torch._inductor.exc import CppCompileError

    said = "/tmp/a.cpp:30:10: fatal error: Python.h: No such file\n   30 | #include <Python.h>"
    error = CppCompileError(["g++", "/tmp/a.cpp"], said)
    assert in_one_line(error) == "CppCompileError: C++ compile error (Python.h: No such file)"
    assert in_one_line(ValueError("a: error: b\nmore")) == "ValueError: a: error: b"


def test_a_model_without_floats_is_refused() -> None:
    steps = nn.Parameter(torch.zeros(1, dtype=torch.int64), requires_grad=False)
    with pytest.raises(MPCompileError, match="no floating-point parameters"):
        mpcompile(module_of(len, steps=steps))


@pytest.mark.parametrize("version", ["2.11.1", "1.13.1+cu117", "unknown"])
def test_torch_below_the_range_is_refused(version: str) -> None:
    with pytest.raises(MPCompileError, match=r"torch>=2\.12"):
        check_torch_version(version)
    with pytest.warns(MPCompileWarning, match=r"supports torch>=2\.12; this is"):
        warn_of_version(version)


@pytest.mark.parametrize(
    "version", ["2.12.0", "2.13.1", "2.14.1+cu130", "2.15.0a0+git1234567", "3.0"]
)
def test_torch_inside_the_range_is_taken(version: str) -> None:
    check_torch_version(version)
    warn_of_version(version)  # pytest makes an error of a warning
