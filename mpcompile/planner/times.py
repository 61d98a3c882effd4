"""The times of a product in the low dtype and in FP32, as far as the device profile knows them."""

from __future__ import annotations

import torch
from torch import fx

from .. import ir
from ..devices.registry import capabilities
from ..ir import aten
from ..ir.shapes import Product
from ..padding.products import product
from ..profile.cost_model import Profile
from ..rules.policy import Config

FULL = torch.float32
ATTENTION = aten.scaled_dot_product_attention.default
LONGEST = 512  # tokens; beyond it the kernel is as fast, and the matrix large


def seconds(node: fx.Node, config: Config) -> tuple[float, float] | None:
    """The seconds that the profile predicts for a product, in the low dtype and in FP32, forward
    and backward; None if it doesn't cover the product.
    """
    if config.profile is None or (found := product(node)) is None:
        return None
    low = ir.mark(node).low
    backward = ir.requires_grad(node) or any(map(ir.requires_grad, node.all_input_nodes))
    full_time = _predicted(config.profile, found, FULL, backward)
    predicted = _written_out if is_written_out(node, config) else _predicted
    low_time = predicted(config.profile, found, low, backward)
    if low_time is None or full_time is None:
        return None
    if _is_one_row(found) and not ir.requires_grad(node):  # profiles measure eight rows and more
        low_time = max(low_time, full_time * capabilities(config.device).one_row)
    return low_time, full_time


def _is_one_row(found: Product) -> bool:
    """Whether it multiplies one row with a matrix, as a language model does for each new token."""
    sizes = found.measured()
    return found.kind == "gemm" and all(ir.known_equal(sizes[dim], 1) for dim in ("batch", "m"))


def _predicted(
    profile: Profile, found: Product, dtype: torch.dtype, backward: bool
) -> float | None:
    dims = {name: ir.hint(size) for name, size in found.measured().items()}
    if found.kind == "conv":
        groups = dims["groups"]
        dims |= {side: dims[side] * groups for side in ("in_channels", "out_channels")}
    elif found.kind == "attention":
        del dims["value_head"]
    elif found.kind == "rnn":
        return _layers(profile, found, dtype, backward)
    return profile.seconds(found.kind, dtype, dims, backward=backward)


def _layers(profile: Profile, found: Product, dtype: torch.dtype, backward: bool) -> float | None:
    """The time of a recurrent operator: its layers, in both directions, one after the other."""
    sizes = {label: ir.hint(size) for label, size in found.sizes.items()}
    steps = max(1, sizes["steps"] // sizes["samples"])
    total = 0.0
    for width, count in (("input", 1), ("below", sizes["later"])):
        dims = {
            "batch": sizes["samples"], "steps": steps, "input": sizes[width],
            "hidden": sizes["hidden"], "gates": sizes["gates"],
        }  # fmt: skip
        seconds = profile.seconds("rnn", dtype, dims, backward=backward) if count else 0.0
        if seconds is None:
            return None
        total += seconds * count * sizes["both"]
    return total


def _written_out(
    profile: Profile, found: Product, low: torch.dtype, backward: bool
) -> float | None:
    """The time of attention as two batched products around a softmax."""
    dims = {name: ir.hint(size) for name, size in found.measured().items()}
    batch, queries, keys = dims["batch"], dims["queries"], dims["keys"]
    products = [
        profile.seconds(
            "gemm", low, {"batch": batch, "m": queries, "n": n, "k": k}, backward=backward
        )
        for n, k in ((keys, dims["head"]), (dims["value_head"], keys))
    ]
    if None in products:
        return None
    # Forward, the scores are written and read twice; backward, once more, with their gradients.
    traffic = low.itemsize * (4 + 6 * backward) * batch * queries * keys
    kernels = 2 + 2 * backward  # the softmax, and copies of transposed operands
    return sum(filter(None, products)) + traffic / profile.bandwidth + kernels * profile.launch


# -- attention as two products around a softmax ----------------------------------------------------
#
# On CPUs, torch's fused kernel runs its BF16 backward at a fraction of the speed of its FP32 one,
# and with dropout there is no fused kernel at all, only products in FP32 (torch 2.13). Two batched
# products around one softmax, which Inductor fuses, run at the speed of the BF16 units. The price
# is a stored (..., T, S) matrix, so long sequences keep the kernel; and so does a graph that has no
# backward.


def is_written_out(node: fx.Node, config: Config) -> bool:
    """Whether this attention, if LOW, becomes two products: whether that is possible and pays."""
    return node.target is ATTENTION and _can_expand(node) and _should_expand(node, config)


def _can_expand(node: fx.Node) -> bool:
    """Whether plain operators can express it: as many key and value heads as query heads, and
    plain numbers for the sizes that the scale and the causal mask depend on.
    """
    needed = [] if ir.argument(node, "scale") is not None else [_size(node, "query", -1)]
    if ir.argument(node, "is_causal"):
        needed += [_size(node, name, -2) for name in ("query", "key")]
    gqa = ir.argument(node, "enable_gqa")
    return not gqa and all(isinstance(size, int) for size in needed)


def _should_expand(node: fx.Node, config: Config) -> bool:
    if not capabilities(config.device).has_slow_attention(ir.mark(node).low):
        return False
    if ir.argument(node, "dropout_p"):
        return True
    if not torch.is_grad_enabled():  # as around the graph: a plan is made in its mode
        return False
    sizes = [_size(node, name, -2) for name in ("query", "key")]
    return all(isinstance(size, int) and size <= LONGEST for size in sizes)


def _size(node: fx.Node, name: str, dimension: int) -> int | torch.SymInt:
    value = ir.captured(ir.argument(node, name))
    assert value is not None
    return value.shape[dimension]
