"""The layout of a graph's inputs: read off the graph, and what a call is assembled from."""

import pytest
import torch
import torch.nn.functional as F
from compare import leaf
from graphs import Stage

from mpcompile.ir.inputs import FOUND, SCALE, GraphInputs
from mpcompile.passes.graph.scale_gradients import scale_gradients


def program(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """`w` is read low alone, `v` in FP32 as well."""
    return F.linear(F.linear(x, w), v).exp() + v.sum()


def stage(scaled: bool, copied: dict[int, None]) -> Stage:
    inputs = torch.randn(3, 4), leaf(4, 4), leaf(4, 4)
    found = Stage(scale_gradients, program, *inputs, level="O2", scaled=scaled, copied=copied)
    found.run()
    return found


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    ("copied", "copies", "names"),
    [
        ({}, {}, []),
        ({1: None}, {1: 1}, []),
        ({1: None, 2: None}, {1: 1, 3: 2}, ["v_copy"]),
        ({2: None}, {3: 2}, ["v_copy"]),
    ],
)
def test_the_layout_of_a_graph(
    scaled: bool, copied: dict[int, None], copies: dict[int, int], names: list[str]
) -> None:
    graph = stage(scaled, copied).gm.graph
    found = [n.name for n in graph.find_nodes(op="placeholder")]
    assert found[3:] == names + [SCALE, FOUND] * scaled
    assert GraphInputs.of(graph) == GraphInputs(3, copies, scaled)


def test_a_call_is_assembled() -> None:
    inputs = GraphInputs(3, {1: 1, 3: 2}, scaled=True)
    given, copies, scaling = ["x", "w", "v"], ["w_low", "v_low"], ["scale", "found"]
    call = inputs.assembled(given, copies, scaling)
    assert call == ["x", "w_low", "v", "v_low", "scale", "found"]
    assert given == ["x", "w", "v"]
    assert inputs.scaling_apart(call) == (["x", "w_low", "v", "v_low"], "scale", "found")


def test_without_extra_inputs_a_call_stays_as_it_is() -> None:
    assert GraphInputs(2).assembled(("x", "w")) == ["x", "w"]


def test_copies_are_as_many_as_the_graph_reads() -> None:
    with pytest.raises(ValueError, match="shorter"):
        GraphInputs(3, {1: 1, 3: 2}).assembled(["x", "w", "v"], ["w_low"])
