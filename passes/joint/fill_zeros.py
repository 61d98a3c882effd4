"""Give tangents of zeros memory. A rewriting pass, on a graph as Inductor lowers it.

    zero = _efficientzerotensor([16, 16])    ->    zero = full([16, 16], 0)

Forward mode (`torch.func.jvp`, `jacfwd`, `hessian`) makes such a zero for what has no tangent. It
has no memory and can't be written, and Inductor's code, which knows it as any other buffer, reuses
its memory for the next result: the compiled graph raises (`ZEROS_ARE_REUSED`).
"""

from __future__ import annotations

from torch import fx

from mpcompile.ir import aten


def fill_zeros(graph: fx.Graph) -> bool:
    """Rewrite the graph. Returns whether anything changed."""
    zeros = graph.find_nodes(op="call_function", target=aten._efficientzerotensor.default)
    for node in zeros:
        node.target = aten.full.default
        node.args = (node.args[0], 0, *node.args[1:])
    return bool(zeros)
