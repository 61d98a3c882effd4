"""Compute the inputs of matrix factorisations in FP32. A deciding pass; LOW and FOLLOW become FULL.

    k: LOW = mm(x, xT)                           k: FULL = mm(x, xT)
    cholesky: FULL = linalg_cholesky(k)    ->    cholesky: FULL = linalg_cholesky(k)

Rounded to FP16, a positive definite matrix may get a negative eigenvalue, and a singular one full
rank: `cholesky` then raises, `pinv` returns 1e5 where it should return 1. FP32 inside the operator
comes too late. So its producers are pinned, up through FOLLOW nodes, to the first LOW operator on
each path. The operands of that one may be low: the product of rounded factors is an exact product.

The user's policy is never overruled.
"""

from __future__ import annotations

from torch import fx

from mpcompile import ir
from mpcompile.rules.policy import Config, Level, Precision


def guard_factorisations(gm: fx.GraphModule, config: Config) -> bool:
    if config.level is Level.O3:
        return False
    for node in gm.graph.nodes:
        if ir.rule(node).sensitive and ir.precision(node) is Precision.FULL:
            name = ir.op_name(node).removeprefix("aten::")
            reason = f"{name} reads it, and would multiply its rounding"
            ir.pin_producers(node, reason, products=True)
    return False
