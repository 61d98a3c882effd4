"""emit: what comes out computes what the graph says, whatever compiles it; RNNs stay fused."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from mpcompile.capture.capture import capture
from mpcompile.emit.emitter import emit
from mpcompile.emit.islands import RNN_OPS
from mpcompile.emit.second_backward import noticed
from mpcompile.errors import MPCompileError

aten = torch.ops.aten

# the CPU's eager kernel's own
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")

HOWS = ("eager", "aot_eager", "inductor")
COMPILED = ("aot_eager", "inductor")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture(autouse=True)
def setting(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Caches of our own; RNNs stay in Dynamo's graph."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    with torch._dynamo.config.patch(allow_rnn=True):
        yield


# -- a backend in miniature -----------------------------------------------------------------------


Rewrite = Callable[[fx.GraphModule], None]


def compiled(
    function: Callable[..., Any], how: str, rewrite: Rewrite = lambda gm: None, **kwargs: Any
) -> Callable[..., Any]:
    """`torch.compile` with a backend that captures, rewrites and emits."""
    dynamic = kwargs.pop("dynamic", False)

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with torch._C._DisableAutocast():
            traced = capture(gm, inputs)
        rewrite(traced)
        return emit(traced, inputs, how, **kwargs)

    return torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)


def rnns_in(dtype: torch.dtype) -> Rewrite:
    """The casts our passes would place: RNNs in `dtype`, everything else as it was."""

    def rewrite(gm: fx.GraphModule) -> None:
        for node in gm.graph.nodes:
            if node.target not in RNN_OPS:
                continue
            for value in node.all_input_nodes:
                with gm.graph.inserting_before(node):
                    low = gm.graph.call_function(aten.to.dtype, (value, dtype))
                node.replace_input_with(value, low)
            for result in list(node.users):
                with gm.graph.inserting_after(result):
                    wide = gm.graph.call_function(aten.to.dtype, (result, torch.float32))
                result.replace_all_uses_with(
                    wide, delete_user_cb=lambda user, w=wide: user is not w
                )
        gm.recompile()

    return rewrite


def results_and_grads(
    function: Callable[..., Any], inputs: Sequence[Any], parameters: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The outputs, then the gradients of their weighted sum by every leaf."""
    leaves = [x for x in (*inputs, *parameters) if isinstance(x, torch.Tensor) and x.requires_grad]
    for leaf in leaves:
        leaf.grad = None
    outputs = function(*inputs)
    outputs = (
        [outputs] if isinstance(outputs, torch.Tensor) else [x for x in outputs if x is not None]
    )
    total = sum((x.double() * torch.linspace(-1, 1, x.numel()).view_as(x)).sum()
                for x in outputs if x.requires_grad)  # fmt: skip
    assert isinstance(total, torch.Tensor)
    total.backward()
    return [*outputs, *(torch.zeros(()) if leaf.grad is None else leaf.grad for leaf in leaves)]


def assert_same(
    function: Callable[..., Any],
    fast: Callable[..., Any],
    *inputs: Any,
    parameters: Sequence[torch.Tensor] = (),
    tolerance: float = 1e-5,
) -> None:
    expected = results_and_grads(function, inputs, parameters)
    actual = results_and_grads(fast, inputs, parameters)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype
        torch.testing.assert_close(a, e, atol=tolerance, rtol=tolerance)


def pieces_compiled() -> int:
    return int(torch._dynamo.utils.counters["aot_autograd"]["ok"])


def leaf(*size: int) -> torch.Tensor:
    return torch.randn(size, requires_grad=True)


# -- graphs without RNNs --------------------------------------------------------------------------


class Net(nn.Module):
    """Linear layers, a normalisation that writes to its buffers, a no_grad region."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = F.relu(self.norm(self.first(x)))
        with torch.no_grad():
            size = h.abs().mean()
        return self.last(h) / (1 + size), size


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("how", HOWS)
def test_forward_and_gradients(how: str, dynamic: bool) -> None:
    net = Net()
    fast = compiled(net, how, dynamic=dynamic)
    for batch in (5, 4):
        assert_same(net, fast, leaf(batch, 6), parameters=list(net.parameters()))
    assert net.norm.num_batches_tracked == 4


@pytest.mark.parametrize("how", HOWS)
def test_ambient_autocast_changes_nothing(how: str) -> None:
    net = Net()
    fast = compiled(net, how)
    x = leaf(5, 6)
    expected = results_and_grads(net, [x], list(net.parameters()))
    with torch.autocast("cpu", torch.bfloat16):
        if how == "eager":  # its backward is autograd's own, and at autocast's mercy
            torch.testing.assert_close(list(fast(x)), expected[:2])
            return
        actual = results_and_grads(fast, [x], list(net.parameters()))
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("how", HOWS)
def test_inference(how: str) -> None:
    net = Net().eval()
    x = torch.randn(5, 6)
    with torch.no_grad():
        torch.testing.assert_close(compiled(net, how)(x), net(x))


def test_options_reach_inductor_and_go_over_the_mode() -> None:
    seen: list[tuple[bool, bool]] = []

    def watch(graph: fx.Graph) -> None:
        config = torch._inductor.config
        seen.append((config.coordinate_descent_tuning, config.epilogue_fusion))

    options = {"coordinate_descent_tuning": False, "epilogue_fusion": False,
               "post_grad_custom_pre_pass": watch}  # fmt: skip
    fast = compiled(
        lambda x: x.sin() * 2, "inductor", mode="max-autotune-no-cudagraphs", options=options
    )
    fast(leaf(4)).sum().backward()
    assert seen == [(False, False)] * 2  # forward and backward


@pytest.mark.parametrize(
    "wrong", [{"mode": "fastest"}, {"options": {"no_such_option": 1}}], ids=["mode", "option"]
)
def test_unknown_mode_or_option(wrong: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=r"fastest|no_such_option"):
        compiled(lambda x: x.sin(), "inductor", **wrong)(torch.randn(3))


# -- RNNs -----------------------------------------------------------------------------------------

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
KINDS_BY_HOW += [("inductor", "lstm 2 batch first"), ("inductor", "gru 2 both ways")]


class Recurrent(nn.Module):
    """An RNN between two linear layers; hands out its final states too."""

    def __init__(self, kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
        super().__init__()
        self.before = nn.Linear(4, 5)
        self.rnn = kind(5, 6, **options)
        width = options.get("proj_size", 6) * (2 if options.get("bidirectional") else 1)
        self.after = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output, state = self.rnn(torch.tanh(self.before(x)))
        states = state if isinstance(state, tuple) else (state,)
        return self.after(F.relu(output)), *states


def parameters_of(*modules: nn.Module) -> list[torch.Tensor]:
    return [p for module in modules for p in module.parameters()]


@pytest.mark.parametrize(("how", "kind"), KINDS_BY_HOW)
def test_rnn(how: str, kind: str) -> None:
    net = Recurrent(*KINDS[kind])
    fast = compiled(net, how)
    assert_same(net, fast, leaf(7, 3, 4), parameters=parameters_of(net))
    assert pieces_compiled() == 2


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


# torch 2.11 and 2.12, on a profiler that has no schedule
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


class Stack(nn.Module):
    """Three RNNs: the second follows at once, the third starts from what the first computed."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.LSTM(4, 4), nn.LSTM(4, 4)
        self.three = nn.GRU(4, 4)
        self.gate = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.gate(x)
        a, (h, c) = self.one(skip)
        b, _ = self.two(a, (h, c))
        state = self.gate(h).tanh()  # the gate's weight is used on both sides
        d, _ = self.three(b + skip, state)
        return d * skip


@pytest.mark.skipif(
    torch.__version__ < "2.13",
    reason="Dynamo before 2.13 gives the state of an RNN in a graph a dimension too many",
)
@pytest.mark.parametrize(
    ("how", "dtype"), [("aot_eager", torch.float32), ("inductor", torch.bfloat16)]
)
def test_stacked_rnns(how: str, dtype: torch.dtype) -> None:
    net = Stack()
    reference = compiled(net, "eager", rnns_in(dtype))
    fast = compiled(net, how, rnns_in(dtype))
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    assert_same(reference, fast, leaf(6, 2, 4), parameters=parameters_of(net), tolerance=tolerance)


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


@pytest.mark.parametrize(
    ("how", "frozen"),
    [("aot_eager", f) for f in ("before", "rnn", "after", "all", "across")]
    + [("inductor", "across")],
)
def test_grad_mode_keeps_its_meaning_across_cuts(how: str, frozen: str) -> None:
    net, gate = Recurrent(nn.LSTM, {}), nn.Linear(4, 4)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.set_grad_enabled(frozen not in ("before", "all")):
            h = net.before(x)
        if frozen == "across":
            torch._C._set_grad_enabled(False)
            h = h + net.before(x)
        with torch.set_grad_enabled(frozen not in ("rnn", "all", "across")):
            r, _ = net.rnn(h)
        if frozen == "across":
            r = r * 2
            torch._C._set_grad_enabled(True)
        with torch.set_grad_enabled(frozen not in ("after", "all")):
            y = net.after(r)
        return y, h, r, gate(x)

    fast = compiled(function, how)
    x = leaf(7, 3, 4)
    assert_same(function, fast, x, parameters=parameters_of(net, gate))
    for a, b in zip(fast(x), function(x), strict=True):
        assert a.requires_grad == b.requires_grad
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("how", COMPILED)
def test_rnn_without_gradients(how: str) -> None:
    net = Recurrent(nn.LSTM, {})
    fast = compiled(net, how)
    x = torch.randn(7, 3, 4)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), net(x))
        assert not any(y.requires_grad for y in fast(x))
    assert all(y.requires_grad for y in fast(x))


def test_frozen_parameters_and_inputs() -> None:
    net = Recurrent(nn.LSTM, {})
    net.before.requires_grad_(False)
    net.rnn.weight_hh_l0.requires_grad_(False)
    fast = compiled(net, "aot_eager")
    assert_same(net, fast, torch.randn(7, 3, 4), parameters=parameters_of(net))


@pytest.mark.parametrize("how", COMPILED)
def test_writes_on_both_sides_of_an_rnn(how: str) -> None:
    class Writes(Recurrent):
        def __init__(self) -> None:
            super().__init__(nn.GRU, {})
            self.register_buffer("count", torch.zeros(()))
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            self.count.add_(1)
            self.mean.mul_(0.5).add_(x.detach().mean((0, 1)))
            h = self.before(x + self.mean)
            copy = h.detach().clone()
            r, _ = self.rnn(torch.tanh(h))
            copy.mul_(r.detach().mean())  # computed before the RNN, changed after it
            self.count.mul_(2)
            return self.after(r) + copy[..., :2], copy, None  # type: ignore[return-value]

    net, same = Writes(), Writes()
    same.load_state_dict(net.state_dict())
    fast = compiled(same, how)
    for _ in range(2):
        x = leaf(7, 3, 4)
        expected = results_and_grads(net, [x], parameters_of(net))
        actual = results_and_grads(fast, [x], parameters_of(same))
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(list(same.buffers()), list(net.buffers()))
    assert same.count == 6


def test_views_and_constants_around_an_rnn() -> None:
    net = Recurrent(nn.LSTM, {"batch_first": True})

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = net.before(x).transpose(0, 1)  # not contiguous where it crosses
        column = h[..., 1:3]
        r, _ = net.rnn(h.transpose(0, 1))
        return r.transpose(1, 2), column * 2, h.sum(0), net.after.weight.t() @ r.mean((0, 1))[:2]

    net.after = nn.Linear(3, 2)
    assert_same(
        function, compiled(function, "inductor"), leaf(3, 7, 4), parameters=parameters_of(net)
    )


def test_rnn_first_and_last() -> None:
    """No pieces at all: the graph is the RNN; and a result that nobody takes."""
    rnn = nn.GRU(4, 4)

    def function(x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return rnn(x, h)[0]

    fast = compiled(function, "inductor")
    assert_same(function, fast, leaf(5, 2, 4), leaf(1, 2, 4), parameters=parameters_of(rnn))
    assert pieces_compiled() == 0


def test_dropout_inside_an_rnn_is_the_kernel_s() -> None:
    rnn = nn.LSTM(4, 4, 2, dropout=0.5)
    fast = compiled(lambda x: rnn(x)[0] * 1, "inductor")
    x = torch.randn(5, 2, 4)
    torch.manual_seed(1)
    expected = rnn(x)[0]
    torch.manual_seed(1)
    torch.testing.assert_close(fast(x), expected)


def test_values_between_pieces_are_let_go() -> None:
    """A value that only an earlier step needed is gone when a later one runs."""
    seen: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    @torch.library.custom_op("mpcompile_test::watch", mutates_args=())
    def watch(x: torch.Tensor) -> torch.Tensor:
        if not seen:
            out = x.clone()
            seen.append(weakref.ref(out))
            return out
        alive.append(seen[0]() is not None)
        return x.clone()

    watch.register_fake(lambda x: torch.empty_like(x))
    rnn = nn.GRU(4, 4)

    def function(x: torch.Tensor) -> torch.Tensor:
        r, _ = rnn(torch.ops.mpcompile_test.watch(x))
        s, _ = rnn(torch.ops.mpcompile_test.watch(r * 2))
        return s

    with torch.no_grad():
        compiled(function, "aot_eager")(torch.randn(5, 2, 4))
    assert alive == [False]


def test_rnn_under_ambient_autocast() -> None:
    net = Recurrent(nn.GRU, {})

    def function(x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return net.after(net.rnn(net.before(x), h)[0])

    inputs = leaf(7, 3, 4), leaf(1, 3, 6)
    expected = results_and_grads(function, inputs, parameters_of(net))
    with torch.autocast("cpu", torch.bfloat16):  # not the backward: the kernel's is autograd's own
        torch.testing.assert_close(compiled(function, "aot_eager")(*inputs), expected[0])


def test_long_lstm_compiles_quickly() -> None:
    net = Recurrent(nn.LSTM, {"num_layers": 2})
    seconds: list[float] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        traced = capture(gm, inputs)  # this still walks the 200 steps, on fake tensors
        start = time.perf_counter()
        run = emit(traced, inputs, "inductor")
        seconds.append(time.perf_counter() - start)
        return run

    fast = torch.compile(net, backend=backend, fullgraph=True)
    assert_same(net, fast, leaf(200, 2, 4), parameters=parameters_of(net), tolerance=1e-4)
    assert seconds[0] < 30


@pytest.mark.parametrize("how", COMPILED)
def test_rnn_in_a_graph_that_was_not_captured(how: str) -> None:
    """What the backend falls back to: Dynamo's graph, of torch functions and methods."""
    net = Recurrent(nn.LSTM, {})

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = x.abs().mean()
        return net(x.mul(scale))[0].transpose(0, 1)

    fast = torch.compile(function, backend=lambda gm, inputs: emit(gm, inputs, how, untouched=True))
    assert_same(function, fast, leaf(7, 3, 4), parameters=parameters_of(net))
    assert pieces_compiled() == 2


def test_rnn_in_a_body_is_refused() -> None:
    def add_body(gm: fx.GraphModule) -> None:
        gm.add_submodule("body_0", fx.GraphModule(gm, gm.graph))

    fast = compiled(Recurrent(nn.LSTM, {}), "inductor", add_body)
    with pytest.raises(Exception, match=r"CannotRewrite: aten\.lstm\.input is inside"):
        fast(leaf(7, 3, 4))


@pytest.mark.parametrize("region", ["ambient", "own"])
def test_rnn_under_autocast_in_a_graph_that_was_not_captured(region: str) -> None:
    """No place for a cut: compiled whole, unrolled but right."""
    rnn = nn.GRU(4, 4)

    def function(x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        if region == "own":
            with torch.autocast("cpu", torch.bfloat16):
                return rnn(x, h)[0] * 2  # type: ignore[no-any-return]
        return rnn(x, h)[0] * 2  # type: ignore[no-any-return]

    fast = torch.compile(
        function, backend=lambda gm, inputs: emit(gm, inputs, "aot_eager", untouched=True)
    )
    inputs = torch.randn(3, 2, 4), torch.randn(1, 2, 4)
    with torch.autocast("cpu", torch.bfloat16, enabled=region == "ambient"):
        expected, actual = function(*inputs), fast(*inputs)
    assert pieces_compiled() == 1
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, atol=2e-2, rtol=2e-2)


# -- caches ---------------------------------------------------------------------------------------

CHILD = """
import json, sys, torch
sys.path.insert(0, sys.argv[1])
import test_emit as t

report = {}
for model in ("plain", "rnn"):
    for shapes in ("static", "dynamic"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        net = t.Recurrent(t.nn.LSTM, {}) if model == "rnn" else t.Net()
        x = t.leaf(7, 3, 4) if model == "rnn" else t.leaf(5, 6)
        low = t.rnns_in(torch.bfloat16)
        with torch._dynamo.config.patch(allow_rnn=True):
            fast = t.compiled(net, "inductor", low, dynamic=shapes == "dynamic")
            values = t.results_and_grads(fast, [x], list(net.parameters()))
        report[f"{model} {shapes}"] = {
            **{k: dict(torch._dynamo.utils.counters[k]) for k in ("aot_autograd", "inductor")},
            "sum": float(sum(v.double().abs().sum() for v in values)),
        }
print(json.dumps(report))
"""


def test_caches_hit_in_a_second_process() -> None:
    def child() -> dict[str, Any]:
        command = [sys.executable, "-c", CHILD, str(Path(__file__).parent)]
        root = Path(__file__).parent.parent
        done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    cold, warm = child(), child()
    for case, graphs in (
        ("plain static", 1), ("plain dynamic", 1), ("rnn static", 2), ("rnn dynamic", 2)
    ):  # fmt: skip
        for run in cold[case], warm[case]:
            assert "autograd_cache_bypass" not in run["aot_autograd"]
            assert "fxgraph_cache_bypass" not in run["inductor"]
        assert warm[case]["aot_autograd"]["autograd_cache_hit"] == graphs
        # dynamic: Dynamo starts over once it has learnt which floats are constants
        misses = warm[case]["aot_autograd"].get("autograd_cache_miss", 0)
        assert misses <= case.endswith("dynamic")
        assert "fxgraph_cache_miss" not in warm[case]["inductor"]
        assert warm[case]["sum"] == cold[case]["sum"]


# -- a second backward ----------------------------------------------------------------------------


def test_gradients_of_a_graph_are_differentiated_by_nobody() -> None:
    """Though they come out as constants; without create_graph they stay constants."""

    class Constant(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.square()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return torch.full_like(gradient, 3.0)

    run = noticed(lambda x: (Constant.apply(x),))  # type: ignore[no-untyped-call]
    x = torch.ones(4, requires_grad=True)
    (once,) = torch.autograd.grad(run(x)[0].sum(), x)
    assert not once.requires_grad
    (gradient,) = torch.autograd.grad(run(x)[0].sum(), x, create_graph=True)
    torch.testing.assert_close(gradient, once)
    with pytest.raises(MPCompileError, match="gradient penalty"):
        gradient.sum().backward()


def test_an_input_that_a_graph_returns_keeps_its_own_history() -> None:
    """What stands before a compiled graph may be differentiated as often as one likes."""
    x = torch.ones(4, requires_grad=True)
    (returned,) = noticed(lambda h: (h,))(x.pow(3))
    (gradient,) = torch.autograd.grad(returned.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), x)
    torch.testing.assert_close(second, 6 * x)
