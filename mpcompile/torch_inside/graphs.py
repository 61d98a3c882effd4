"""What graphs say: operators by their schemas, and what Dynamo notes on nodes for AOTAutograd and
Inductor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import FunctionSchema, fx

from .names import OpOverload, OpOverloadPacket

STATIC_INPUT = "_dynamo_static_input_type"
"""An attribute of a tensor that keeps its address (`mark_static_address`), also found in the
`meta["tensor_dict"]` of the input that it is."""
CHECKPOINT_CONTEXT = "_checkpoint_context_fn"
"""In the `meta` of a checkpoint's body: the `context_fn` that the user gave."""


# -- operators -------------------------------------------------------------------------------------


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


# -- nodes -----------------------------------------------------------------------------------------


def rename(node: fx.Node, name: str) -> None:
    """Give a node another name."""
    node._rename(name)


def source_of(placeholder: fx.Node) -> Any:
    """Dynamo's `Source` of an input; None: Dynamo doesn't know it."""
    return getattr(placeholder, "_dynamo_source", None)


def set_source(placeholder: fx.Node, source: Any) -> None:
    """Note where an input comes from; None: not from Dynamo."""
    placeholder._dynamo_source = source


def sources_of(gm: fx.GraphModule) -> Mapping[str, Any]:
    """Dynamo's `Source` of each parameter and buffer that is an attribute of the graph."""
    known: Mapping[str, Any] = getattr(gm, "_param_name_to_source", {})
    return known


def set_sources(gm: fx.GraphModule, sources: Mapping[str, Any]) -> None:
    """Note where the attributes of the graph come from. AOTAutograd asks for each of them."""
    gm._param_name_to_source = sources  # type: ignore[assignment]
