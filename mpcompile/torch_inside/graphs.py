"""What Dynamo notes on its graphs, and AOTAutograd and Inductor read there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import fx

from .private_names import Part, attribute, private

if TYPE_CHECKING:
    from torch._dynamo.source import ConstantSource

    def rename(node: fx.Node, name: str) -> None:
        """Give a node another name."""
else:
    ConstantSource = private(
        "torch._dynamo.source:ConstantSource", "says where an input comes from", Part.COMPILE
    )
    rename = private("torch.fx:Node._rename", "gives a node another name", Part.COMPILE)

STATIC_INPUT = "_dynamo_static_input_type"
"""An attribute of a tensor that keeps its address (`mark_static_address`), also found in the
`meta["tensor_dict"]` of the input that it is."""
CHECKPOINT_CONTEXT = "_checkpoint_context_fn"
"""In the `meta` of a checkpoint's body: the `context_fn` that the user gave."""

__all__ = [
    "CHECKPOINT_CONTEXT",
    "STATIC_INPUT",
    "ConstantSource",
    "rename",
    "set_source",
    "set_sources",
    "source_of",
    "sources_of",
]


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


attribute("torch._dynamo:_dynamo_source", "says where an input comes from", Part.COMPILE)
