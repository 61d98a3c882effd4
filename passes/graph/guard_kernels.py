"""Leave in FP32 what the device's low kernels get wrong, or are slow at. Deciding passes.

**`guard_kernels`** computes in FP32 what torch's own kernel gets wrong in the low dtype.

    conv3d: LOW = conv3d(x, weight, padding=1)   ->   conv3d: FULL = conv3d(x, weight, padding=1)

Here x has a depth of 2 and the kernel one of 3: larger than the volume is without its padding. Of
the weight gradient in BF16, oneDNN leaves parts unwritten then, or writes beyond its end. The same
holds for each of the three dimensions and, over the result, for a transposed convolution. A size
that is not known before the call may be too small. `mpcompile/devices/torch_faults.py` has the
releases of torch with this fault.

The user's policy is overruled: who asks for BF16 doesn't ask for a wrong gradient.

**`leave_unpromised`** leaves products in FP32 if neither a profile nor a data sheet says that the
low dtype is faster. If a device has no matrix units for the low dtype, and its profile predicts
nothing for a product, the product is FULL: on a CPU without BF16 instructions it takes ten to forty
times as long in BF16. Products whose precision the user set, by policy or by dtype, are left alone.

    linear: LOW, CPU with AVX2, dtype="auto", no profile       FULL
    linear: LOW, the same, with a profile                      plan decides
    linear: LOW, FP16 on a GPU with Tensor Cores               LOW
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from mpcompile import ir
from mpcompile.devices.registry import capabilities
from mpcompile.padding.products import is_transposed
from mpcompile.planner.times import seconds
from mpcompile.rules.policy import Config, Level, Precision


def guard_kernels(gm: fx.GraphModule, config: Config) -> bool:
    for node in gm.graph.nodes:
        if ir.precision(node) is not Precision.LOW or not _is_volume(node):
            continue
        low = ir.mark(node).low
        if capabilities(config.device).miscounts_shallow_volumes(low) and _is_shallow(node):
            reason = f"torch {torch.__version__}: its {ir.SHORT[low]} kernel returns wrong weight"
            reason += " gradients where the kernel is larger than the volume without padding"
            ir.remark(node, precision=Precision.FULL, by=ir.By.KERNEL, reason=reason)
    return False


def _is_volume(node: fx.Node) -> bool:
    """Whether it is a convolution over three dimensions."""
    is_convolution = ir.rule(node).product == "convolution"
    return is_convolution and len(ir.shape(ir.argument(node, "weight"))) == 5


def _is_shallow(node: fx.Node) -> bool:
    """Whether the kernel may be larger, in some padded dimension, than the volume it runs over."""
    volume = ir.shape(node if is_transposed(node) else ir.argument(node, "input"))[-3:]
    kernel = ir.shape(ir.argument(node, "weight"))[-3:]
    padding, dilation = ir.argument(node, "padding"), ir.argument(node, "dilation")
    for size, taps, pad, step in zip(
        volume, kernel, _each(padding), _each(dilation), strict=True
    ):  # fmt: skip
        reach = (taps - 1) * step + 1
        if pad not in (0, "valid") and not statically_known_true(size >= reach):
            return True
    return False


def _each(setting: Any) -> Sequence[Any]:
    """A setting of the convolution for each of the three dimensions: a list, a number, a word."""
    values = list(setting) if isinstance(setting, (list, tuple)) else [setting]
    return values * 3 if len(values) == 1 else values


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
