"""A backend in miniature: it captures, rewrites and emits. Models, and a comparison with eager."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from compare import leaf as leaf
from torch import fx, nn
from torch.nn import functional as F

from mpcompile.capture.capture import capture
from mpcompile.capture.surroundings import around_now
from mpcompile.lower.emitter import emit
from mpcompile.lower.islands import RNN_OPS

aten = torch.ops.aten

HOWS = ("eager", "aot_eager", "inductor")
COMPILED = ("aot_eager", "inductor")

Rewrite = Callable[[fx.GraphModule], None]


def compiled(
    function: Callable[..., Any], how: str, rewrite: Rewrite = lambda gm: None, **kwargs: Any
) -> Callable[..., Any]:
    """`torch.compile` with a backend that captures, rewrites and emits."""
    dynamic = kwargs.pop("dynamic", False)

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with torch._C._DisableAutocast():
            traced = capture(gm, inputs, around_now(gm, inputs))
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
    for one in leaves:
        one.grad = None
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
