"""LSTM, GRU and RNN: one low node on the device's own kernel."""

import pytest
import torch
from compare import check, leaf
from torch import nn

from mpcompile import Policy, compiled_plans, mpcompile


class Recurrent(nn.Module):
    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Linear(8, 16), layer, nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, _ = self.layer(self.embed(x))
        return self.head(h)


LAYERS = {
    "lstm": lambda: nn.LSTM(16, 16, num_layers=2),
    "gru": lambda: nn.GRU(16, 16, batch_first=True),
    "rnn_tanh": lambda: nn.RNN(16, 8, bidirectional=True),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_recurrent_layer_is_one_low_node(name: str, dtype: torch.dtype) -> None:
    model = Recurrent(LAYERS[name]())
    options = {"dtype": dtype, "level": "O2", "emit": "aot_eager"}
    result = check(model, leaf(5, 3, 8), low=["linear", name], **options)
    assert result.ops("LOW").count(name) == 1


@pytest.mark.parametrize("sizes", [(1, 1), (16, 32), (40, 64)])
def test_asking_for_a_recurrent_kernel_is_safe(sizes: tuple[int, int]) -> None:
    """The probe once handed oneDNN weights that did not fit together: it corrupted the heap."""
    model = nn.LSTM(*sizes, num_layers=2, proj_size=0)
    check(model, leaf(3, 2, sizes[0]), dtype=torch.bfloat16, low=["lstm"])


class InRegion(Recurrent):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


@pytest.mark.parametrize("around", [False, True], ids=["plain", "caller's autocast"])
@pytest.mark.parametrize("kind", [Recurrent, InRegion])
def test_where_nothing_is_low_an_rnn_runs_in_fp32(kind: type[Recurrent], around: bool) -> None:
    """Not compiled then, nor under anybody's autocast, for which the layer makes low states."""
    ours, twin = kind(nn.LSTM(16, 16)), Recurrent(nn.LSTM(16, 16))
    twin.load_state_dict(ours.state_dict())
    policy = Policy(full={"lstm", "linear"})
    mpcompile(ours, dtype=torch.bfloat16, policy=policy, strict=True)
    x = torch.randn(5, 3, 8)
    with torch.autocast("cpu", torch.bfloat16, enabled=around):
        out = ours(x)
    out.sum().backward()
    assert "LOW" not in compiled_plans(ours)[0].counts()
    wanted = twin(x)
    wanted.sum().backward()
    low = kind is InRegion  # a program with a region of its own returns it so: one cast, at the end
    torch.testing.assert_close(out, wanted.bfloat16() if low else wanted)
    for mine, theirs in zip(ours.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def traced(model: nn.Module) -> list[bool]:
    """Whether each graph that torch.compile makes of the model holds a recurrent layer."""
    found: list[bool] = []

    def backend(gm: torch.fx.GraphModule, _: object) -> object:
        found.append(any(n.target is torch.lstm for n in gm.graph.nodes))
        return gm.forward

    torch.compile(model, backend=backend)(torch.randn(5, 3, 8))
    return found


@pytest.mark.slow("a matrix of trainings against FP64")
def test_only_our_models_have_their_recurrent_layers_traced() -> None:
    """torch.compile breaks the graph at one; its users rely on that, for it would unroll them."""
    ours, theirs = Recurrent(nn.LSTM(16, 16)), Recurrent(nn.LSTM(16, 16))
    before = traced(theirs)
    mpcompile(ours, dtype=torch.bfloat16, emit="eager", strict=True)
    for length in (5, 6):
        ours(torch.randn(length, 3, 8))
        torch._dynamo.reset()  # forgets who wants to know when it compiles
        assert traced(theirs) == before
        assert True not in before
        assert not torch._dynamo.config.allow_rnn
    assert [plan.counts()["LOW"] > 0 for plan in compiled_plans(ours)] == [True, True]


def test_within_another_compiled_function_a_recurrent_model_is_still_ours() -> None:
    ours = mpcompile(Recurrent(nn.LSTM(16, 16)), dtype=torch.bfloat16, emit="eager", strict=True)

    @torch.compile(backend="eager")
    def outer(x: torch.Tensor) -> torch.Tensor:
        return ours(x) + 1

    x = torch.randn(5, 3, 8)
    found = outer(x)
    (plan,) = compiled_plans(ours)
    assert [node.precision for node in plan.nodes if node.op == "aten::lstm"] == ["LOW"]
    torch.testing.assert_close(found, ours(x) + 1)


def test_a_compilation_that_fails_leaves_the_setting_as_it_was() -> None:
    class Breaks(Recurrent):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            torch._dynamo.graph_break()
            return out

    model = mpcompile(Breaks(nn.LSTM(16, 16)), emit="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        model(torch.randn(5, 3, 8))
    assert not torch._dynamo.config.allow_rnn


@pytest.mark.slow("a matrix of trainings against FP64")
def test_the_plan_of_an_lstm_does_not_grow_with_its_steps() -> None:
    """Unrolled by torch.compile, 200 steps of two layers would be some thousands of nodes."""
    model = Recurrent(nn.LSTM(16, 16, num_layers=2))
    mpcompile(model, dtype=torch.float16, strict=True, emit="aot_eager")
    for steps in (5, 200):
        model(torch.randn(steps, 4, 8)).mean().backward()
    few, many = compiled_plans(model)
    assert [node.op for node in many.nodes] == [node.op for node in few.nodes]
