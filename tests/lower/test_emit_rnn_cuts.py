"""emit: what crosses the cuts around an RNN, and where there is no place for a cut."""

import weakref

import pytest
import torch
from miniature import (
    COMPILED,
    Recurrent,
    assert_same,
    compiled,
    leaf,
    parameters_of,
    pieces_compiled,
    results_and_grads,
)
from torch import fx, nn

from mpcompile.lower.emitter import emit

pytestmark = pytest.mark.usefixtures("own_inductor_cache", "rnns_in_graphs")


@pytest.mark.slow_rows("compiles by Inductor")
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


@pytest.mark.slow_rows("compiles by Inductor")
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


@pytest.mark.slow_rows("compiles by Inductor")
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


@pytest.mark.slow("compiles by Inductor")
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


@pytest.mark.slow_rows("compiles by Inductor")
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
