"""What mpcompile() compiled, within what somebody compiles with torch.compile."""

from __future__ import annotations

import pytest
import torch
from compare import assert_near
from torch import Tensor, nn

from mpcompile import compiled_plans, mpcompile


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x).relu())
        return out


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
        assert p.grad is not None
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
