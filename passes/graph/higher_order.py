"""Give AOTAutograd the higher-order operators of the program as it takes them. Rewriting passes.

**`gather_hooks`** makes a hook on a value see the gradients of all its uses; it needs no marks.

    sin(h); k = register_hook(h, body); cos(k)     ->     k = register_hook(h, body); sin(k); cos(k)

That is what `h.register_hook(f)` means in eager mode, wherever it is in the program. In a graph the
hook is an operator, and sees only the gradients of nodes that read its result. Dynamo makes later
nodes read the result, but not earlier ones.

**`outline`** folds the bodies of activation checkpoints back; it is the last pass.

Capture inlined each checkpoint's body and tagged its nodes, so that the other passes saw one flat
graph. AOTAutograd needs the higher-order operator, whose body it recomputes in the backward:

    h = linear(x, w)         # in region 0            checkpoint = tag_activation_checkpoint(
    y = relu(h)              # in region 0     ->         body_0, x, w)
    return y                                          y = checkpoint[0]

Innermost regions are folded first. All values that a body reads from outside are passed in, also
constants: AOTAutograd must know each tensor that a graph owns, and doesn't search bodies for them.
"""

from __future__ import annotations

import itertools
import operator

from torch import fx

from mpcompile import ir
from mpcompile.errors import CannotRewrite
from mpcompile.ir.targets import CHECKPOINT
from mpcompile.rules.policy import Config


def gather_hooks(gm: fx.GraphModule, config: Config) -> bool:
    nodes = list(gm.graph.nodes)
    moved = [_gather(n) for n in nodes if ir.op_name(n) == "higher_order::register_hook"]
    return any(moved)


def _gather(hook: fx.Node) -> bool:
    """Move the hook right after its value, and let all other readers read its result."""
    value, body, *free = hook.all_input_nodes
    before = set(itertools.takewhile(lambda n: n is not hook, hook.graph.nodes))
    readers = [user for user in value.users if user is not hook]
    if before.isdisjoint(readers):
        return False
    memory = ir.storage(value)
    written = any(ir.storage(t) == memory for n in hook.graph.nodes for t in ir.written(n))
    if free or written:
        raise CannotRewrite(
            f"a hook is put on {value.name}, which was read before, and either is written in "
            "place or the hook reads other values"
        )
    ir.after(value).prepend(body)
    body.append(hook)
    value.replace_all_uses_with(hook, readers.__contains__)
    return True


def outline(gm: fx.GraphModule, config: Config) -> bool:
    constants = [n for n in gm.graph.find_nodes(op="get_attr") if not _is_body(gm, n)]
    ir.set_regions(constants, ())
    paths = dict.fromkeys(path for n in gm.graph.nodes if (path := ir.regions(n)))
    prefixes = dict.fromkeys(path[: i + 1] for path in paths for i in range(len(path)))
    for i, path in enumerate(sorted(prefixes, key=len, reverse=True)):
        # Numbered within this graph: names are part of the key of the compilers' caches.
        _fold(gm, path, f"checkpoint_body_{i}")
    named = {n.target for n in gm.graph.find_nodes(op="get_attr")}
    for i in range(len(prefixes)):
        if (name := f"checkpoint_body_{i}") not in named:  # it is used only in another body
            gm.delete_submodule(name)
    return bool(prefixes)


def _fold(gm: fx.GraphModule, path: tuple[ir.Region, ...], name: str) -> None:
    nodes = [n for n in gm.graph.nodes if ir.regions(n) == path]
    members = set(nodes)
    outside = dict.fromkeys(n for m in nodes for n in m.all_input_nodes if n not in members)
    # The body of a call is named inside, not passed in.
    operands = [n for n in outside if not _is_body(gm, n)]
    body, env = ir.cut(nodes, operands)
    results = [n for n in nodes if any(u not in members for u in n.users)]
    body.output(tuple(env[n] for n in results))

    last = nodes[-1]
    inside = list(gm.graph.nodes)
    first, final = inside.index(nodes[0]), inside.index(last)
    strangers = [n for n in inside[first : final + 1] if n not in members]
    if any(m in n.all_input_nodes for n in strangers for m in members):
        raise CannotRewrite("a checkpointed region is interleaved with code outside it")

    module = fx.GraphModule(gm, body)
    module.meta.update(path[-1].body_meta)
    gm.add_submodule(name, module)
    with gm.graph.inserting_before(last.next):
        attribute = gm.graph.get_attr(name)
        call = gm.graph.call_function(CHECKPOINT, (attribute, *operands), dict(path[-1].kwargs))
        ir.set_regions((attribute, call), path[:-1])
        call.meta["val"] = tuple(n.meta["val"] for n in results)
        call.meta["mp_captured"] = tuple(n.meta.get("mp_captured") for n in results)
        for i, result in enumerate(results):
            part = gm.graph.call_function(operator.getitem, (call, i))
            part.meta = {**result.meta}
            ir.set_regions((part,), path[:-1])
            result.replace_all_uses_with(part, lambda user: user not in members)
    for node in reversed(nodes):
        gm.graph.erase_node(node)


def _is_body(gm: fx.GraphModule, node: fx.Node) -> bool:
    return node.op == "get_attr" and isinstance(ir.attribute(gm, node), fx.GraphModule)
