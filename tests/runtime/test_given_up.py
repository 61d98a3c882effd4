"""What Dynamo gives up at its limit of compiles is said, and what changes often isn't given up."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import DTYPES, LEVELS
from torch import nn

from mpcompile import MPCompileError, MPCompileWarning, compiled_plans, mpcompile

OPTIONS: dict[str, Any] = {"dtype": torch.bfloat16, "emit": "eager"}


class Net(nn.Module):
    """Ten layers, and what a user may change between two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(10))
        self.flags, self.scale = (False,) * 10, 1.0
        self.word, self.table, self.names = "", {}, []
        self.activation, self.dropout, self.norm = torch.sin, nn.Dropout(0.0), nn.LayerNorm(8)
        self.register_buffer("seen", torch.ones(1))

    def forward(self, x: torch.Tensor) -> Any:
        more = len(self.word) + len(self.table) + len(self.names) + self.seen.mean()
        x = self.norm(self.dropout(self.activation(x * self.scale + more)))
        for layer, flag in zip(self.layers, self.flags, strict=True):
            x = layer(x.tanh() if flag else x)
        return x


class Counting(Net):
    """It counts its calls, and reads the count."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 2  # Dynamo compiles 0 and 1 by themselves, whatever is dynamic

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return super().forward(x + self.calls)


def change_a_flag(net: Net, i: int) -> torch.Tensor:
    net.flags = tuple(j == i for j in range(10))
    return torch.randn(4, 8)


def unfreeze(net: Net, i: int) -> torch.Tensor:
    net.requires_grad_(False)
    net.layers[9 - i :].requires_grad_(True)
    return torch.randn(4, 8)


def change_the_size(net: Net, i: int) -> torch.Tensor:
    return torch.randn(2 + i, 8)


def change_the_rank(net: Net, i: int) -> torch.Tensor:
    return torch.randn(*[1] * i, 4, 8)


def drop_a_layer(net: Net, i: int) -> torch.Tensor:
    net.layers, net.flags = net.layers[: 10 - i], net.flags[: 10 - i]
    return torch.randn(4, 8)


def replace_a_buffer(net: Net, i: int) -> torch.Tensor:
    net.seen = torch.ones(2 + i)
    return torch.randn(4, 8)


FUNCTIONS = [
    torch.tanh, torch.cos, torch.relu, torch.sigmoid, torch.erf, F.gelu, F.silu, F.elu, F.mish,
    F.selu,
]  # fmt: skip


def setting(name: str, value: Callable[[int], Any]) -> Callable[[Net, int], torch.Tensor]:
    """Set an attribute, of a part of the model, too."""

    def change(net: Net, i: int) -> torch.Tensor:
        part, _, attribute = name.rpartition(".")
        setattr(net.get_submodule(part), attribute, value(i))
        return torch.randn(4, 8)

    change.__name__ = f"change {name}"
    return change


ATTRIBUTES = [
    setting("word", "a".__mul__), setting("table", lambda i: dict.fromkeys(range(i))),
    setting("names", lambda i: ["a"] * i), setting("scale", lambda i: 1 + i / 8),
    setting("activation", FUNCTIONS.__getitem__), setting("dropout.p", lambda i: i / 100),
    setting("norm.eps", lambda i: 10.0 ** (i - 12)),
]  # fmt: skip


def change_the_mode(net: Net, i: int) -> torch.Tensor:
    net.train(i % 2 == 0)
    return torch.randn(2 + i // 2, 8)


CHANGES = [
    change_a_flag, unfreeze, change_the_size, change_the_mode, change_the_rank, drop_a_layer,
    replace_a_buffer, *ATTRIBUTES,
]  # fmt: skip


def by_us(net: nn.Module, **options: Any) -> Any:
    return mpcompile(net, **{**OPTIONS, **options})


def of_a_function(net: nn.Module, **options: Any) -> Any:
    return mpcompile(lambda x: net(x), **{**OPTIONS, **options})


def by_torch(net: nn.Module, *, dynamic: bool | None = None, **options: Any) -> Any:
    options = {**OPTIONS, **options}
    return torch.compile(net, backend="mpcompile", options=options, dynamic=dynamic)


def train(
    net: Net, way: Callable[..., Any], change: Callable[..., Any], **options: Any
) -> list[bool]:
    """Ten steps; of each, whether its products were low: then all results are low numbers."""
    model, found = way(net, **options), []
    low = options.get("dtype", OPTIONS["dtype"])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for i in range(10):
        out = model(change(net, i))
        out.square().mean().backward()
        optimizer.step()
        found.append(bool((out == out.to(low)).all()))
    return found


@pytest.mark.slow_rows("ten compiles each", but=2)
@LEVELS
@DTYPES
@pytest.mark.parametrize("way", [by_us, of_a_function])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_changes_often_stays_low(way: Any, change: Any, dtype: Any, level: str) -> None:
    assert all(train(Net(), way, change, dynamic=False, strict=True, dtype=dtype, level=level))


@pytest.mark.parametrize("way", [by_us, of_a_function, by_torch])
@pytest.mark.parametrize("change", [change_a_flag, unfreeze, change_the_size])
def test_what_is_given_up_is_said_once(way: Callable[..., Any], change: Callable[..., Any]) -> None:
    with (
        torch._dynamo.config.patch(recompile_limit=4),
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always", MPCompileWarning)
        low = train(Net(), way, change, dynamic=False)
    assert low == [True] * 4 + [False] * 6
    (one,) = [str(w.message) for w in said if w.category is MPCompileWarning]
    assert "was compiled 4 times" in one
    assert {change_a_flag: "flags", unfreeze: ".bias' requires_grad", change_the_size: "size"}[
        change
    ] in one


@pytest.mark.parametrize("way", [by_us, of_a_function, by_torch])
def test_it_is_an_error_when_strict(way: Callable[..., Any]) -> None:
    with (
        torch._dynamo.config.patch(recompile_limit=4),
        pytest.raises(MPCompileError, match="compiled 4 times"),
    ):
        train(Net(), way, unfreeze, strict=True)


def test_what_others_compile_is_theirs() -> None:
    with torch._dynamo.config.patch(recompile_limit=2):
        theirs = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
        for i in range(4):
            theirs(torch.randn(2 + i))
        train(Net(), by_us, lambda net, i: torch.randn(4, 8))


def test_a_count_of_calls_compiles_no_third_time() -> None:
    seen: list[int] = []
    model = by_us(Counting())
    for _ in range(6):
        model(torch.randn(4, 8)).sum().backward()
        seen.append(len(compiled_plans(model)))
    assert seen == [1, 2, 2, 2, 2, 2]


class Breaks(nn.Module):
    """No graph is compiled before its break."""

    flags = (False,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sign = -1.0 if self.flags[0] else 1.0
        torch._dynamo.graph_break()
        return (x @ x.T).relu() * sign


def test_models_that_share_a_method_have_a_limit_each() -> None:
    """After a break Dynamo keeps what it compiles at the method, which other models have, too."""
    with torch._dynamo.config.patch(recompile_limit=4):
        for _ in range(6):
            net = nn.Sequential(nn.Linear(64, 64), Breaks())
            model = mpcompile(net, **OPTIONS, strict=True)
            model(torch.randn(64, 64)).sum().backward()
            assert len(compiled_plans(model)) >= 1


def test_what_has_no_graph_is_given_up_with_all_after_it() -> None:
    net = Breaks()

    def train() -> None:
        for i in range(6):
            net.flags = (False,) * (i + 1)
            model(torch.randn(64, 64)).sum().backward()

    with torch._dynamo.config.patch(recompile_limit=4):
        model = mpcompile(nn.Sequential(nn.Linear(64, 64), net), **OPTIONS)
        with pytest.warns(MPCompileWarning, match="forward was compiled 4 times, torch's limit"):
            train()
