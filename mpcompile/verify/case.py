"""One graph that Inductor compiles, and how it is told to."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from ..torch_inside.fakes import tracing
from ..torch_inside.inductor import compile_inner, config

__all__ = ["Case", "copied"]


@dataclass(frozen=True)
class Case:
    """One graph that Inductor compiles, and how.

    Attributes:
        name: "forward", "backward" or "graph".
        gm: the graph, before Inductor changes it.
        fakes: the inputs that it is compiled for.
        kwargs: further arguments of Inductor's.
        patches: the settings of Inductor's that the caller has set.
        context: what Dynamo knows of the compile.
        donated: the numbers of inputs whose memory the compiled code may use for others.
    """

    name: str
    gm: fx.GraphModule
    fakes: Sequence[Any]
    kwargs: Mapping[str, Any]
    patches: Mapping[str, Any]
    context: Any
    donated: Collection[int] = ()

    def compiled(self, settings: Mapping[str, Any], gm: fx.GraphModule | None = None) -> Any:
        """Compile it, or another graph of the same inputs, with further settings of Inductor's."""
        with config.patch({**self.patches, **settings}), tracing(self.context):
            return compile_inner(copied(gm or self.gm), self.fakes, **self.kwargs)

    @property
    def outputs(self) -> list[Any]:
        """What the graph returns: nodes and constants."""
        return list(self.gm.graph.output_node().args[0])  # type: ignore[arg-type]


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy whose nodes have the same names; Inductor changes what it compiles."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(gm.graph, env)
    graph.output(result).meta.update(gm.graph.output_node().meta)
    for old, new in env.items():
        new.name = old.name
    copied = fx.GraphModule(gm, graph)
    copied.meta.update(gm.meta)
    return copied
