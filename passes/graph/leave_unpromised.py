"""Leave products in FP32 if neither a profile nor a data sheet says that the low dtype is faster.

A deciding pass. If a device has no matrix units for the low dtype, and its profile predicts nothing
for a product, the product is FULL: on a CPU without BF16 instructions it takes ten to forty times
as long in BF16. Products whose precision the user set, by policy or by dtype, are left alone.

    linear: LOW, CPU with AVX2, dtype="auto", no profile       FULL
    linear: LOW, the same, with a profile                      plan decides
    linear: LOW, FP16 on a GPU with Tensor Cores               LOW
"""

from __future__ import annotations

from torch import fx

from mpcompile import ir
from mpcompile.planner.times import seconds
from mpcompile.rules.policy import Config, Level, Precision


def leave_unpromised(gm: fx.GraphModule, config: Config) -> bool:
    if config.promised or config.level is Level.O3:
        return False
    for node in gm.graph.nodes:
        by_rule = ir.precision(node) is Precision.LOW and ir.mark(node).by is ir.By.TABLE
        if by_rule and seconds(node, config) is None:
            reason = (
                f"{ir.mark(node).reason}; but {config.device.type} has no matrix units for "
                f"{ir.SHORT[config.low]} here, and no profile knows this product"
            )
            ir.remark(node, precision=Precision.FULL, by=ir.By.PLAN, reason=reason)
    return False
