"""Operators, as torch's dispatcher knows them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .private_names import Part, private, probe

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
]


def schema(op: Any) -> FunctionSchema:
    """What an OpOverload declares: its arguments, and which of them it writes to."""
    declared: FunctionSchema = op._schema
    return declared


def overload_name(op: OpOverload) -> str:
    """`"Tensor"` of `aten::add.Tensor`; `"default"` where the operator has one overload."""
    return op._overloadname


def packet_name(op: OpOverloadPacket) -> str:
    """`"aten::add"` of `torch.ops.aten.add`."""
    return op._qualified_op_name


@probe("torch._ops:OpOverload._schema", "declares an operator's arguments", Part.COMPILE)
def _declares() -> None:
    import torch

    declared = schema(torch.ops.aten.add_.Tensor)
    written = [a.name for a in declared.arguments if a.alias_info is not None]
    assert (declared.name, written, declared.is_mutable) == ("aten::add_", ["self"], True)


@probe("torch._ops:OpOverload._overloadname", "names an operator's rule", Part.COMPILE)
def _names() -> None:
    import torch

    packet = torch.ops.aten.add
    names = [overload_name(getattr(packet, overload)) for overload in ("Tensor", "out")]
    assert [*names, packet_name(packet)] == ["Tensor", "out", "aten::add"]
    assert overload_name(torch.ops.aten.relu.default) == "default"
