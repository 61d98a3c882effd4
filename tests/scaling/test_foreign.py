"""Someone else's GradScaler or autocast around what is compiled is noticed."""

import copy
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from module_of import module_of
from torch import nn

from mpcompile import MPCompileError, MPCompileWarning, MPOptimizer, compiled_plans, mpcompile
from mpcompile.devices import autocast


@pytest.fixture(autouse=True)
def nothing_said() -> Iterator[None]:
    autocast.say_autocast.cache_clear()
    yield
    autocast.say_autocast.cache_clear()


def compiled(**options: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
    return mpcompile(model, **{"dtype": torch.float16, "emit": "eager", **options})


def held(model: nn.Module, wrapped: bool) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return MPOptimizer(optimizer, emit="eager") if wrapped else optimizer


def step_with(scaler: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    scaler.scale(model(torch.randn(8, 16)).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


# -- a GradScaler ----------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "MPOptimizer"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_grad_scaler_is_noticed_once(level: str, wrapped: bool) -> None:
    model = compiled(level=level)
    optimizer, scaler = held(model, wrapped), torch.amp.GradScaler("cpu", init_scale=8.0)
    words = (
        r"a GradScaler steps .*Leave the GradScaler out: loss\.backward\(\), optimizer\.step\(\)"
        r'.*loss_scale="none"'
    )
    with pytest.warns(MPCompileWarning, match=words):
        step_with(scaler, model, optimizer)
    step_with(scaler, model, optimizer)


@pytest.mark.parametrize(
    ("options", "enabled"),
    [({}, False), ({"loss_scale": "none"}, True), ({"dtype": torch.bfloat16}, True)],
    ids=["disabled", "ours is off", "BF16"],
)
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "MPOptimizer"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_one_loss_scale_is_fine(options: Any, enabled: bool, wrapped: bool, level: str) -> None:
    """No warning, and the gradients are right: the scaler is the only one."""
    model = compiled(level=level, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=enabled)
    optimizer = held(model, wrapped)
    before = [p.detach().clone() for p in model.parameters()]
    x = torch.randn(8, 16)
    twin = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
    twin.load_state_dict(model.state_dict())
    twin(x).square().mean().backward()
    scaler.scale(model(x).square().mean()).backward()
    scaler.step(optimizer)
    for mine, old, other in zip(model.parameters(), before, twin.parameters(), strict=True):
        torch.testing.assert_close((old - mine) / 0.1, other.grad, rtol=5e-2, atol=1e-3)


def test_a_scaler_of_another_model_is_fine() -> None:
    model, other = compiled(), nn.Linear(4, 4)
    optimizer, its = held(model, False), torch.optim.SGD(other.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model(torch.randn(8, 16)).mean().backward()
    optimizer.step()
    scaler.scale(other(torch.randn(2, 4)).mean()).backward()
    scaler.step(its)


# -- a forward under autocast ----------------------------------------------------------------------


def replace_forward(model: nn.Module, enabled: bool = True) -> None:
    """As Accelerate does."""
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=enabled)
    model.forward = autocast(model.forward)  # type: ignore[method-assign]


def test_a_forward_replaced_afterwards_is_refused_at_the_call() -> None:
    model = compiled()
    model(torch.randn(8, 16))
    replace_forward(model)
    with pytest.raises(MPCompileError, match=r"autocast.*mixed_precision"):
        model(torch.randn(8, 16))


def test_an_autocast_that_is_off_is_fine() -> None:
    model = compiled()
    replace_forward(model, enabled=False)
    assert model(torch.randn(8, 16)).dtype is torch.float32


class Decorated(nn.Module):
    """A region of the user's own: it keeps its dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 4)

    @torch.autocast("cpu", torch.bfloat16)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


def test_a_region_of_the_users_own_is_fine(caplog: pytest.LogCaptureFixture) -> None:
    model = mpcompile(Decorated(), dtype=torch.float16, emit="eager", strict=True)
    assert model(torch.randn(8, 16)).dtype is torch.bfloat16
    assert not said(caplog)


# -- autocast around the call ----------------------------------------------------------------------


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "autocast" in r.getMessage()]


def test_autocast_around_the_call_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "mpcompile"):
        for _ in range(2):
            model = compiled()
            with torch.autocast("cpu", torch.bfloat16):
                model(torch.randn(8, 16))
    (text,) = said(caplog)
    assert "no effect inside" in text


@pytest.mark.parametrize("around", [True, False], ids=["around the call", "in the program"])
def test_autocast_across_a_graph_break(around: bool) -> None:
    """What the first graph returns has autocast's dtype; the second one reads it beside FP32."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=not around):
            if around:
                return broken(x, w)
            h = F.linear(x, w)
            torch._dynamo.graph_break()
            return F.linear(h, w) + h * w[0]

    def broken(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = F.linear(x, w)
        torch._dynamo.graph_break()
        return F.linear(h, w) + h * w[0]

    run = broken if around else program
    x, w = torch.randn(8, 16), (torch.randn(16, 16) * 0.3).requires_grad_()
    twin = w.detach().clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled_ = mpcompile(run, dtype=torch.float16, emit="eager", strict=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            mine = compiled_(x, w)
        other = run(x, twin)  # the caller's region is none of the program
    assert mine.dtype is other.dtype
    mine.float().square().sum().backward()
    other.float().square().sum().backward()
    assert w.grad is not None
    limit = 5e-2 * float(twin.grad.abs().max())
    torch.testing.assert_close(w.grad, twin.grad, rtol=5e-2, atol=limit)


def test_a_half_buffer_under_autocast_is_written_to() -> None:
    """An operator that writes to it, or views it, also has an FP32 operand."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)
            for i in range(4):
                self.register_buffer(f"seen{i}", torch.zeros(8, dtype=torch.float16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.float16):
                torch.ops.aten.copy_.default(self.seen0, x)
                torch.ops.aten.add_.Tensor(self.seen1, x)
                self.seen2.view_as(x).add_(1)
                self.seen3.expand_as(x).add_(1)
                h: torch.Tensor = self.fc(x)
            return h

    model = mpcompile(Writes(), dtype=torch.float16, emit="eager", strict=True)
    model(torch.ones(8)).float().sum().backward()
    assert all(bool((seen == 1).all()) for seen in model.buffers())


@pytest.mark.parametrize(
    ("level", "emit"), [("O0", "eager"), ("O1", "eager"), ("O2", "eager"), ("O2", "aot_eager")]
)
def test_under_autocast_a_call_is_what_it_is_without(level: str, emit: str) -> None:
    """Results and gradients, of a module and of a function, to the last bit; in no_grad, too."""

    def forward(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):  # one of its own counts
            inner = m.first(x)
        h = m.last(inner.float())
        return h, h.view(-1), inner, h.softmax(-1)

    x, runs = torch.randn(4, 8), []
    for dtype in (None, torch.bfloat16, torch.float16):
        torch.manual_seed(0)
        net = module_of(forward, first=nn.Linear(8, 8), last=nn.Linear(8, 4))
        options: dict[str, Any] = {"dtype": torch.float16, "level": level, "emit": emit}
        function = mpcompile(lambda x, net=net: net(x), **options)
        module = mpcompile(copy.deepcopy(net), **options)
        for run, model in ((function, net), (module, module)):
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                with torch.no_grad():
                    evaluated = run(x)
                results = run(x)
            sum(result.float().sum() for result in results).backward()
            runs.append([*evaluated, *results, *(p.grad for p in model.parameters())])
            low = [n.precision for plan in compiled_plans(run) for n in plan.nodes]
            assert ("LOW" in low) == (level != "O0")
    for found in runs[1:]:
        torch.testing.assert_close(found, runs[0], rtol=0, atol=0)
    assert [result.dtype for result in runs[0][:2]] == [torch.float32] * 2
