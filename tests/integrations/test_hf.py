"""Ten architectures of transformers: `explain`, `diagnose`, and an overflow in a random layer."""

import random
import zlib
from typing import Any

import pytest
import torch
from torch import nn

from mpcompile import diagnose, explain

pytest.importorskip("transformers")
from benchmarks.zoo.catalogue import HUGGING_FACE

NAMES = (
    "gpt2", "llama", "mistral", "qwen3", "opt", "bert", "distilbert", "t5", "vit", "wav2vec2",
)  # fmt: skip
REST = pytest.mark.sweep("the zoo of transformers")

# torch warns, while Dynamo traces transformers, of what transformers does.
pytestmark = pytest.mark.filterwarnings("ignore")

SAMPLE = ("gpt2", "vit")
EACH = [pytest.param(name, marks=[] if name in SAMPLE else REST) for name in NAMES]


def made(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """The model, and the arguments of a call that computes its loss."""
    entry = HUGGING_FACE[name]
    torch.manual_seed(0)
    return entry.build(), entry.draw(torch.Generator().manual_seed(1))


@pytest.mark.slow("models of transformers")
@pytest.mark.parametrize("name", EACH)
def test_it_is_explained(name: str) -> None:
    model, inputs = made(name)
    plan = explain(model, dtype=torch.float16, **inputs)
    assert not plan.left
    products = [node for node in plan.nodes if node.op in ("aten::linear", "aten::addmm")]
    assert products
    assert {node.precision for node in products} == {"LOW"}
    assert all(node.source and node.module for node in products)
    assert any(graph.backward for graph in plan.graphs)


@pytest.mark.slow("models of transformers")
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", EACH)
def test_a_sound_model_has_no_fault(name: str, level: str) -> None:
    model, inputs = made(name)
    report = diagnose(model, dtype=torch.float16, level=level, **inputs)
    assert report.faults == ()
    assert report.losses["low"] == pytest.approx(report.losses["fp64"], rel=0.01)


@pytest.mark.slow("models of transformers")
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", EACH)
def test_an_overflow_in_a_random_layer_is_named(name: str, level: str) -> None:
    model, inputs = made(name)
    path = overflow_somewhere(model, inputs, random.Random(zlib.crc32(f"{name} {level}".encode())))
    report = diagnose(model, dtype=torch.float16, level=level, **inputs)
    assert (report.first.kind.value, report.first.node.module) == ("overflow", path)
    assert report.first.node.source


def overflow_somewhere(model: nn.Module, inputs: dict[str, Any], dice: random.Random) -> str:
    """Make the weight of a random layer so large that its result leaves FP16's range, while the
    weight itself fits. Returns the layer's path.
    """
    sizes: dict[str, float] = {}

    def note(path: str) -> Any:
        def hook(module: nn.Module, args: Any, result: torch.Tensor) -> None:
            sizes[path] = float(result.detach().abs().max())

        return hook

    layers = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    }
    handles = [module.register_forward_hook(note(path)) for path, module in layers.items()]
    model(**inputs)
    for handle in handles:
        handle.remove()
    most = {path: float(layers[path].weight.detach().abs().max()) for path in sizes}
    path = dice.choice(sorted(path for path in sizes if 3 * most[path] < sizes[path]))
    with torch.no_grad():
        layers[path].weight.mul_(2 * 65504 / sizes[path])
    return path
