"""emit: RNNs stay fused, of every kind."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from miniature import (
    Recurrent,
    assert_same,
    aten,
    compiled,
    leaf,
    parameters_of,
    pieces_compiled,
    results_and_grads,
    rnns_in,
)
from module_of import module_of
from torch import fx, nn

pytestmark = [
    pytest.mark.inside,
    pytest.mark.usefixtures("own_inductor_cache", "rnns_in_graphs"),
    pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning"),
]

KINDS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "lstm": (nn.LSTM, {}),
    "lstm 2 batch first": (nn.LSTM, {"num_layers": 2, "batch_first": True}),
    "lstm both ways": (nn.LSTM, {"bidirectional": True, "bias": False}),
    "lstm projection": (nn.LSTM, {"proj_size": 3}),
    "gru 2 both ways": (nn.GRU, {"num_layers": 2, "bidirectional": True}),
    "tanh batch first": (nn.RNN, {"nonlinearity": "tanh", "batch_first": True}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
}
# Inductor sees no other difference than layouts, so its costly half is a sample.
KINDS_BY_HOW = [("aot_eager", kind) for kind in KINDS]
KINDS_BY_HOW += [("inductor", "gru 2 both ways")]  # an LSTM is among the low dtypes, below


@pytest.mark.slow_rows("compiles by Inductor")
@pytest.mark.parametrize(("how", "kind"), KINDS_BY_HOW)
def test_rnn(how: str, kind: str) -> None:
    net = Recurrent(*KINDS[kind])
    fast = compiled(net, how)
    assert_same(net, fast, leaf(7, 3, 4), parameters=parameters_of(net))
    assert pieces_compiled() == 2


@pytest.mark.slow_rows("compiles by Inductor")
@pytest.mark.parametrize(
    ("how", "kind", "dtype"),
    [
        ("aot_eager", nn.LSTM, torch.float16),
        ("aot_eager", nn.GRU, torch.bfloat16),
        ("inductor", nn.LSTM, torch.bfloat16),
        ("inductor", nn.GRU, torch.float16),
    ],
)
def test_rnn_in_a_low_dtype(how: str, kind: type[nn.RNNBase], dtype: torch.dtype) -> None:
    """Near FP32, and nearer still to the rewritten graph run op by op."""
    net = Recurrent(kind, {"num_layers": 2, "batch_first": True})
    rewritten = compiled(net, "eager", rnns_in(dtype))
    fast = compiled(net, how, rnns_in(dtype))
    x = leaf(3, 7, 4)
    assert_same(rewritten, fast, x, parameters=parameters_of(net), tolerance=1e-2)
    assert_same(net, fast, x, parameters=parameters_of(net), tolerance=1e-1)


# torch 2.12, on a profiler that has no schedule
@pytest.mark.slow("compiles by Inductor")
@pytest.mark.filterwarnings("ignore:Profiler clears events at the end of each cycle")
def test_rnn_runs_on_the_fused_kernel() -> None:
    """On the one that torch itself uses for a BF16 layer: oneDNN's, where the CPU lets it."""

    def fused_calls(run: Callable[[], object]) -> dict[str, int]:
        run()
        with torch.profiler.profile(acc_events=True) as profile:  # or torch below 2.13 warns
            run()
        events = profile.key_averages()
        return {e.key: e.count for e in events if e.key.startswith("aten::mkldnn_rnn_layer")}

    x = leaf(7, 3, 4)
    net = Recurrent(nn.LSTM, {"num_layers": 2})
    plain = nn.LSTM(4, 5, num_layers=2).bfloat16()
    try:
        wanted = fused_calls(lambda: plain(x.bfloat16())[0].sum().backward())
    except RuntimeError as error:
        pytest.skip(f"torch has no BF16 LSTM here: {error}")
    fast = compiled(net, "inductor", rnns_in(torch.bfloat16))
    assert fused_calls(lambda: results_and_grads(fast, [x], [])) == wanted


def packed(gm: fx.GraphModule) -> None:
    """gru.input -> gru.data, which Dynamo can't trace (yet): all sequences of one length."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.gru.input):
        source, *rest = node.args
        time, batch, _ = source.meta["val"].shape
        with gm.graph.inserting_before(node):
            sizes = gm.graph.call_function(
                aten.full.default, ([time], batch), {"dtype": torch.int64}
            )
            data = gm.graph.call_function(aten.flatten.using_ints, (source, 0, 1))
            node.args = (data, sizes, *rest[:-1])
            node.target = aten.gru.data
        (output,) = (user for user in node.users if user.args[1] == 0)
        with gm.graph.inserting_after(output):
            padded = gm.graph.call_function(aten.unflatten.int, (output, 0, [time, batch]))
        output.replace_all_uses_with(padded, delete_user_cb=lambda user, p=padded: user is not p)


def test_packed_sequences() -> None:
    net = Recurrent(nn.GRU, {})
    fast = compiled(net, "aot_eager", packed)
    assert_same(net, fast, leaf(7, 3, 4), parameters=parameters_of(net))
    assert pieces_compiled() == 2


def stack(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Three RNNs: the second follows at once, the third starts from what the first computed."""
    skip = self.gate(x)
    a, (h, c) = self.one(skip)
    b, _ = self.two(a, (h, c))
    state = self.gate(h).tanh()  # the gate's weight is used on both sides
    d, _ = self.three(b + skip, state)
    return d * skip


@pytest.mark.slow_rows("compiles by Inductor")
@pytest.mark.skipif(
    torch.__version__ < "2.13",
    reason="Dynamo before 2.13 gives the state of an RNN in a graph a dimension too many",
)
@pytest.mark.parametrize(
    ("how", "dtype"), [("aot_eager", torch.float32), ("inductor", torch.bfloat16)]
)
def test_stacked_rnns(how: str, dtype: torch.dtype) -> None:
    net = module_of(
        stack, one=nn.LSTM(4, 4), two=nn.LSTM(4, 4), three=nn.GRU(4, 4), gate=nn.Linear(4, 4)
    )
    reference = compiled(net, "eager", rnns_in(dtype))
    fast = compiled(net, how, rnns_in(dtype))
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    assert_same(reference, fast, leaf(6, 2, 4), parameters=parameters_of(net), tolerance=tolerance)


@pytest.mark.slow("compiles by Inductor")
def test_dynamic_sizes() -> None:
    """One compilation serves several batch sizes (Dynamo itself makes the time static)."""
    net = Recurrent(nn.LSTM, {"batch_first": True})

    def function(x: torch.Tensor) -> torch.Tensor:
        h = net.before(x)
        output, _ = net.rnn(torch.cat([h, h]))  # no piece sees the batch itself, only its double
        return net.after(output).relu()

    fast = compiled(function, "inductor", rnns_in(torch.bfloat16), dynamic=True)
    reference = compiled(function, "eager", rnns_in(torch.bfloat16))
    for batch in (3, 5, 8):
        assert_same(
            reference, fast, leaf(batch, 7, 4), parameters=parameters_of(net), tolerance=2e-2
        )
    assert pieces_compiled() == 2


def test_rnn_first_and_last() -> None:
    """No pieces at all: the graph is the RNN; and a result that nobody takes."""
    rnn = nn.GRU(4, 4)

    def function(x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return rnn(x, h)[0]

    fast = compiled(function, "inductor")
    assert_same(function, fast, leaf(5, 2, 4), leaf(1, 2, 4), parameters=parameters_of(rnn))
    assert pieces_compiled() == 0


@pytest.mark.slow("compiles by Inductor")
def test_dropout_inside_an_rnn_is_the_kernel_s() -> None:
    rnn = nn.LSTM(4, 4, 2, dropout=0.5)
    fast = compiled(lambda x: rnn(x)[0] * 1, "inductor")
    x = torch.randn(5, 2, 4)
    torch.manual_seed(1)
    expected = rnn(x)[0]
    torch.manual_seed(1)
    torch.testing.assert_close(fast(x), expected)
