"""What else is done to a model that mpcompile() compiled: it is within what somebody compiles with
torch.compile, it is cast, or traced for TorchScript.
"""

import copy

import pytest
import torch
from compare import assert_near
from torch import Tensor, nn

from mpcompile import MPCompileError, compiled_plans, mpcompile


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())


def both() -> tuple[nn.Module, nn.Module]:
    net, reference = Net(), Net()
    reference.load_state_dict(net.state_dict())
    return mpcompile(net, dtype=torch.float16, emit="aot_eager"), reference


def test_compiled_once_more() -> None:
    """Dynamo would trace through it, and nothing would be left of us."""
    net, reference = both()
    outer = torch.compile(net, backend="aot_eager")
    x = torch.randn(4, 16)
    for _ in range(2):
        outer(x).sum().backward()
        reference(x).sum().backward()
    (plan,) = compiled_plans(net)
    assert [n.op for n in plan.nodes if n.precision == "LOW"].count("aten::linear") == 2
    for p, q in zip(net.parameters(), reference.parameters(), strict=True):
        assert_near(p.grad, q.grad, "gradient", 1e-2)


def test_as_one_graph_it_can_not_be() -> None:
    net, _ = both()
    outer = torch.compile(net, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compiled this module by itself"):
        outer(torch.randn(4, 16))


def test_within_a_function_of_ours_it_is_a_part_of_the_graph() -> None:
    net, _ = both()
    whole = mpcompile(lambda x: net(x) * 2, dtype=torch.float16, emit="aot_eager", fullgraph=True)
    whole(torch.randn(4, 16))
    assert compiled_plans(net) == []
    assert len(compiled_plans(whole)) == 1


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_cast_behind_the_first_call_is_refused_as_before_it(
    dtype: torch.dtype, level: str
) -> None:
    model = mpcompile(net(), level=level, dtype=torch.float16, emit="eager", strict=True)
    x = torch.randn(4, 8)
    before = model(x).detach()
    for _ in range(2):
        model.to(dtype)
        with pytest.raises(MPCompileError, match=r"cast after mpcompile.*deepcopy\(model\)\.to"):
            model(x.to(dtype))
    plain = copy.deepcopy(model)  # the way out that the message names
    assert plain(x.to(dtype)).dtype is dtype
    model.float()
    torch.testing.assert_close(model(x), before, rtol=2e-2, atol=2e-2)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
@pytest.mark.filterwarnings("ignore:`torch.jit.trace_method")
def test_torchscript_traces_the_plain_model() -> None:
    """Before the first call and after it, by itself and inside of another module. (torch's own
    check of a trace compares with the compiled model, and would warn of its rounding.)
    """
    plain = net()
    model = mpcompile(copy.deepcopy(plain), dtype=torch.float16, emit="eager", strict=True)
    function = mpcompile(lambda x: x @ x.t(), dtype=torch.float16, emit="eager", strict=True)
    x = torch.randn(4, 8)
    for _ in range(2):
        for module in (model, nn.Sequential(model)):
            traced = torch.jit.trace(module, x, check_trace=False)
            torch.testing.assert_close(traced(x), plain(x), rtol=0, atol=0)
        traced = torch.jit.trace(function, x, check_trace=False)
        torch.testing.assert_close(traced(x), x @ x.t(), rtol=0, atol=0)
        model(x).sum().backward()
        function(x)
