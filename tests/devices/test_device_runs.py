"""What is asked of a device while it runs: waits, memory, random numbers, numbers on their way."""

from typing import Any

import pytest
import torch

from mpcompile.devices import registry
from mpcompile.devices.capabilities import Capabilities
from mpcompile.devices.cpu import CPU
from mpcompile.devices.registry import RandomState, capabilities, default_device, unchanged
from mpcompile.profile.calls import Calls, Point
from mpcompile.profile.measure import measure


class Plain(Capabilities):
    """Says of itself only what it must."""

    word = "NPU"
    auto = torch.float16


XPU = torch.device("xpu", 0)
"""A type that torch knows and mpcompile does not."""


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.KINDS, "xpu", Plain)


class Module:
    """What torch has for a device type, in place of `torch.xpu`: two devices, the first current."""

    def __init__(self) -> None:
        self.states = {0: 0, 1: 0}
        self.done = False
        self.recorded: list[Any] = []

    def device_count(self) -> int:
        return 2

    def current_stream(self, device: torch.device) -> str:
        return f"stream of {device}"

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return torch.tensor([self.states[device.index]], dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.states[device.index] = int(state)

    def Event(self) -> Any:
        module = self

        class Event:
            def record(self, stream: str) -> None:
                module.recorded.append(stream)

            def query(self) -> bool:
                return module.done

        return Event()


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    made = Module()
    monkeypatch.setitem(registry.KINDS, "xpu", Plain)
    monkeypatch.setattr(Plain, "_module", made)
    return made


@pytest.mark.usefixtures("module")
def test_a_device_that_is_there() -> None:
    assert capabilities("xpu:1").is_there()
    assert not capabilities("xpu:2").is_there()


def test_the_first_type_that_is_there_is_the_default(
    module: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "KINDS", {"xpu": Plain, "cpu": CPU})
    assert default_device() == torch.device("xpu", 0)
    monkeypatch.setattr(module, "device_count", lambda: 0)
    assert str(default_device()) == "cpu"


def test_random_numbers_of_the_host_and_of_devices_come_back(module: Module) -> None:
    devices = [torch.device("xpu", 1), torch.device("cpu"), torch.device("meta")]
    module.states = {0: 5, 1: 7}
    before = RandomState(devices)
    first = torch.rand(3)
    module.states = {0: 6, 1: 8}
    with unchanged(devices):
        before.restore()
        assert torch.equal(torch.rand(3), first)
        assert module.states == {0: 6, 1: 7}, "the first device is not among them"
    assert module.states == {0: 6, 1: 8}
    assert not torch.equal(torch.rand(3), first)


def test_what_fails_leaves_random_numbers_as_they_were(module: Module) -> None:
    state = torch.get_rng_state()

    def fail() -> None:
        module.states[0] = 1
        torch.rand(3)
        raise ValueError("so")

    with pytest.raises(ValueError, match="so"), unchanged([XPU]):
        fail()
    assert torch.equal(torch.get_rng_state(), state)
    assert module.states[0] == 0


def test_a_number_is_read_when_its_copy_is_there(
    module: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event stands after the copy: on the stream of the number's device, not the current's."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr("mpcompile.devices.registry.capabilities", lambda device: Plain(second))
    second = torch.device("xpu", 1)
    later = registry.AsyncRead(torch.tensor(3.0))
    assert module.recorded == ["stream of xpu:1"]
    assert later.read() is None
    module.done = True
    assert later.read() == (3.0,)


def test_on_the_host_a_number_is_there_at_once() -> None:
    assert registry.AsyncRead(torch.tensor(3.0)).read() == (3.0,)


def test_each_look_has_memory_of_its_own(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr("mpcompile.devices.registry.capabilities", lambda device: Plain(XPU))
    waiting = [registry.AsyncRead(torch.tensor(float(number))) for number in range(3)]
    assert [later.read() for later in waiting] == [None] * 3
    module.done = True
    assert [later.read() for later in waiting] == [(0.0,), (1.0,), (2.0,)]
    assert [later.read() for later in waiting] == [(0.0,), (1.0,), (2.0,)]  # it has been noted
    assert registry.AsyncRead(torch.tensor(7), torch.tensor(True)).read() == (7, True)


@pytest.mark.usefixtures("plain")
def test_torch_accelerator_waits_and_counts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, torch.device]] = []
    answers = {
        "synchronize": None, "reset_peak_memory_stats": None, "memory_allocated": 5,
        "max_memory_allocated": 9,
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(
            torch.accelerator, name, lambda at, n=name, a=answer: (calls.append((n, at)), a)[1]
        )
    one = capabilities(XPU)
    one.synchronize()
    assert (one.allocated_memory(), one.peak_memory()) == (5, 9)
    assert calls == [(name, XPU) for name in answers]


@pytest.mark.usefixtures("plain")
def test_a_profile_waits_for_the_device_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls take no time of the host's; the device works on what it was given when waited for."""
    now, given = 0.0, 0.0

    def call() -> None:
        nonlocal given
        given += 1e-3

    def synchronize(self: Capabilities) -> None:
        nonlocal now, given
        now, given = now + given, 0.0

    monkeypatch.setattr(Plain, "synchronize", synchronize)
    monkeypatch.setattr(Plain, "part", lambda self: "a device")
    profile = measure(
        XPU, seconds=10.0, points=[Point("gemm", (1, 8, 8, 8))],
        build=lambda point, dtype, device: Calls(call, call), clock=lambda: now,
    )  # fmt: skip
    assert [one.forward for one in profile.samples] == pytest.approx([1e-3] * 3)
