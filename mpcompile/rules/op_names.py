"""The names of operators, as rules and policies have them."""

from __future__ import annotations

import re
from typing import Any

import torch

from ..errors import MPCompileError
from ..torch_inside.graphs import packet_name, schema
from ..torch_inside.names import HigherOrderOperator, OpOverload, OpOverloadPacket


def op_key(op: Any) -> str:
    """`"softmax"`, `"aten.softmax.int"`, `torch.ops.aten.softmax` -> `"aten::softmax"`.

    Overloads share a rule, so the overload name is dropped.
    """
    if not isinstance(op, str):
        if isinstance(op, OpOverload):
            return schema(op).name
        if isinstance(op, OpOverloadPacket):
            return packet_name(op)
        if isinstance(op, HigherOrderOperator):
            return f"higher_order::{op.name()}"
        raise MPCompileError(
            f"not an operator: {op!r}{_likely(op)}; give a name or a torch.ops object"
        )
    if "::" in op:
        namespace, name = op.split("::", 1)
    elif "." in op:
        namespace, name = op.split(".", 1)
    else:
        namespace, name = "aten", op
    return f"{namespace}::{name.split('.', 1)[0]}"


def _likely(function: Any) -> str:
    """The operator that a function of torch's or a class of modules means: of `nn.LayerNorm`,
    `"; did you mean 'layer_norm'?"`; or the empty string.
    """
    name = re.sub("(?<=[a-z])(?=[A-Z])", "_", getattr(function, "__name__", "")).lower()
    return f"; did you mean {name!r}?" if name and op_exists(f"aten::{name}") else ""


def op_exists(key: str) -> bool:
    """Whether `"aten::softmax"` (or `"aten::max.dim"`) names an operator that torch knows in this
    process.
    """
    namespace, path = key.split("::", 1)
    name, *overload = path.split(".", 1)
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return packet is not None and all(o in packet.overloads() for o in overload)
