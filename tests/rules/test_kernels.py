"""The kernel probe: what the device refuses is found out by asking it, and leaves no trace."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from module_of import function_of
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from mpcompile.rules import kernels

aten = torch.ops.aten
CPU = torch.device("cpu")
LOW_DTYPES = pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known about any kernel yet."""
    monkeypatch.setattr(kernels, "_answers", {})


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators run as a probe, in order."""
    seen: list[str] = []
    original = kernels._runs

    def record(node: fx.Node, *rest: Any) -> bool:
        seen.append(str(node.target))
        return original(node, *rest)

    monkeypatch.setattr(kernels, "_runs", record)
    return seen


def call(target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    """A node that calls `target`; tensors stand for nodes that hold them."""
    graph = fx.Graph()

    def operand(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder("x")
        node.meta["mp_captured"] = value
        return node

    return graph.call_function(
        target, tuple(map(operand, args)), {k: operand(v) for k, v in kwargs.items()}
    )


x, y, long = torch.ones(3, 4), torch.ones(4, 5), torch.zeros(3, dtype=torch.int64)


@LOW_DTYPES
@pytest.mark.parametrize(
    "node",
    [
        call(aten.mm.default, x, y),
        # Sizes that don't fit together any more when they are probed small.
        call(
            aten.conv2d.default, torch.ones(2, 128, 4, 4), torch.ones(128, 1, 3, 3), None,
            [1, 1], [1, 1], [1, 1], 128,
        ),
        call(aten.softmax.int, x, -1),
        call(aten.batch_norm.default, x, y[:, 0], y[:, 0], y[:, 0], y[:, 0], True, 0.1, 1e-5, True),
        call(aten.embedding.default, y, long),
        call(aten.mm.default, torch.ones(300, 4000), torch.ones(4000, 7)),  # probed small
    ],
    ids=str,
)  # fmt: skip
def test_has_a_kernel(node: fx.Node, low: torch.dtype) -> None:
    assert kernels.has_kernel(node, low, CPU)


@LOW_DTYPES
@pytest.mark.parametrize(
    "target", [aten.linalg_cholesky.default, aten.linalg_inv.default, aten.linalg_svdvals.default]
)
def test_has_none(target: torch._ops.OpOverload, low: torch.dtype) -> None:
    """LAPACK has no half precision."""
    assert not kernels.has_kernel(call(target, torch.eye(4)), low, CPU)


@LOW_DTYPES
def test_what_cannot_be_tried_stays_in_fp32(low: torch.dtype) -> None:
    assert not kernels.has_kernel(call(aten.cat.default, [1.0], 0), low, CPU)


def torch_op(name: str, implementation: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """An operator of torch's namespace that does what is asked here."""
    library = torch.library.Library("aten", "FRAGMENT")
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, implementation, "CompositeImplicitAutograd")
    OPEN.append(library)
    return getattr(aten, name).default


OPEN: list[torch.library.Library] = []  # an operator ends with its library


def test_refusal_in_the_backward() -> None:
    """An operator that runs forward only is of no use in training."""

    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if gradient.dtype is torch.float16:
            raise RuntimeError("no")  # in whatever words
        return gradient

    forward_only = function_of(lambda ctx, t: t.clone(), backward)
    target = torch_op("mp_test_forward_only", lambda t: forward_only.apply(t))
    assert not kernels.has_kernel(call(target, x), torch.float16, CPU)


def test_a_complaint_about_tiny_shapes_is_no_refusal() -> None:
    """Shrunk to 8, the sizes do not match any more."""
    node = call(aten.view.default, torch.ones(10, 10), [50, 2])
    assert kernels.has_kernel(node, torch.float16, CPU)


def test_what_is_no_operator_of_torch_is_not_run(probes: list[str]) -> None:
    def custom(t: torch.Tensor) -> torch.Tensor:
        raise AssertionError("run behind its author's back")

    op = torch.library.custom_op("mp_test_kernels::custom", custom, mutates_args=())
    target = torch.ops.mp_test_kernels.custom.default
    assert op is not None
    assert kernels.has_kernel(call(target, x), torch.float16, CPU)
    assert kernels.has_kernel(call(len, x), torch.float16, CPU)
    assert probes == []


def test_asks_once(probes: list[str]) -> None:
    for size in (4, 5, 1000):
        kernels.has_kernel(call(aten.relu.default, torch.ones(size, size)), torch.float16, CPU)
    assert probes == ["aten.relu.default"]


@pytest.mark.parametrize(
    ("other", "low"),
    [
        (call(aten.scatter_reduce.two, x, 0, long[:, None], x, "prod"), torch.float16),
        (call(aten.scatter_reduce.two, x[0], 0, long, x[0], "sum"), torch.float16),
        (
            call(aten.scatter_reduce.two, x, 0, long[:, None], x, "sum", include_self=False),
            torch.float16,
        ),
        (call(aten.scatter_reduce.two, x, 0, long[:, None], x, "sum"), torch.bfloat16),
    ],
    ids=["mode", "rank", "flag", "dtype"],
)
def test_asks_again(probes: list[str], other: fx.Node, low: torch.dtype) -> None:
    """What may pick another kernel is asked again."""
    first = call(aten.scatter_reduce.two, x, 0, long[:, None], x, "sum")
    kernels.has_kernel(first, torch.float16, CPU)
    kernels.has_kernel(other, low, CPU)
    assert len(probes) == 2


def test_leaves_no_trace() -> None:
    """A probe of dropout must not move the user's random numbers, nor show its warnings."""
    loud = torch_op("mp_test_loud", _warn)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert kernels.has_kernel(call(aten.dropout.default, x, 0.5, True), torch.float16, CPU)
    assert kernels.has_kernel(call(loud, x), torch.float16, CPU)
    assert torch.equal(torch.get_rng_state(), before)


def _warn(t: torch.Tensor) -> torch.Tensor:
    warnings.warn("deprecated", DeprecationWarning, stacklevel=2)
    return t.clone()


@pytest.mark.parametrize(
    "mode",
    [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)],
    ids=["no_grad", "inference_mode", "autocast"],
)
def test_takes_no_notice_of_modes(mode: Callable[[], Any]) -> None:
    """The answer is kept for the whole process, so it can't depend on where it was asked."""
    with mode():
        assert kernels.has_kernel(call(aten.mm.default, x, y), torch.float16, CPU)
        cholesky = call(aten.linalg_cholesky.default, torch.eye(4))
        assert not kernels.has_kernel(cholesky, torch.float16, CPU)


def test_symbolic_sizes() -> None:
    rows = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fake = mode.from_tensor(torch.ones(6, 4), symbolic_context=rows)
    assert isinstance(fake.shape[0], torch.SymInt)
    assert kernels.has_kernel(call(aten.relu.default, fake), torch.float16, CPU)


# -- recurrent layers ------------------------------------------------------------------------------


def lstm() -> fx.Node:
    layer, x = nn.LSTM(8, 8), torch.ones(3, 2, 8)
    state = [torch.zeros(1, 2, 8), torch.zeros(1, 2, 8)]
    weights = [w.detach() for w in layer.parameters()]
    node = call(aten.lstm.input, x)
    inputs = [*node.args]
    placed = [call(aten.lstm.input, value).args[0] for value in (*state, *weights)]
    node.args = (*inputs, placed[:2], placed[2:], True, 1, 0.0, False, False, False)
    return node


def test_a_layer_that_would_leave_cudnn_stays_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own LSTM then runs each step in kernels of its own, whatever the dtype."""
    assert kernels.has_kernel(lstm(), torch.bfloat16, CPU)
    kernels._answers.clear()
    taken = (torch.float32, torch.float16)
    monkeypatch.setattr(torch, "cudnn_is_acceptable", lambda x: x.dtype in taken)
    assert not kernels.has_kernel(lstm(), torch.bfloat16, CPU)
