"""Take maxima of low values in FP32. A rewriting pass, on a graph as Inductor lowers it.

    a: bf16 = amax(x, [1])                 wide: f32 = convert(x, f32)
    b: bf16 = amax(y, [2])         ->      a_wide: f32 = amax(wide, [1])
                                           a: bf16 = convert(a_wide, bf16)
                                           ...

Where two equal maxima of a low dtype meet in one loop, Inductor's C++ declares a variable twice and
does not compile (`MAXIMA_DECLARED_TWICE`). In FP32 it does. A maximum is exact, so the results are
the same, and the loop computes in FP32 registers either way. A graph with one maximum stays as it
is.
"""

from __future__ import annotations

import torch
from torch import fx

from mpcompile import ir
from mpcompile.ir import aten
from mpcompile.ir.dtypes import HALF

_MAXIMA = (aten.amax.default, aten.amin.default)
_CONVERT = torch.ops.prims.convert_element_type.default


def widen_maxima(graph: fx.Graph) -> bool:
    """Rewrite the graph. Returns whether anything changed."""
    found = [n for n in graph.nodes if n.target in _MAXIMA and ir.dtype(n) in HALF]
    if len(found) < 2:
        return False
    for node in found:
        low, value = ir.dtype(node), node.args[0]
        with graph.inserting_before(node):
            wide = ir.new_call(graph, _CONVERT, value, torch.float32)
            taken = ir.new_call(graph, node.target, wide, *node.args[1:], **node.kwargs)
            back = ir.new_call(graph, _CONVERT, taken, low)
        node.replace_all_uses_with(back)
        graph.erase_node(node)
    return True
