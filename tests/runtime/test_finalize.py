"""What `finalize` exports computes what the compiled model does, and needs no mpcompile."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import python
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional as F

from mpcompile import MPCompileError, MPCompileWarning, Policy, finalize, mpcompile

BF16 = torch.bfloat16


class Attends(nn.Module):
    """A block with casts, an FP32 region, a tied head, a buffer that it writes, and a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.qkv = nn.Linear(16, 48)
        self.norm = nn.LayerNorm(16)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, tokens: torch.Tensor, *, scale: dict[str, Any]) -> dict[str, torch.Tensor]:
        self.calls.add_(1)
        x = self.embed(tokens)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.drop(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        with torch.autocast("cpu", enabled=False):
            x = x.float() * scale["by"]
        if tokens.shape[1] > 4:
            x = x - x.mean(1, keepdim=True)
        return {"logits": self.head(x), "mean": x.mean()}


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)
    )


def transformer() -> nn.Module:
    # With another activation torch has one operator for the whole layer, which it doesn't export.
    return nn.TransformerEncoderLayer(16, 2, 32, activation=F.silu, batch_first=True)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8))


NETS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "a perceptron": (perceptron, (4, 16)),
    "a transformer": (transformer, (2, 5, 16)),
    "a convolutional one": (convolutional, (2, 3, 8, 8)),
}


def error(found: torch.Tensor, true: torch.Tensor) -> float:
    return float(((found.double() - true).norm() / true.norm()).detach())


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("dtype", [torch.float16, BF16])
@pytest.mark.parametrize("name", NETS)
def test_the_program_computes_what_the_compiled_model_does(
    name: str, dtype: torch.dtype, level: str
) -> None:
    make, shape = NETS[name]
    model, x = make(), torch.randn(shape)
    true = copy.deepcopy(model).double().eval()(x.double())
    program = finalize(model, x, dtype=dtype, level=level)
    found = program.module()(x)
    assert found.dtype is torch.float32
    with torch.no_grad():
        compiled = mpcompile(model.eval(), dtype=dtype, level=level, emit="eager")(x)
    torch.testing.assert_close(found, compiled, rtol=0, atol=0)
    assert 0 < error(found, true) < 2 * torch.finfo(dtype).eps


def test_weights_of_products_are_low_and_those_of_norms_are_not() -> None:
    program = finalize(perceptron(), torch.randn(4, 16), dtype="bf16")
    low = {"0.weight", "0.bias", "3.weight", "3.bias"}
    dtypes = {name: value.dtype for name, value in program.state_dict.items()}
    assert {name for name, dtype in dtypes.items() if dtype is BF16} == low
    assert {name for name, dtype in dtypes.items() if dtype is torch.float32} == {
        "1.weight", "1.bias"
    }  # fmt: skip
    assert not any(value.requires_grad for value in program.state_dict.values())


def attends() -> tuple[Attends, dict[str, Any], ExportedProgram]:
    torch.manual_seed(0)
    model = Attends()
    given = {"tokens": torch.randint(0, 32, (2, 6)), "scale": {"by": torch.tensor(0.5)}}
    shapes = {"tokens": {0: Dim.AUTO, 1: Dim.AUTO}, "scale": {"by": None}}
    return model, given, finalize(model, dtype="bf16", dynamic_shapes=shapes, **given)


@pytest.mark.slow("compiles several models")
def test_arguments_results_and_sizes_are_the_models() -> None:
    model, given, program = attends()
    for shape in ((2, 6), (3, 9)):
        given["tokens"] = torch.randint(0, 32, shape)
        found = program.module()(**given)
        true = copy.deepcopy(model).eval()(**given)
        assert found.keys() == true.keys()
        torch.testing.assert_close(found, true, rtol=0.05, atol=0.05)
    with pytest.raises(Exception, match="size"):  # where the model takes the other branch
        program.module()(**{**given, "tokens": torch.randint(0, 32, (2, 3))})


@pytest.mark.slow("compiles several models")
def test_the_model_stays_as_it_is_and_the_program_too() -> None:
    model, given, program = attends()
    assert model.training
    assert model.calls == 0
    assert all(p.dtype is torch.float32 and p.requires_grad for p in model.parameters())
    before = program.module()(**given)["logits"].clone()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    torch.testing.assert_close(program.module()(**given)["logits"], before, rtol=0, atol=0)


@pytest.mark.slow("compiles several models")
def test_a_tied_weight_is_stored_once_in_each_dtype() -> None:
    program = attends()[2]
    tied = [v for v in program.state_dict.values() if v.shape == (32, 16)]
    held = {(v.dtype, v.untyped_storage().data_ptr()) for v in tied}
    assert sorted(str(dtype) for dtype, _ in held) == ["torch.bfloat16", "torch.float32"]


def test_a_model_that_trained_and_evaluates_is_exported_with_its_options() -> None:
    model, x = perceptron(), torch.randn(4, 16)
    mpcompile(model, dtype="fp16", emit="eager", policy=Policy(modules={"^3$": "fp32"}))
    model(x).square().mean().backward()
    with torch.no_grad():
        expected = model(x)
        program = finalize(model, x)
        torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    torch.testing.assert_close(program.module()(x), expected, rtol=0, atol=0)
    assert program.state_dict["0.weight"].dtype is torch.float16
    assert program.state_dict["3.weight"].dtype is torch.float32


def test_values_that_are_compared_are_copied_by_torchs_operator() -> None:
    class Top(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = F.gelu(self.lin(x))
            return h.masked_fill(h < h.topk(3, -1).values[..., -1:], 0.0)

    x = torch.randn(4, 16)
    program = finalize(Top().eval(), x, dtype=torch.bfloat16)
    assert torch.ops.aten.clone.default in {node.target for node in program.graph.nodes}
    assert int((program.module()(x) != 0).sum()) >= 12


def test_weights_that_are_low_already_stay_so() -> None:
    model, x = perceptron().to(BF16), torch.randn(4, 16, dtype=BF16)
    program = finalize(model, x)
    assert all(v.dtype is BF16 for v in program.state_dict.values())
    found = program.module()(x)
    assert found.dtype is BF16
    true = copy.deepcopy(model).double()(x.double())
    assert 0 < error(found, true) < 2 * torch.finfo(BF16).eps


LOADS = """
import sys
sys.modules["mpcompile"] = None
import torch
given, expected = torch.load(sys.argv[2])
found = torch.export.load(sys.argv[1]).module()(given)
torch.testing.assert_close(found, expected, rtol=0, atol=0)
"""


@pytest.mark.slow("compiles several models")
def test_a_saved_program_loads_without_mpcompile(tmp_path: Path) -> None:
    x = torch.randn(4, 16)
    program = finalize(perceptron(), x, dtype="bf16")
    torch.export.save(program, tmp_path / "net.pt2")
    torch.save((x, program.module()(x)), tmp_path / "given.pt")
    python("-c", LOADS, "net.pt2", "given.pt", cwd=tmp_path)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_onnx_takes_the_program() -> None:
    pytest.importorskip("onnxscript")
    x = torch.randn(4, 16)
    exported = torch.onnx.export(finalize(perceptron(), x, dtype="fp16"), (x,), dynamo=True)
    weights = exported.model.graph.initializers
    assert {weights["0.weight"].dtype.name, weights["1.weight"].dtype.name} == {"FLOAT16", "FLOAT"}


def test_what_cannot_be_done_is_refused_by_name() -> None:
    x = torch.randn(4, 16)
    with pytest.raises(MPCompileError, match="O0"):
        finalize(perceptron(), x, level="O0")
    with pytest.raises(MPCompileError, match="unknown dtype 'int8'"):
        finalize(perceptron(), x, dtype="int8")
    with pytest.raises(MPCompileError, match="'precision': the low dtype is dtype="):
        finalize(perceptron(), x, precision="bf16")
    with pytest.raises(MPCompileError, match="matches no module"):
        finalize(perceptron(), x, policy=Policy(modules={"encoder": "fp32"}))
    with pytest.raises(MPCompileError, match=r"give an nn\.Module"):
        finalize(torch.sin, x)  # type: ignore[arg-type]
    with pytest.warns(MPCompileWarning, match="no node 'liner'"):
        finalize(perceptron(), x, dtype="bf16", policy=Policy(nodes={"liner": "fp32"}))
    model = perceptron()
    model.lock = __import__("threading").Lock()  # type: ignore[assignment]
    with pytest.raises(MPCompileError, match="can't be copied"):
        finalize(model, x)
