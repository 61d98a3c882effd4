"""Operators, as torch's dispatcher knows them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .private_names import Part, attribute, private

if TYPE_CHECKING:
    from torch import FunctionSchema
    from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
else:
    OpOverload = private("torch._ops:OpOverload", "is an ATen operator", Part.COMPILE)
    OpOverloadPacket = private(
        "torch._ops:OpOverloadPacket", "is an operator without a choice of overload", Part.COMPILE
    )
    HigherOrderOperator = private(
        "torch._ops:HigherOrderOperator", "is an operator that takes graphs", Part.COMPILE
    )

__all__ = [
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "overload_name",
    "packet_name",
    "schema",
    "schema_of",
]


def schema(op: Any) -> FunctionSchema:
    """What an OpOverload declares: its arguments, and which of them it writes to."""
    declared: FunctionSchema = op._schema
    return declared


def schema_of(target: Any) -> FunctionSchema | None:
    """The same of whatever a node calls; None where it is no OpOverload."""
    return schema(target) if isinstance(target, OpOverload) else None


def overload_name(op: OpOverload) -> str:
    """`"Tensor"` of `aten::add.Tensor`; `"default"` where the operator has one overload."""
    return op._overloadname


def packet_name(op: OpOverloadPacket) -> str:
    """`"aten::add"` of `torch.ops.aten.add`."""
    return op._qualified_op_name


attribute("torch._ops:OpOverload._schema", "declares an operator's arguments", Part.COMPILE)
attribute("torch._ops:OpOverload._overloadname", "names an operator's rule", Part.COMPILE)
