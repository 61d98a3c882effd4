"""A first call, with a stand-in for Inductor that computes right or wrong."""

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from mpcompile.devices.registry import capabilities
from mpcompile.errors import MPCompileError, MPCompileWarning
from mpcompile.torch_inside.names import inductor_config
from mpcompile.verify import case, first_call, verdicts
from mpcompile.verify.first_call import Verifier
from mpcompile.verify.verdicts import Verdicts, Verify, say_again

aten = torch.ops.aten
Program = Callable[..., Any]


class Inductor:
    """Compiles a graph to an interpreter; where it is wrong, sums are differences.

    Attributes:
        right: whether it is right now.
        compiles: how often it was asked.
    """

    def __init__(self) -> None:
        self.right: Callable[[], bool] = lambda: True
        self.compiles = 0

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Any:
        self.compiles += 1
        if not self.right():
            for node in gm.graph.find_nodes(op="call_function", target=aten.add.Tensor):
                node.target = aten.sub.Tensor
            gm.recompile()

        def run(given: list[Any]) -> list[Any]:
            return list(fx.Interpreter(gm).run(*given))

        return SimpleNamespaceWithRefs(current_callable=run)


class SimpleNamespaceWithRefs(SimpleNamespace):
    """One that weak references can be made of, as of Inductor's."""


@pytest.fixture
def inductor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Inductor]:
    stand_in = Inductor()
    monkeypatch.setattr(first_call, "compile_inner", stand_in)
    monkeypatch.setattr(case, "compile_inner", stand_in)
    monkeypatch.setattr(verdicts, "cache_dir", lambda: str(tmp_path))
    monkeypatch.setattr(first_call, "_LEAST", 3600.0)  # also where the machine is slow
    say_again()
    yield stand_in
    say_again()


def program(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    hidden = (x @ w).relu()
    return hidden + x, (hidden * 2).exp()


def inputs_of(dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(64, 64, generator=generator) / 8).to(dtype) for _ in range(2)]


def compiled(inputs: Sequence[Any], asked: Verify | None = None, run: Program = program) -> Any:
    gm = make_fx(run, tracing_mode="fake")(*inputs)
    found = Verdicts.of("0" * 64, asked or Verify())
    owner = Verifier(found, None).inner(gm, inputs, is_inference=True)
    return owner, found


def call(owner: Any, inputs: Sequence[Any]) -> tuple[list[Any], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = owner.current_callable(list(inputs))
    return results, [str(w.message) for w in caught if w.category is MPCompileWarning]


def first(
    inputs: Sequence[Any], run: Program = program
) -> tuple[Any, Verdicts, list[Any], list[str]]:
    """What is compiled, what is found at its first call, its results, and what is said."""
    owner, found = compiled(inputs, run=run)
    return owner, found, *call(owner, inputs)


def test_what_is_right_is_verified_once(inductor: Inductor) -> None:
    inputs = inputs_of()
    owner, found, results, said = first(inputs)
    assert not said
    assert found.known["graph"].values == 2
    assert found.known["graph"].worst <= 3
    assert "verified 2 values" in found.text()
    assert not isinstance(owner.current_callable, first_call.FirstCall)
    torch.testing.assert_close(results, list(program(*inputs)))
    assert inductor.compiles == 1


def test_a_wrong_sum_is_put_right_said_once_and_cured(inductor: Inductor) -> None:
    inductor.right = lambda: bool(inductor_config.emulate_precision_casts)
    inputs = inputs_of()
    owner, found, results, said = first(inputs)
    torch.testing.assert_close(results, list(program(*inputs)))
    assert len(said) == 1
    assert "at aten::add" in said[0]
    assert "emulate_precision_casts" in said[0]
    assert found.known["graph"].cure == "roundings"
    again, said = call(owner, inputs)
    torch.testing.assert_close(again, results)
    assert not said


def test_the_last_cure_is_the_graph_operator_by_operator(inductor: Inductor) -> None:
    inductor.right = lambda: False

    def sums(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x + w,)

    inputs = inputs_of()
    owner, found, *_ = first(inputs, run=sums)
    assert found.known["graph"].cure == "uncompiled"
    assert not Verdicts.of(found.key, Verify()).complete
    results, _ = call(owner, inputs)
    assert torch.equal(results[0], inputs[0] + inputs[1])


def test_a_written_input_is_compared_and_put_right(inductor: Inductor) -> None:
    def update(p: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
        p.copy_(p + g * 0.1)
        return (g * 2,)

    inductor.right = lambda: False
    p, g = inputs_of(torch.float32)
    meant = p + g * 0.1
    _, found, _, said = first([p, g], run=update)
    assert len(said) == 1
    torch.testing.assert_close(p, meant)
    assert found.known["graph"].cure == "uncompiled"


def test_strict_raises(inductor: Inductor) -> None:
    inductor.right = lambda: False
    inputs = inputs_of()
    owner, _ = compiled(inputs, Verify(strict=True))
    with pytest.raises(MPCompileError, match="strict=True: compiled wrongly"):
        owner.current_callable(list(inputs))


def test_a_constant_is_looked_at_again(inductor: Inductor) -> None:
    """A layer that begins with zeros: what is wrong shows when they have changed."""

    def scaled(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ((x + 1) * w,)

    inductor.right = lambda: False
    x, w = inputs_of()
    owner, found, _, said = first([x, torch.zeros_like(w)], run=scaled)
    assert not said
    assert found.known["graph"].unproven == 1
    assert "constant so far" in found.text()
    results, said = call(owner, [x, w])
    assert len(said) == 1
    torch.testing.assert_close(results[0], (x + 1) * w)


def test_a_count_of_what_seldom_happens_is_looked_at_once(inductor: Inductor) -> None:
    """Such as a backward's count of overflows: zero in nearly each call."""

    def counts(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ((x.float() + w).isinf().any().float(),)

    inputs = inputs_of()
    owner, found, *_ = first(inputs, run=counts)
    assert found.known["graph"].values == 1
    assert not isinstance(owner.current_callable, first_call.FirstCall)


def test_an_error_of_the_verification_is_none_of_the_program(
    inductor: Inductor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise ValueError("an operator has no kernel")

    monkeypatch.setattr(first_call.Trial, "part_that_fits", fails)
    inputs = inputs_of()
    owner, found, results, said = first(inputs)
    torch.testing.assert_close(results, list(program(*inputs)))
    assert not said
    assert "not verified, ValueError: an operator has no kernel" in found.text()
    assert not isinstance(owner.current_callable, first_call.FirstCall)
    owner, _ = compiled(inputs, Verify("always"))
    with pytest.raises(ValueError, match="no kernel"):
        owner.current_callable(list(inputs))


def test_where_memory_is_short_a_sample_is_compared(
    inductor: Inductor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two values of 8 KiB live together at most until the first result is there, three until both
    are. Each counts three times, and half of what is free may be taken.
    """
    cpu = type(capabilities(torch.device("cpu")))
    inputs = inputs_of()
    for free, compared in ((2 * 3 * 3, 2), (2 * 3 * 2, 1), (2 * 3 * 2 - 1, 0)):
        monkeypatch.setattr(cpu, "free_memory", lambda _, free=free: free * 8192)
        owner, found = compiled(inputs)
        _, said = call(owner, inputs)
        assert not said
        assert found.known["graph"].values == compared
        assert ("of 2, for memory" in found.text()) is (compared < 2)
        assert not isinstance(owner.current_callable, first_call.FirstCall)


def test_always_is_every_call(inductor: Inductor) -> None:
    x, w = inputs_of()
    owner, found = compiled([x, w], Verify("always"))
    for _ in range(3):
        call(owner, [x, w])
    assert found.known["graph"].values == 6
    assert isinstance(owner.current_callable, first_call.FirstCall)


def test_a_verdict_is_remembered(inductor: Inductor, tmp_path: Path) -> None:
    """As long as its file can be read."""
    inputs = inputs_of()
    owner, found = compiled(inputs)
    assert not found.complete
    call(owner, inputs)
    again = Verdicts.of(found.key, Verify())
    assert again.complete
    assert again.text() == found.text()
    assert not Verdicts.of("1" * 64, Verify()).complete
    (file,) = tmp_path.rglob("*.json")
    assert json.loads(file.read_text())["expected"] == ["graph"]
    file.write_text("{")
    assert not Verdicts.of(found.key, Verify()).complete


def test_a_graph_that_writes_elsewhere_is_left_and_said(inductor: Inductor) -> None:
    def writes(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = x * 2
        hidden.add_(w)
        return (hidden,)

    inputs = inputs_of()
    _, found, *_ = first(inputs, run=writes)
    assert "not verified" in found.text()
    assert "in place" in found.text()
