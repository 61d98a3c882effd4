"""Put loss scaling inside the graph. A rewriting pass.

    out                          scale_grad(out, scale)              identity; gradient times scale
    x (needs a gradient)   ->    unscale_grad(x, scale, found)       identity; gradient over scale

The multiplication is on the FP32 side of every edge of the graph, so a gradient is scaled only
while it passes through low-precision nodes. `p.grad` is unscaled (of O2's working copies, where
they are read), and the training loop needs no scaler. The scale is an input (a 0-d FP32 tensor): a
new value recompiles nothing. `found` is a second 0-d input that takes part in autograd. The
"gradient" it receives is the number of inputs whose gradient was not finite, so the overflow flag
is part of the backward graph, adds up over graphs and backward calls, and needs no host sync.

An autograd.Function or a custom operator may treat a gradient in ways that are not linear (clip it,
ignore it); in floating point, a few of torch's own do, too. Around such a node the scaling is
undone and redone, so that its backward gets unscaled gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from mpcompile import ir, rules
from mpcompile.errors import CannotRewrite
from mpcompile.ir import aten
from mpcompile.ir.inputs import FOUND, SCALE, GraphInputs
from mpcompile.ir.units import History
from mpcompile.rules.policy import Config

_SCALE = torch.ops.mpcompile.scale_grad.default
_UNSCALE = torch.ops.mpcompile.unscale_grad.default


def scale_gradients(gm: fx.GraphModule, config: Config) -> bool:
    graph = gm.graph
    inputs = graph.find_nodes(op="placeholder")
    if not config.scaled or GraphInputs.of(graph).scaled:
        return False
    if not any(ir.requires_grad(n) for n in inputs):
        return False
    history = History(gm)
    reached = history.reached()
    if not reached:
        return False
    # The gradient of a working copy stays scaled: what reads the copies unscales it. Nothing is
    # unscaled that no gradient is known to reach: an unknown one would come out divided.
    trained = [n for n in inputs if ir.requires_grad(n) and ir.copy_of(n) is None]
    # On the device of the parameters, wherever tensors lie while the graph is planned.
    beside = next(filter(ir.is_parameter, inputs), None)
    beside = beside or next(filter(ir.requires_grad, inputs))
    device = ir.value(beside).device
    with ir.fake_mode(graph):
        scale, found = (
            ir.add_input(graph, name, torch.zeros((), device=device)) for name in (SCALE, FOUND)
        )
    scaler = _Scaler(graph, scale, found, history, reached)
    for node in [n for n in graph.nodes if ir.backward_is_unknown(n)]:
        scaler.isolate(node)
    # The memory that the graph writes to, seen by autograd or not. Nothing below adds to it.
    written = {ir.storage(target) for node in graph.nodes for target in ir.written(node)}
    for node in reversed(trained):  # each unscale_grad is inserted before the previous one
        if ir.storage(node) in written or not history.is_as_it_came(node):
            if not scaler.unscale_after_writes(node):
                scaler.own(node)
        elif node in reached:
            scaler.unscale(node)
    for node in inputs:
        if history.final[node] and not ir.requires_grad(node):  # such as a filled cache
            scaler.own(node)
    scaler.scale_outputs()
    return True


@dataclass
class _Scaler:
    graph: fx.Graph
    scale: fx.Node
    found: fx.Node
    history: History
    reached: Collection[fx.Node]  # the inputs that a gradient may reach
    owned: dict[fx.Node, fx.Node] = field(default_factory=dict)  # a written copy -> the input

    def tracked(self, node: fx.Node, reader: fx.Node) -> bool:
        """Whether autograd tracks `node` when `reader` reads it."""
        return _is_unscale(node) or self.history.reads[reader, node]

    def isolate(self, node: fx.Node) -> None:
        """Unscale the gradients that enter the node's backward, and scale those that leave it."""
        for operand in node.all_input_nodes:
            if self.tracked(operand, node):
                if operand in ir.written(node):
                    self._check_unread(operand, node)
                if (
                    _is_unscale(operand)
                    and (source := operand.all_input_nodes[0]).op != "placeholder"
                ):
                    # No scaling between two such nodes: two hooks on one value must stay on one.
                    node.replace_input_with(operand, source)
                    continue
                with self.graph.inserting_before(node):
                    node.replace_input_with(operand, self._scale(operand, node))
        results = [u for u in node.users if ir.is_getitem(u)] or [node]
        for result in results:
            if self.history.made[result]:
                self.unscale(result)

    def _check_unread(self, written: fx.Node, node: fx.Node) -> None:
        """Raise if a value that `node` writes is read later other than through its results: only
        the results will have the history of the write.
        """
        aliases, _ = self._in_memory_of(written)
        following = set(itertools.takewhile(lambda n: n is not node, reversed(self.graph.nodes)))
        if any(n.op == "placeholder" or following & n.users.keys() for n in aliases):
            raise CannotRewrite(
                f"{ir.op_name(node)} writes into {written.name}, which is read again after it, or "
                "by the caller"
            )

    def _in_memory_of(self, node: fx.Node) -> tuple[set[fx.Node], set[fx.Node]]:
        """The values in the memory of this one; and those of them that are itself, as in-place
        operators return it: `add_(x, 1)` returns x.
        """
        memory, itself = ir.storage(node), {node}
        for other in self.graph.nodes:
            if _given_back(other) in itself:
                itself.add(other)
        return {n for n in self.graph.nodes if ir.storage(n) == memory}, itself

    def own(self, node: fx.Node) -> None:
        """Let the graph write to a copy of an input, and write that copy back at the end.

            mul_(x, 2)      ->      own = clone(unscale_grad(x, ...)); mul_(own, 2)
                                    copy_(x, scale_grad(own, scale))

        So the caller's tensor has a history whose gradient is unscaled at both ends.
        """
        output = self.graph.output_node()
        aliases, itself = self._in_memory_of(node)
        for other in itself:
            if ir.layout(other) != ir.layout(node):
                raise CannotRewrite(f"input {node.name} changes its shape in place")
            output.replace_input_with(other, node)
        if any(n.op == "placeholder" for n in aliases - {node}):
            raise CannotRewrite(f"input {node.name} is written in place, and so is an alias of it")
        unseen = self.history.is_as_it_came(node)  # written through detach(), for example
        for writer in self.graph.nodes:
            without = unseen or not ir.grad_enabled(writer)
            if without and aliases.intersection(ir.written(writer)):
                raise CannotRewrite(
                    f"input {node.name} needs a gradient and is written without one"
                )
        # A tensor without a gradient has nothing to unscale until something is written to it.
        source = self.unscale(node) if node in self.reached else node
        users = list(source.users)
        decision = ir.added(ir.Role.SCALE, "the caller's tensor is written last")
        own = ir.copy_to_write(node, source, decision)
        self.owned[own] = node
        for user in users:
            user.replace_input_with(source, node if user is output else own)
        with self.graph.inserting_before(output):
            args, name = (node, self._scale(own, output)), f"{node.name}_back"
            ir.insert(aten.copy_.default, *args, name=name, like=node, decision=decision)

    def unscale_after_writes(self, node: fx.Node) -> bool:
        """Unscale an input after the last write to it, if autograd sees none of them, and nothing
        before: such as a table that `embedding(max_norm=...)` normalises before it reads it.
        """
        if not self.history.is_as_it_came(node):
            return False
        nodes = list(self.graph.nodes)
        aliases, itself = self._in_memory_of(node)
        *_, last = (n for n in nodes if aliases.intersection(ir.written(n)))
        readers = [
            n for n in nodes if aliases.intersection(n.all_input_nodes)
            and ir.grad_enabled(n) and self.history.made.get(n, False)
        ]  # fmt: skip
        before = not readers or nodes.index(readers[0]) <= nodes.index(last)
        reads_another = any(
            aliases.intersection(reader.all_input_nodes) - itself for reader in readers
        )
        others = any(n.op == "placeholder" for n in aliases - {node})
        if before or reads_another or others:
            return False
        for reader in readers:
            for alias in itself:
                reader.replace_input_with(alias, node)
        if node in self.reached:
            self.unscale(node, readers)
        return True

    def unscale(self, node: fx.Node, readers: Sequence[fx.Node] = ()) -> fx.Node:
        """Unscale the gradient of a value for these readers, in order; for all by default."""
        # The gradient of an input that is returned as it is never enters the graph.
        users = readers or [u for u in node.users if u.op != "output" or node.op != "placeholder"]
        decision = ir.added(ir.Role.SCALE, "the gradient leaves true to size")
        before = readers[0] if readers else self._first_reader(node, users)
        with self.graph.inserting_before(before):
            args, name = (node, self.scale, self.found), f"{node.name}_unscale"
            new = ir.insert(_UNSCALE, *args, name=name, like=node, decision=decision)
        new.meta["mp_captured"] = node.meta["mp_captured"]
        node.replace_all_uses_with(new, users.__contains__)
        return new

    def _first_reader(self, node: fx.Node, users: Collection[fx.Node]) -> fx.Node:
        """The node before which the gradient of a value may be unscaled: a parameter's is unscaled
        right after what makes it, as it is widened (`place_casts`), not last of all.
        """
        if not ir.is_parameter(node):
            return ir.after(node)
        first = next((n for n in self.graph.nodes if n in users), None)
        may_wait = first is not None and ir.grad_enabled(first) and not ir.regions(first)
        return first if may_wait and first is not None else ir.after(node)

    def scale_outputs(self) -> None:
        """Scale each result; for results that share memory, scale the shared tensor.

            view = view(h, -1)                     own = clone(scale_grad(h, scale))
            return h, view                 ->      view = view(own, -1)
                                                   return own, view

        If the caller writes to one of them, the write is then in the history of the other. A view
        of an input stays on the caller's side: its gradient needs no scale.
        """
        output = self.graph.output_node()
        results = list(output.args[0])  # type: ignore[arg-type]
        roots = {r: self._root(r) for r in results if isinstance(r, fx.Node)}
        shown: dict[fx.Node, fx.Node] = {}
        for result, root in roots.items():
            if root.op == "placeholder":
                shown[root] = root
            elif self.tracked(result, output) and root not in shown:
                several = sum(other is root for other in roots.values()) > 1
                at = root if several else result
                shown[at] = self._shown(at, several)
        reached = [r for r, root in roots.items() if root in shown or r in shown]
        again = {r: self._again(r, shown) for r in reached}
        output.args = (tuple(again.get(r, r) for r in results),)
        constant = [i for i, result in enumerate(results) if result not in again]
        self.graph.owning_module.meta["mp_constant_results"] = constant  # type: ignore[union-attr]

    def _root(self, node: fx.Node) -> fx.Node:
        """The value that a result is a view of: an input, or a value made in this graph."""
        below = self._source(node) or self._stood_for(node)
        made_here = _is_unscale(node) and below.op != "placeholder"  # an isolated node's, unscaled
        return node if below is node or made_here else self._root(below)

    def _stood_for(self, node: fx.Node) -> fx.Node:
        """The captured value that a node added here replaces, or the operand that an in-place
        operator returns; for any other node, the node itself.
        """
        if node in self.owned:
            return self.owned[node]
        if (target := _given_back(node)) is not None and ir.layout(target) == ir.layout(node):
            return self.owned.get(target, target)
        return node.all_input_nodes[0] if _is_unscale(node) else node

    def _source(self, node: fx.Node) -> fx.Node | None:
        """The one value that a view of torch's own shows, if autograd records the view; or None.

        One of several results is a view if they all are (those of `split`, not those of `sort`).
        """
        if ir.is_getitem(node):
            several = node.all_input_nodes[0]
            return several if self._source(several) is not None else None
        view = ir.is_op(node) and ir.kind(node) is rules.Kind.VIEW
        if node in self.owned or not view or not ir.grad_enabled(node) or ir.regions(node):
            return None
        operands = node.all_input_nodes
        shown = [n for n in operands if self.history.shares_memory(node, self._stood_for(n))]
        return shown[0] if len(shown) == 1 else None

    def _shown(self, node: fx.Node, several: bool) -> fx.Node:
        output = self.graph.output_node()
        with self.graph.inserting_before(output):
            scaled = self._scale(node, output)
            if not several:
                return scaled
            # A copy, or autograd would take the results for views of a value inside the graph.
            name, decision = f"{node.name}_own", ir.mark(scaled)
            own = ir.insert(aten.clone.default, scaled, name=name, like=node, decision=decision)
        if ir.value(own).stride() != ir.value(node).stride():
            raise CannotRewrite(f"results show {node.name}, whose elements don't lie side by side")
        return own

    def _again(self, node: fx.Node, shown: dict[fx.Node, fx.Node]) -> fx.Node:
        """Rebuild the views that lead to a result, from the value shown in place of its root."""
        if node not in shown:
            if (stood_for := self._stood_for(node)) is not node:
                return self._again(stood_for, shown)
            source = self._source(node)
            assert source is not None
            new = self._again(source, shown)
            with self.graph.inserting_before(self.graph.output_node()):
                again = self.graph.node_copy(node, lambda n: new if n is source else n)
            ir.refresh(again)
            shown[node] = again
        return shown[node]

    def _scale(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        decision = ir.added(ir.Role.SCALE, "the gradient enters scaled")
        args, name = (node, self.scale), f"{node.name}_scale"
        new = ir.insert(_SCALE, *args, name=name, like=node, decision=decision)
        new.meta["mp_captured"] = node.meta.get("mp_captured")
        ir.set_regions((new,), ir.regions(reader))
        return new


def _given_back(node: fx.Node) -> fx.Node | None:
    """The operand that an in-place operator writes and returns, or None. Found by schema: a name
    may end in an underscore for another reason (`__and__`).
    """
    target = node.args[0] if ir.is_op(node) and node.args else None
    writes = isinstance(target, fx.Node) and target in ir.written(node)
    return target if writes and ir.shares_memory(node, target) else None  # type: ignore[arg-type, return-value]


def _is_unscale(node: fx.Node) -> bool:
    return node.target is _UNSCALE
