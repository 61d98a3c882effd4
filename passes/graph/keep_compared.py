"""Keep in memory the values that are compared with what was picked from them. A rewriting pass.

    h: f16 = gelu(linear)                h: f16 = gelu(linear)
    k: f16 = topk(h, 5)[0]        ->     h_kept: f16 = kept(h)
    keep = ge(h, k)                      k: f16 = topk(h_kept, 5)[0]
                                         keep = ge(h_kept, k)

A compiler doesn't round a low value where it computes with it in the same loop, nor where the
backward computes it again. Who compares such a value with one that was picked from it when it was
rounded finds no equal one; the backward of `amax` then divides zero by zero.

`kept` (`mpcompile/operators/library.py`) is a copy that no fusion reaches across and that isn't
computed again: whatever reads it, forward or backward, reads the same elements. What is picked from
them is exact in any dtype (`mpcompile/ir/compared.py`). It costs the copy, where such a comparison
is.

Contract. It runs after the passes that place casts. `mpcompile/ir/spec.py` looks at each graph
that is emitted: no value is left that is compared so.
"""

from __future__ import annotations

import functools
import operator

import torch
from torch import fx

from mpcompile import ir
from mpcompile.rules.policy import Config


def keep_compared(gm: fx.GraphModule, config: Config) -> bool:
    values = {value: node for node, value in ir.compared(gm.graph)}
    for value, node in values.items():
        why = ir.added(ir.Role.KEPT, f"{node.name} compares it with what was picked from it")
        keep, name = torch.ops.mpcompile.kept.default, f"{value.name}_kept"
        with gm.graph.inserting_before(ir.after(value)):
            kept = ir.insert(keep, value, name=name, like=value, decision=why)
        value.replace_all_uses_with(kept, functools.partial(operator.is_not, kept))
        ir.stands_for(kept, value)
    return bool(values)
