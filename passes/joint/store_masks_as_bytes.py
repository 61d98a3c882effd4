"""Keep masks for the backward as bytes. A rewriting pass, on the two halves of the joint graph.

    forward   le: b8 = le(relu, 0)              le: b8 = le(relu, 0)
                                                wide: f32 = convert_element_type(le, f32)
                                                kept: u8 = convert_element_type(wide, u8)
              return (..., le)             ->   return (..., kept)

    backward  le: b8 = placeholder              le: u8 = placeholder
                                                wide: f32 = convert_element_type(le, f32)
                                                mask: b8 = ne(wide, 0)
              grad = where(le, 0, tangent)      grad = where(mask, 0, tangent)

The sign of a ReLU, what a dropout kept, where a maximum was: autograd keeps them as bools. In the
C++ that Inductor writes for a CPU, a kernel that stores or loads bools takes many times as long as
with bytes, because vectors of bools are taken apart element by element (torch 2.13, AVX2 and
AVX512). By way of FP32, which holds 0 and 1, both stay vectors.
The values are the same to the bit, and so are the bytes.

Contract. The two graphs come from AOTAutograd's partitioner: what the forward keeps stands behind
its own results, and the backward has a placeholder with the name of each such node. Only masks that
fused kernels write and read are taken: no result or operand of any other operator.
"""

from __future__ import annotations

import torch
from torch import fx

from mpcompile import ir
from mpcompile.devices.registry import capabilities, is_supported
from mpcompile.ir import aten

CAST = torch.ops.prims.convert_element_type.default


def store_masks_as_bytes(forward: fx.Graph, backward: fx.Graph, own_results: int) -> bool:
    """Rewrite both halves; the first `own_results` results of the forward are not for the backward.

    Returns whether anything changed.
    """
    output = forward.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    own, kept = results[:own_results], results[own_results:]
    read = {str(n.target): n for n in backward.find_nodes(op="placeholder")}
    changed = False
    for index, node in enumerate(kept):
        placeholder = read.get(node.name) if isinstance(node, fx.Node) else None
        if placeholder is None or node in own or not _is_mask(node, placeholder):
            continue
        with forward.inserting_before(output):
            wide = ir.new_call(forward, CAST, node, torch.float32)
            kept[index] = ir.new_call(forward, CAST, wide, torch.uint8)
        _read_as_bytes(backward, placeholder)
        changed = True
    output.args = ((*own, *kept),)
    return changed


def _is_mask(node: fx.Node, placeholder: fx.Node) -> bool:
    """Whether fused kernels write these bools in the forward, and read them in the backward."""
    written, read = ir.tensor(node), ir.tensor(placeholder)
    return (
        written is not None
        and read is not None
        and written.dtype is read.dtype is torch.bool
        and written.shape == read.shape
        and is_supported(written.device)
        and capabilities(written.device).slow_bools
        and ir.is_pointwise(node)
        and all(ir.is_pointwise(user) or user.op == "output" for user in node.users)
        and all(map(ir.is_pointwise, placeholder.users))
    )


def _read_as_bytes(backward: fx.Graph, placeholder: fx.Node) -> None:
    users = list(placeholder.users)
    with ir.fake_mode(backward):
        placeholder.meta["val"] = placeholder.meta["val"].to(torch.uint8)
    placeholder.meta.pop("tensor_meta", None)
    with backward.inserting_before(next(n for n in backward.nodes if n.op != "placeholder")):
        wide = ir.new_call(backward, CAST, placeholder, torch.float32)
        mask = ir.new_call(backward, aten.ne.Scalar, wide, 0)
    placeholder.replace_all_uses_with(mask, users.__contains__)
