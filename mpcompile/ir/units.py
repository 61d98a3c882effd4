"""Proof, for each graph that is emitted, that gradients carry the loss scale where they should: the
loss scale is a unit, and every gradient in a graph carries it to the power 0 or 1.

Autograd itself tells the paths of gradients: the graph is run once on FakeTensors, with its
in-place writes, views and `no_grad`. That gives the nodes of the backward graph that AOTAutograd
will derive. One fact of mathematics then suffices: the backward of a differentiable operator is
linear in its gradients, so it passes on the unit that it receives.

    leaves the graph's outputs, and inputs it wrote     scale^0
    scale_grad, backward                                scale^0 -> scale^1
    unscale_grad, backward                              scale^1 -> scale^0
    backward code that may not be linear                scale^0 only
    any other node                                      passes on; all it receives must agree
    arrives at an input                                 scale^0; at a working copy     scale^1

If two different units would be added, or a wrong one would arrive, `complaints` says so, and the
graph is not emitted.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from graphlib import TopologicalSorter
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from .. import ir
from ..operators import library
from ..rules import RNN_OPS
from ..torch_inside.names import DataDependentOutputException, enable_python_dispatcher, pytree
from ..torch_inside.tensors import function_of
from .fakes import like
from .inputs import GraphInputs

# A node of autograd's graph. Python makes the object again unless it is referenced: we keep all.
GradFn = Any


class _Stand(torch.autograd.Function):
    """Stands in for a call that is not run: gives its results, tracked by autograd or not."""

    @staticmethod
    def forward(
        ctx: Any, results: list[tuple[torch.Tensor, bool]], *operands: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.mark_non_differentiable(*(value for value, tracked in results if not tracked))
        return tuple(value for value, _ in results)


class History(fx.Interpreter):
    """What autograd records of a graph that is run once on FakeTensors.

    Attributes:
        reads: (node, operand) -> whether autograd tracked the operand as the node read it. A tensor
            made without a gradient is tracked once something tracked is written into it.
        made: node -> whether autograd tracked its result when it was made.
        final: input -> whether autograd tracks what it holds when the graph returns.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.reads: dict[tuple[fx.Node, fx.Node], bool] = {}
        self.made: dict[fx.Node, bool] = {}
        self.inputs: dict[fx.Node, GradFn] = {}
        self.origin: dict[GradFn, fx.Node] = {}
        self.exact: set[GradFn] = set()  # nodes whose gradients must be unscaled
        self.node: fx.Node
        fake_mode = ir.fake_mode(gm.graph)
        shapes = fake_mode.shape_env
        with (
            fake_mode,
            mock.patch.object(fake_mode, "allow_non_fake_inputs", True),  # constants of the graph
            enable_python_dispatcher(),
            torch.enable_grad(),  # the graph may end in another mode
            shapes.ignore_fresh_unbacked_symbols() if shapes else contextlib.nullcontext(),
            # The sizes it asks about, AOTAutograd will ask about when it traces: add no guards now.
            shapes.suppress_guards() if shapes else contextlib.nullcontext(),
        ):
            self.run(*(None for _ in gm.graph.find_nodes(op="placeholder")))
        placeholders = gm.graph.find_nodes(op="placeholder")
        self.final = {node: is_tracked(self.env[node]) for node in placeholders}

    def run_node(self, n: fx.Node) -> Any:
        """Run one node; note what autograd tracks before and after it."""
        self.node = n
        for operand in n.all_input_nodes:
            self.reads[n, operand] = is_tracked(self.env[operand])
        operands = [self.env[operand] for operand in n.all_input_nodes]
        self._note(operands)  # a view of a written tensor gets its history on access
        result = super().run_node(n)
        if n.op != "output":
            self.made[n] = is_tracked(result)
            new = self._note([result, *operands])  # a written operand has new nodes too
            if ir.backward_is_unknown(n):
                self.exact.update(new)
        return result

    def is_as_it_came(self, node: fx.Node) -> bool:
        """Whether the node is an input that needs a gradient, and autograd saw no write to it."""
        return node in self.inputs and self.env[node].grad_fn is self.inputs[node]

    def roots(self) -> list[GradFn]:
        """Where gradients enter: at the results, and at inputs that the graph wrote to, whose final
        values the caller sees, too.
        """
        written = [n for n, tracked in self.final.items() if tracked and not self.is_as_it_came(n)]
        results = self.env[self.graph.output_node()]
        return list(grad_fns([results, *(self.env[n] for n in written)]))

    def reached(self) -> set[fx.Node]:
        """The inputs that a gradient may reach."""
        arrived = set(_in_order(self.roots(), stop=set(self.inputs.values())))
        return {node for node, grad_fn in self.inputs.items() if grad_fn in arrived}

    def shares_memory(self, a: fx.Node, b: fx.Node) -> bool:
        """Whether the values of two nodes, or parts of them, lie in the same memory."""
        return not ir.memory(self.env[a]).isdisjoint(ir.memory(self.env[b]))

    def _note(self, values: Any) -> set[GradFn]:
        """Note which node of the graph made the nodes of autograd's graph after some values;
        returns the new ones.
        """
        new = set(between(grad_fns(values), self.origin))
        self.origin.update(dict.fromkeys(new, self.node))
        return new

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A fresh twin of the input. It is no leaf: the graph may write to it."""
        value = self.node.meta.get("val")
        result = twin(value, tracked=ir.requires_grad(self.node))
        if is_tracked(result):
            self.inputs[self.node] = result.grad_fn
        return result

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A constant: a fake too, because the graph may write to it."""
        value = self.node.meta.get("val")
        if isinstance(value, torch.Tensor):
            return _like(value)
        return super().get_attr(target, args, kwargs)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A call of a method occurs only in an opaque part of the graph: use a stand-in."""
        return self._stand_in(args, kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator, or use a stand-in for one that can't be run here."""
        if ir.is_opaque(self.node) or target in RNN_OPS:
            return self._stand_in(args, kwargs)
        value = self.node.meta.get("val")
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return value  # a result of `.item()`: keep the same symbol
        try:
            return super().call_function(target, args, kwargs)
        except (GuardOnDataDependentSymNode, DataDependentOutputException):
            # Sizes that depend on values, which a new fake doesn't have. Stand-ins of the results
            # share no memory with the operands, so use them only if the graph writes nothing.
            if any(map(ir.written, self.node.graph.nodes)):
                raise
            return self._stand_in(args, kwargs)

    def _stand_in(self, args: Any, kwargs: Any) -> Any:
        """Results as captured; the gradient of each result reaches every operand."""
        operands = [v for v in pytree.tree_leaves((args, kwargs)) if is_tracked(v)]
        for operand in ir.written(self.node):
            target = self.env[operand]
            if isinstance(target, torch.Tensor) and operands and target.is_floating_point():
                (new,) = _Stand.apply([(_like(target), True)], *operands)  # type: ignore[no-untyped-call]
                target.copy_(new)
        flags = self._differentiable()
        leaves, structure = pytree.tree_flatten(self.node.meta.get("val"))
        results = [(_like(leaf), flags(i)) for i, leaf in enumerate(leaves)]
        tensors = [(value, flag) for value, flag in results if isinstance(value, torch.Tensor)]
        if operands and tensors:
            made = iter(_Stand.apply(tensors, *operands))  # type: ignore[no-untyped-call]
            results = [(next(made) if isinstance(v, torch.Tensor) else v, f) for v, f in results]
        return pytree.tree_unflatten([value for value, _ in results], structure)

    def _differentiable(self) -> Callable[[int], bool]:
        """Which results of the node have a gradient as soon as an operand has one."""
        if ir.tensor(self.node) is not None:
            return lambda i: ir.requires_grad(self.node)
        parts = [user for user in self.node.users if ir.is_getitem(user)]
        noted = {part.args[1]: ir.requires_grad(part) for part in parts}
        return lambda i: noted.get(i, False)


def complaints(gm: fx.GraphModule, recorded: Callable[[], History]) -> Iterator[str]:
    """The errors in the units of the gradients of a graph whose loss scale is in place."""
    if not GraphInputs.of(gm.graph).scaled:
        return
    _check_names()
    history = recorded()
    arriving: dict[GradFn, set[int]] = defaultdict(set)
    for root in history.roots():
        arriving[root].add(0)
    wanted = {history.inputs[n]: int(ir.copy_of(n) is not None) for n in history.inputs}
    names = {grad_fn: node.name for grad_fn, node in history.origin.items()}
    names |= {grad_fn: node.name for node, grad_fn in history.inputs.items()}
    for grad_fn in _in_order([*arriving], stop=wanted.keys()):
        where = names.get(grad_fn) or grad_fn.name()
        units = arriving[grad_fn]
        if len(units) > 1:
            yield f"gradients with and without the loss scale are added at {where}"
            return
        (unit,) = units
        if grad_fn in wanted:
            if unit != wanted[grad_fn]:
                power = wanted[grad_fn]
                yield f"the gradient of {where} leaves with scale^{unit}, not scale^{power}"
            continue
        step = _STEPS.get(function_of(grad_fn), 0)
        if grad_fn in history.exact and unit != 0:
            yield f"{where} is not linear in its gradient, and receives it with scale^{unit}"
        elif unit + step not in (0, 1):
            yield f"the gradient at {where} would carry scale^{unit + step}"
            return
        for parent in _parents(grad_fn):
            arriving[parent].add(unit + step)
    unscale = torch.ops.mpcompile.unscale_grad.default
    for node, grad_fn in history.inputs.items():
        if grad_fn not in arriving and any(user.target is unscale for user in node.users):
            yield f"the gradient of {node.name} is unscaled, but no scaled one is known to reach it"


_STEPS: dict[Any, int] = {library.ScaleGrad: 1, library.UnscaleGrad: -1}


@functools.cache
def _check_names() -> None:
    """Raise where `function_of` no longer knows a function: every unit would be counted as 0."""
    scale = torch.ones(())
    known = function_of(library.ScaleGrad.apply(torch.ones((), requires_grad=True), scale).grad_fn)  # type: ignore[no-untyped-call]
    if known is not library.ScaleGrad:
        raise RuntimeError(
            f"torch {torch.__version__} doesn't tell which autograd.Function a node belongs to"
        )


def _in_order(roots: Iterable[GradFn], stop: Collection[GradFn]) -> Iterator[GradFn]:
    """The nodes of autograd's graph, each after all nodes that pass gradients to it."""
    order = TopologicalSorter[GradFn]()

    def parents(grad_fn: GradFn) -> list[GradFn]:
        return [] if grad_fn in stop else _parents(grad_fn)

    for grad_fn in ir.reached(roots, parents):
        order.add(grad_fn)
        for parent in parents(grad_fn):
            order.add(parent, grad_fn)
    return iter(order.static_order())


def _parents(grad_fn: GradFn) -> list[GradFn]:
    """The nodes that this one passes gradients to."""
    return [parent for parent, _ in grad_fn.next_functions if parent is not None]


def twin(value: Any, *, tracked: bool) -> Any:
    """A new tensor of the same layout, tracked by autograd or not. It is no leaf: a program may
    write to it. What is no tensor is returned as it is.
    """
    new = _like(value)
    if not (tracked and isinstance(new, torch.Tensor)):
        return new
    with torch.enable_grad():
        leaf = torch.empty_like(new, requires_grad=True)
        (result,) = _Stand.apply([(new, True)], leaf)  # type: ignore[no-untyped-call]
    return result


def is_tracked(value: Any) -> bool:
    """Whether autograd tracks a value, or something in it, at any depth."""
    return any(isinstance(v, torch.Tensor) and v.requires_grad for v in pytree.tree_leaves(value))


def grad_fns(values: Any) -> set[GradFn]:
    """The nodes of autograd's graph that made the tensors among the values, at any depth."""
    leaves = (v for v in pytree.tree_leaves(values) if isinstance(v, torch.Tensor))
    return {made for v in leaves if (made := _grad_fn(v)) is not None}


def between(made: Iterable[GradFn], known: Collection[GradFn]) -> Iterator[GradFn]:
    """The nodes of autograd's graph from those that made results back to known ones, which are not
    among them.
    """

    def new(candidates: Iterable[GradFn]) -> Iterator[GradFn]:
        return (one for one in candidates if one not in known)

    return ir.reached(new(made), lambda one: new(_parents(one)))


def _grad_fn(value: torch.Tensor) -> GradFn | None:
    try:
        return value.grad_fn
    except RuntimeError:  # a view, made under no_grad, of a tensor that was written: untracked
        return None


def _like(value: Any) -> Any:
    """A new tensor of the same layout, not tracked by autograd."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout is not torch.strided:
        return torch.empty_like(value).detach()
    return like(value)
