"""What is tried where a compiled graph is wrong, in the order in which it costs.

1. Another flag for the C++ compiler. g++ 11 and 12 make a wrong copy of a tile (`torch_faults.py`).
2. Every rounding that the graph asks for, at that place: a kernel keeps FP32 otherwise.
3. The operators around the wrong values left out of the compiled graph, and run one by one.
4. The whole graph operator by operator.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..devices.torch_faults import GCC_FLAG
from ..torch_inside.inductor import setting
from ..torch_inside.ops import schema_of
from .case import Case
from .reference import is_product

__all__ = ["CURES", "Cure", "laid_out"]

Function = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Cure:
    """One way to compile a graph that came out wrong.

    Attributes:
        name: in a file of verdicts.
        about: what is done, behind "cured by".
        settings: of Inductor's.
        apart: "wrong": the operators around the wrong values are run one by one; "all": all are.
    """

    name: str
    about: str
    settings: Callable[[], Mapping[str, Any]] = dict
    apart: str = ""

    def function(self, case: Case, wrong: Collection[str]) -> Function | None:
        """The graph as this cure compiles it: a function of a list of its inputs.

        Args:
            case: the graph.
            wrong: the names of the nodes whose values are wrong.

        Returns:
            None where it can't be done.
        """
        if self.apart == "all":
            return _one_by_one(case.gm)
        if self.apart == "wrong":
            return _around(case, wrong)
        return _callable(case.compiled(self.settings()))


def _flag() -> Mapping[str, Any]:
    name = "cpp.enable_floating_point_contract_flag"
    return {name: f"{setting(name)} {GCC_FLAG}"}


CURES = (
    Cure("flag", f"the C++ compiler's flag {GCC_FLAG}", _flag),
    Cure("roundings", "emulate_precision_casts", lambda: {"emulate_precision_casts": True}),
    Cure("apart", "running the operators around it one by one", apart="wrong"),
    Cure("uncompiled", "running this graph operator by operator", apart="all"),
)


def _callable(compiled: Any) -> Function:
    found: Function = getattr(compiled, "current_callable", None) or compiled
    return _owning(found, compiled)


def _owning(function: Function, owner: Any) -> Function:
    """The function, with its owner kept alive: it takes down what the function calls."""

    def run(inputs: list[Any]) -> Any:
        return function(inputs)

    run.owner = owner  # type: ignore[attr-defined]
    return run


def _one_by_one(gm: fx.GraphModule) -> Function:
    gm = fx.GraphModule(gm, gm.graph)

    def run(inputs: list[Any]) -> Any:
        given = list(inputs)
        inputs.clear()
        with torch.no_grad():
            return list(fx.Interpreter(gm).boxed_run(given))

    return run


_MOST = 400
"""Operators that are left out at most; more is no part of a graph."""


def _around(case: Case, wrong: Collection[str]) -> Function | None:
    """The graph without the operators that lead from products and inputs to the wrong values."""
    outputs = case.outputs
    asked = [n for n in outputs if isinstance(n, fx.Node) and n.name in wrong]
    if len(asked) < len(wrong):
        return None  # an input is written wrongly
    region, ahead = set(asked), list(asked)
    while ahead:
        for node in ahead.pop().all_input_nodes:
            if node not in region and _may_be_apart(node):
                region.add(node)
                ahead.append(node)
    if len(region) > min(_MOST, sum(n.op == "call_function" for n in case.gm.graph.nodes) - 1):
        return None
    edge = list(dict.fromkeys(
        n for node in case.gm.graph.nodes if node in region
        for n in node.all_input_nodes if n not in region
    ))  # fmt: skip
    rest = [n for n in outputs if not (isinstance(n, fx.Node) and n in region)]
    made = [n for n in edge if n.op not in ("placeholder", "get_attr")]
    compiled = _callable(case.compiled({}, _returning(case.gm, [*rest, *made])))
    places = case.gm.graph.find_nodes(op="placeholder")
    own = [(number, n) for number, n in enumerate(places) if n in edge]
    constants = {n: getattr(case.gm, str(n.target)) for n in edge if n.op == "get_attr"}
    order = [node for node in case.gm.graph.nodes if node in region]
    interpreter = fx.Interpreter(case.gm, garbage_collect_values=False)

    def run(inputs: list[Any]) -> Any:
        env = {node: inputs[number] for number, node in own} | constants
        found = list(compiled(inputs))
        env.update(zip(made, found[len(rest) :], strict=True))
        interpreter.env = env
        with torch.no_grad():
            for node in order:
                env[node] = interpreter.run_node(node)
        left = iter(found)
        return [env[n] if isinstance(n, fx.Node) and n in region else next(left) for n in outputs]

    return run


def _may_be_apart(node: fx.Node) -> bool:
    drawn = str(node.target).startswith(("prims.inductor_", "inductor_prims"))
    return node.op == "call_function" and not is_product(node) and not drawn


def _returning(gm: fx.GraphModule, results: Sequence[Any]) -> fx.GraphModule:
    """The same graph with other results."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(gm.graph, env)
    output = graph.output(tuple(env[n] if isinstance(n, fx.Node) else n for n in results))
    output.meta["user_visible_output_idxs"] = list(range(len(results)))
    graph.eliminate_dead_code(lambda n: n.is_impure() or _writes(n))
    return fx.GraphModule(gm, graph)


def _writes(node: fx.Node) -> bool:
    schema = schema_of(node.target)
    return node.op in ("placeholder", "output") or bool(schema and schema.is_mutable)


def laid_out(values: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    """Values with the strides of others, as what reads them was compiled for."""
    return [_strided(value, other) for value, other in zip(values, like, strict=True)]


def _strided(value: Any, like: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not isinstance(like, torch.Tensor):
        return value
    if value.stride() == like.stride() or value.shape != like.shape:
        return value
    return torch.empty_strided(
        like.shape, like.stride(), dtype=value.dtype, device=value.device
    ).copy_(value)
