"""A plan is a function of graph, facts and settings: in any thread, beside any other."""

import dataclasses
import importlib
import pkgutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import pytest
import torch
from explained import MODELS, pictures
from module_of import module_of
from torch import fx, nn

from mpcompile import MPOptimizer, ir, scaling
from mpcompile.capture.pipeline import Planned
from mpcompile.compiler.plan_graph import plan_graph
from mpcompile.compiler.training import training_of
from mpcompile.settings import Settings


def attend(m: Any, x: torch.Tensor) -> torch.Tensor:
    q, k, v = m.qkv(m.norm(x)).chunk(3, -1)
    return x + m.out((q @ k.mT / 4).softmax(-1) @ v)


@dataclasses.dataclass
class Handed:
    """What Dynamo hands over of a model, and the facts of a training at O2 in FP16."""

    model: nn.Module
    inputs: tuple[torch.Tensor, ...]
    gm: fx.GraphModule = dataclasses.field(init=False)
    examples: Sequence[Any] = ()
    settings: Settings = dataclasses.field(
        default_factory=lambda: Settings.parse({"dtype": torch.float16, "level": "O2"})
    )

    def __post_init__(self) -> None:
        self.optimizer = MPOptimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

        def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Any:
            self.gm, self.examples = gm, list(examples)
            self.facts = training_of(gm, examples, self.settings).facts
            return gm.forward

        torch.compile(self.model, backend=backend, fullgraph=True)(*self.inputs)

    def planned(self) -> Planned:
        return plan_graph(self.gm, self.examples, self.facts, self.settings)


@pytest.fixture
def convolutions() -> Handed:
    return Handed(pictures(), (MODELS[pictures](),))


@pytest.fixture
def attention() -> Handed:
    layers = {"norm": nn.LayerNorm(16), "qkv": nn.Linear(16, 48), "out": nn.Linear(16, 16)}
    return Handed(module_of(attend, **layers), (torch.randn(2, 6, 16),))


def shown(planned: Planned) -> tuple[Any, ...]:
    """All that a plan is, but for the seconds that it took."""
    graphs = planned.graph, planned.captured, planned.rewritten
    texts = [ir.render(one.graph, reasons=True) for one in graphs]
    return dataclasses.replace(planned.plan, seconds={}), planned.inputs, texts


def at_once(*functions: Callable[[], Planned]) -> list[Planned]:
    """Run each in a thread of its own; all begin together."""
    made: dict[int, Planned] = {}
    together = threading.Barrier(len(functions))

    def run(number: int) -> None:
        together.wait()
        made[number] = functions[number]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [made[number] for number in range(len(functions))]


def test_different_graphs_in_two_threads(convolutions: Handed, attention: Handed) -> None:
    alone = [shown(convolutions.planned()), shown(attention.planned())]
    assert alone[0] != alone[1]
    for _ in range(3):
        assert [*map(shown, at_once(convolutions.planned, attention.planned))] == alone


def test_one_graph_in_two_threads(attention: Handed) -> None:
    alone = shown(attention.planned())
    for _ in range(3):
        assert [*map(shown, at_once(attention.planned, attention.planned))] == [alone, alone]


def test_the_modes_of_the_thread_do_not_matter(attention: Handed) -> None:
    """The facts say what they were when Dynamo handed over the graph."""
    wanted = shown(attention.planned())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert shown(attention.planned()) == wanted
        assert not torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")


# -- what is not touched ---------------------------------------------------------------------------


def held_by_modules() -> Iterator[tuple[str, str]]:
    """What modules of `mpcompile.scaling` hold, as text, so that a change inside shows."""
    for info in pkgutil.iter_modules(scaling.__path__):
        module = importlib.import_module(f"mpcompile.scaling.{info.name}")
        for name, value in vars(module).items():
            if isinstance(value, (Mapping, Sequence, Set)) and not name.startswith("__"):
                whole = list(value.items() if isinstance(value, Mapping) else value)
                yield f"{info.name}.{name}", repr(whole)


def test_no_state_is_touched(attention: Handed) -> None:
    inputs = [x.clone() for x in attention.examples]
    notes = [{**vars(x)} for x in attention.examples]
    before, text = dict(held_by_modules()), attention.gm.print_readable(print_output=False)
    metas = [(node.name, {**node.meta}) for node in attention.gm.graph.nodes]
    random = torch.get_rng_state()
    planned = attention.planned()
    assert planned.inputs.scaled
    assert planned.inputs.copies
    assert dict(held_by_modules()) == before
    assert attention.gm.print_readable(print_output=False) == text
    assert [(node.name, {**node.meta}) for node in attention.gm.graph.nodes] == metas
    assert planned.graph is not attention.gm
    assert torch.equal(torch.get_rng_state(), random)
    for now, then in zip(attention.examples, inputs, strict=True):
        assert torch.equal(now, then)
    assert [{**vars(x)} for x in attention.examples] == notes
