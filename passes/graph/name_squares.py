"""`x * x` is named `square(x)`, the same numbers, forward and backward. A rewriting pass.

    mul(h, h)    ->    square(h)

A product of two values keeps their magnitude, as a rule: `mul` follows its operands. A square
leaves FP16's range from 256 on and reaches zero from 2**-12 down, so `square` is FP32 (rules).
"""

from __future__ import annotations

from torch import fx

from mpcompile import ir
from mpcompile.ir import aten
from mpcompile.rules.policy import Config


def name_squares(gm: fx.GraphModule, config: Config) -> bool:
    changed = False
    for node in gm.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        value, held = node.args[0], ir.captured(node)
        if node.args == (value, value) and held is not None and held.is_floating_point():
            node.target, node.args = aten.square.default, (value,)
            changed = True
    return changed
