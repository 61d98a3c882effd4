"""Keeps what autograd knows of a value through the replay: the node it is, and its backward."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, set_proxy_slot

from ..ir import is_getitem, written
from ..ir.units import between, grad_fns, is_tracked
from ..torch_inside.names import pytree


def current_tracer() -> Any:
    """The tracer that records the graph now."""
    mode = get_proxy_mode()
    assert mode is not None
    return mode.tracer


@contextlib.contextmanager
def recorded() -> Iterator[list[fx.Node]]:
    """The nodes that are recorded in this context, the last one first; known once it has ended."""
    nodes, made = current_tracer().graph.nodes, list[fx.Node]()
    before = len(nodes)
    yield made
    made += itertools.islice(reversed(nodes), len(nodes) - before)


@contextlib.contextmanager
def known_as_before(operands: Any) -> Iterator[None]:
    """Keep the tracer's nodes of the operands. An operator that returns its operand
    (`broadcast_tensors`, `contiguous`) makes no new value, but the tracer would from then on take
    the operand for the new node; if that was made under no_grad, later nodes would lose their
    history. (A value that is written in place does get the new node.)
    """
    if torch.is_grad_enabled():
        yield
        return
    tracer = current_tracer()
    tensors = [v for v in pytree.tree_leaves(operands) if isinstance(v, torch.Tensor)]
    before = [(tensor, get_proxy_slot(tensor, tracer, None)) for tensor in tensors]
    yield
    for tensor, known in before:
        now: Any = get_proxy_slot(tensor, tracer, None)
        if known is None or now is known:
            continue
        node = now.proxy.node
        while is_getitem(node):
            node = node.all_input_nodes[0]
        if not written(node):
            set_proxy_slot(tensor, tracer, known)


def derivation(values: Any, inputs: Any, known: dict[Any, int]) -> list[int | None]:
    """How autograd derives from `inputs` the gradients of `values`: a number for each value, equal
    for equal ones; None: it has none. Two derivations are equal where the same functions, in the
    same order, lead from each value to each input. What leads to no input doesn't count.

    Args:
        known: what the numbers stand for; the same for all that are compared.
    """

    def edge_of(value: Any) -> tuple[Any, int]:
        if not is_tracked(value):
            return None, 0
        edge = torch.autograd.graph.get_gradient_edge(value)
        return edge.node, edge.output_nr

    stops: dict[Any, Any] = {}
    for i, value in enumerate(inputs):
        if is_tracked(value):
            stops.setdefault(edge_of(value), ("input", i))
    numbers: dict[Any, int | None] = {}

    def way(edge: tuple[Any, int]) -> Any:
        if edge[0] is None or edge in stops:
            return stops.get(edge)
        return None if (number := numbers[edge[0]]) is None else (number, edge[1])

    def numbered(grad_fn: Any) -> int | None:
        ways = tuple(map(way, grad_fn.next_functions))
        if not any(ways):
            return None
        return known.setdefault((grad_fn.name(), ways), len(known))

    edges = [edge_of(value) for value in values]
    queue = [edge for edge in edges if edge[0] is not None and edge not in stops]
    while queue:
        grad_fn = queue[-1][0]
        parents = [e for e in grad_fn.next_functions if e[0] is not None and e not in stops]
        missing = [e for e in parents if e[0] not in numbers]
        if not missing:
            numbers[grad_fn] = numbered(grad_fn)
            queue.pop()
        queue += missing
    return [known.setdefault(found, len(known)) if (found := way(e)) else None for e in edges]


def has_custom_backward(result: Any, known: set[Any]) -> bool:
    """Whether a user's autograd.Function stands in the history between `known` and the result.

    Our graph would hold only its forward. (The function of a custom operator is torch's own, and
    the operator itself stands in our graph.)
    """
    for grad_fn in between(grad_fns(result), known):
        custom = isinstance(grad_fn, torch.autograd.function.BackwardCFunction)
        if custom and not grad_fn.name().startswith("GeneratedBackwardFor_"):
            return True
    return False
