"""Make a hook on a value see the gradients of all its uses. A rewriting pass; needs no marks.

    sin(h); k = register_hook(h, body); cos(k)     ->     k = register_hook(h, body); sin(k); cos(k)

That is what `h.register_hook(f)` means in eager mode, wherever it is in the program. In a graph the
hook is an operator, and sees only the gradients of nodes that read its result. Dynamo makes later
nodes read the result, but not earlier ones.
"""

from __future__ import annotations

import itertools

from torch import fx

from mpcompile import ir
from mpcompile.errors import CannotRewrite
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
