"""Derivatives that a program takes inside of itself, written out as operators.

    g = torch.autograd.grad(f(x, w).sum(), x, create_graph=True)[0]        mm, tanh, sum,
    g = torch.func.grad(lambda x: f(x, w).sum())(x)                 ->     ones_like, expand,
    g = torch.vmap(lambda row: f(row, w))(x)                               tanh_backward, mm

Such a derivative is a stretch of Dynamo's graph: from the entry of a transform of functorch to its
exit, or from the first reader of what is differentiated by to the call that differentiates. The
stretch is run once on FakeTensors, all its levels and its inner backward with it, and what reaches
the level of the program is recorded: a plain sequence of operators, some of them those of a
backward. That sequence takes the place of the stretch, and is captured like the rest. So no pass
and no rule knows of transforms, and inner gradients are values like others.

What autograd makes of the sequence must be what it made of the stretch, or a gradient of the
gradient would be lost or wrong. So both are compared, function by function (`history.derivation`).
It holds because every operator is recorded below autograd, whose formulas are those of operators.
One thing is not the program's: autograd detaches a result that it saves. These detaches are left
out, and only the program's own are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx

from ..errors import CannotRewrite, MPCompileError
from ..ir import Section, aten, is_inner_gradient, op_name
from ..ir.targets import AUTOCAST, CHECKPOINT, INVOKE_SUBGRAPH, differentiates, nesting
from ..ir.units import is_tracked, twin
from ..torch_inside.names import (
    GET_DATA,
    HigherOrderOperator,
    TorchDispatchMode,
    is_functorch_wrapped_tensor,
    pytree,
    set_grad_enabled,
    torch_functions_off,
    unwrap_if_dead,
)
from .history import derivation, recorded
from .place import InFP32, ReplayState

_ZEROS = "aten::_efficientzerotensor"
_DETACHES = ("detach", "detach_")


def stretches(graph: fx.Graph) -> dict[fx.Node, Section]:
    """Each node of a derivative -> its stretch: adjacent nodes that are written out together."""
    nodes = list(graph.nodes)
    found: dict[fx.Node, Section] = {}
    for start, end in _joined(sorted(_spans(nodes))):
        stretch = Section.of(nodes[start : end + 1])
        found.update(dict.fromkeys(stretch.nodes, stretch))
    return found


def _spans(nodes: Sequence[fx.Node]) -> Iterator[tuple[int, int]]:
    """The numbers of the first and last node of each transform and each call of `grad`."""
    order = {node: i for i, node in enumerate(nodes)}
    entered: list[int] = []
    for i, node in enumerate(nodes):
        if (change := nesting(node)) > 0:
            entered.append(i)
        elif change < 0:
            yield entered.pop(), i
        if (inputs := differentiates(node)) is not None:
            made = [n for n in inputs if n.op not in ("placeholder", "get_attr")]
            read = (user for n in inputs for user in n.users)
            yield min(order[n] for n in (*made, *read)), i


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans in order, those that overlap as one."""
    joined: list[tuple[int, int]] = []
    for start, end in spans:
        if joined and start <= joined[-1][1]:
            start, end = joined[-1][0], max(end, joined.pop()[1])
        joined.append((start, end))
    return joined


def write_out(
    gm: fx.GraphModule, stretch: Section, given: Sequence[Any], place: ReplayState
) -> dict[fx.Node, Any]:
    """Run a stretch under the tracer, as operators.

    Args:
        gm: Dynamo's graph.
        given: the values of the stretch's inputs.
        place: where it stands in the program.

    Returns:
        The values of the stretch's outputs.

    Raises:
        CannotRewrite: it can't be written out exactly; says what.
        MPCompileError: torch itself would get it wrong.
    """
    for node in stretch.nodes:
        if node.target in AUTOCAST:
            raise CannotRewrite("an autocast region begins or ends inside of a derivative")
    _check_functions(gm, stretch, given)
    leaves, structure = pytree.tree_flatten(list(given))
    live = _Live(gm, place)
    made: list[Any] = []

    def program(*values: Any) -> Any:
        results = live.results(stretch, pytree.tree_unflatten(list(values), structure))
        made.extend(results)
        return tuple(results)

    entered = torch.is_grad_enabled()
    with disable_proxy_modes_tracing(), torch_functions_off():
        twins = [twin(value, tracked=is_tracked(value)) for value in leaves]
        # Without a table, torch 2.14 records a detach as an alias.
        traced = make_fx(
            program, decomposition_table={}, tracing_mode="real", _allow_non_fake_inputs=True
        )(*twins)
        left = torch.is_grad_enabled()
        set_grad_enabled(entered)
    _drop_detaches(traced.graph)
    traced.recompile()
    results = _AsOperators(traced).run(*leaves)
    if torch.is_grad_enabled() is not left:
        set_grad_enabled(left)
    known: dict[Any, int] = {}
    there, here = (pytree.tree_leaves(list(values)) for values in (made, results))
    if derivation(there, twins, known) != derivation(here, leaves, known):
        raise CannotRewrite(
            "a derivative inside of the program has another one when it is written out"
        )
    return dict(zip(stretch.outputs, results, strict=True))


def _check_functions(gm: fx.GraphModule, stretch: Section, given: Sequence[Any]) -> None:
    """Refuse a user's autograd.Function that a stretch differentiates through, if the derivative
    has one of its own. Dynamo keeps the backward of the function as a graph, which torch runs
    without a history (read in 2.13): that derivative would lack a term, compiled unchanged as well.

    Raises:
        MPCompileError: there is one.
    """
    if not is_tracked(list(given)) or not any(map(differentiates, stretch.nodes)):
        return
    bodies = [getattr(gm, str(n.target), None) for n in stretch.nodes if n.op == "get_attr"]
    modules = [m for b in bodies if isinstance(b, fx.GraphModule) for m in b.modules()]
    inner = [n for m in modules if isinstance(m, fx.GraphModule) for n in m.graph.nodes]
    for node in (*stretch.nodes, *inner):
        if op_name(node).endswith("autograd_function_apply"):
            raise MPCompileError(
                "a torch.autograd.Function is inside of a derivative that is differentiated "
                "itself, and torch's compiler would lose a part of its gradient: write the "
                "function with torch's operators, or leave what holds it uncompiled"
            )


class _Live(InFP32):
    """Runs a stretch as Dynamo wrote it, with the levels of its transforms and its inner backwards,
    under a tracer that records what reaches the level of the program.
    """

    def results(self, stretch: Section, given: Sequence[Any]) -> list[Any]:
        """The values of the stretch's outputs."""
        self.env = dict(zip(stretch.inputs, given, strict=True))
        read = (n for node in stretch.nodes for n in node.all_input_nodes if n.op == "get_attr")
        self.env |= {node: self.run_node(node) for node in read}
        with _Noting():  # type: ignore[no-untyped-call]
            for node in stretch.nodes:
                with recorded() as made, self._set_current_node(node):
                    self.env[node] = self.run_node(node)
                for new in made:
                    if differentiates(node) is not None:
                        is_inner_gradient.set(new, True)
                    if new.target is aten.detach.default and _detaches(node):
                        new.meta["mp_detaches"] = True
        # What autograd made of a level after its end, as the pullback of a vjp does.
        results = pytree.tree_map_only(
            torch.Tensor, unwrap_if_dead, [self.env[node] for node in stretch.outputs]
        )
        for value in pytree.tree_leaves(results):
            if isinstance(value, torch.Tensor) and is_functorch_wrapped_tensor(value):
                raise CannotRewrite("a value leaves a transform of torch.func by another way")
        found: list[Any] = results
        return found

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in (CHECKPOINT, INVOKE_SUBGRAPH):  # its values are kept: it has its backward here
            body, *operands = args
            operands = operands[1:] if target is INVOKE_SUBGRAPH else operands
            return fx.Interpreter(body).run(*operands)
        return super().call_function(target, args, kwargs)


class _Noting(TorchDispatchMode):
    """Notes at each operator that is recorded which grad mode it ran in.

    The zeros of forward mode, which have no memory, are plain ones here: what is computed with
    such a zero is left out below autograd, where it is recorded.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = aten.zeros.default if func.name() == _ZEROS else func
        with recorded() as made:
            result = func(*args, **(kwargs or {}))
        for node in made:
            node.meta["mp_grad"] = torch.is_grad_enabled()
        return result


class _AsOperators(fx.Interpreter):
    """Runs what was recorded, each operator in its grad mode."""

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        if isinstance(n.target, HigherOrderOperator):
            raise CannotRewrite(f"{n.target} inside of a derivative")
        mode = n.meta.get("mp_grad", torch.is_grad_enabled())
        if mode is not torch.is_grad_enabled():
            set_grad_enabled(mode)
        with recorded() as made:
            result = super().run_node(n)
        if is_inner_gradient(n):
            for node in made:
                is_inner_gradient.set(node, True)
        return result


def _drop_detaches(graph: fx.Graph) -> None:
    """Leave out the detaches that autograd makes of results that it saves."""
    for node in graph.find_nodes(op="call_function", target=aten.detach.default):
        if "mp_detaches" not in node.meta:
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _detaches(node: fx.Node) -> bool:
    """Whether a node of Dynamo's graph detaches a value."""
    if differentiates(node) is not None:
        return False
    return node.target in _DETACHES or node.target in (torch.detach, torch.detach_, GET_DATA)
