"""Around an RNN of which nothing runs low, only what gains by it is compiled."""

import copy

import pytest
import torch
from miniature import pieces_compiled
from torch import Tensor, nn

from mpcompile import Policy, compiled_plans, mpcompile

pytestmark = [
    pytest.mark.slow("compiles by Inductor"),
    pytest.mark.usefixtures("own_inductor_cache"),
]

IN_FP32 = Policy(modules={".*": "fp32"})
TIME, BATCH, WIDTH = 4, 8, 8


class Chained(nn.Module):
    """An LSTM, and after it three elementwise operators over `wide` copies of its results."""

    def __init__(self, wide: int, drops: float = 0.0) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.drops = nn.Dropout(drops) if drops else nn.Identity()
        self.lstm = nn.LSTM(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.linspace(0.5, 1, wide))

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(self.before(x))
        states = self.drops(states)
        return (states.unsqueeze(-1) * self.weight).tanh().sigmoid().sum()


# Each operator writes 4 * 8 * 8 * wide FP32 numbers; from 1 MiB on it gains.
LEAST = (1 << 20) // (4 * TIME * BATCH * WIDTH) // 3 + 1


@pytest.mark.parametrize(("wide", "pieces"), [(LEAST, 1), (LEAST - 1, 0)])
def test_only_the_piece_that_gains_is_compiled(wide: int, pieces: int) -> None:
    torch.manual_seed(3)
    net = Chained(wide)
    exact = copy.deepcopy(net).double()
    x = torch.randn(TIME, BATCH, WIDTH)
    mpcompile(net, policy=IN_FP32, dtype=torch.bfloat16)
    result = net(x)
    result.backward()
    assert pieces_compiled() == pieces
    (plan,) = compiled_plans(net)
    assert not plan.counts().get("LOW")
    expected = exact(x.double())
    expected.backward()
    torch.testing.assert_close(result, expected.float(), rtol=1e-5, atol=0)
    for (name, p), q in zip(net.named_parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(
            p.grad, q.grad.float(), rtol=1e-4, atol=1e-4 * q.grad.abs().max().item(), msg=name
        )


def test_a_dropout_after_an_rnn_is_torchs_own_beside_a_piece_that_is_compiled() -> None:
    """So it drops what eager PyTorch drops, and the gradient has the same zeros."""
    torch.manual_seed(3)
    net = Chained(LEAST, drops=0.4)
    eager = copy.deepcopy(net)
    mpcompile(net, policy=IN_FP32, dtype=torch.bfloat16)
    for batch in (BATCH, BATCH, 2 * BATCH):  # the last with sizes that are symbols
        x = torch.randn(TIME, batch, WIDTH)
        gradients = []
        for run in (eager, net):
            torch.manual_seed(4)
            given = x.clone().requires_grad_()
            result = run(given)
            result.backward()
            gradients.append((result.detach(), given.grad))
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-4)
    assert pieces_compiled() > 0


def test_sizes_that_are_symbols_get_no_guard_from_it() -> None:
    net = Chained(2 * LEAST)
    mpcompile(net, policy=IN_FP32, dtype=torch.bfloat16, dynamic=True)
    for batch in (5, 3, 40):
        x = torch.randn(TIME, batch, WIDTH)
        expected = net.forward(x)
        torch.testing.assert_close(net(x), expected, rtol=1e-5, atol=0)
    assert len(compiled_plans(net)) == 1
