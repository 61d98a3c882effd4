"""One graph that Inductor compiles, how it is told to, and what is tried where it came out wrong.

In the order in which it costs: another flag for the C++ compiler, since g++ 11 and 12 make a wrong
copy of a tile (`torch_faults.py`); every rounding that the graph asks for, at that place, as a
kernel keeps FP32 otherwise; the graph operator by operator.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..devices.torch_faults import GCC_FLAG
from ..ir import copied
from ..torch_inside.inductor import setting
from ..torch_inside.names import compile_inner, inductor_config, tracing

Function = Callable[[list[Any]], Any]
"""A compiled graph, or what stands for it: takes a list of its inputs, which it may empty."""


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

    def compiled(self, settings: Mapping[str, Any]) -> Function:
        """Compile it with further settings of Inductor's."""
        with inductor_config.patch({**self.patches, **settings}), tracing(self.context):
            compiled = compile_inner(copied(self.gm), self.fakes, **self.kwargs)
        function: Function = getattr(compiled, "current_callable", None) or compiled

        def run(inputs: list[Any]) -> Any:
            return function(inputs)

        run.owner = compiled  # type: ignore[attr-defined]  # it takes down what it calls
        return run

    def uncompiled(self) -> Function:
        """The graph operator by operator."""
        gm = fx.GraphModule(self.gm, self.gm.graph)

        def run(inputs: list[Any]) -> Any:
            given = list(inputs)
            inputs.clear()
            with torch.no_grad():
                return list(fx.Interpreter(gm).boxed_run(given))

        return run


@dataclass(frozen=True)
class Cure:
    """One way to compile a graph that came out wrong.

    Attributes:
        name: in a file of verdicts.
        about: what is done, after "cured by".
        settings: of Inductor's; None: it isn't compiled.
    """

    name: str
    about: str
    settings: Callable[[], Mapping[str, Any]] | None

    def function(self, case: Case) -> Function:
        """The graph as this cure compiles it."""
        return case.uncompiled() if self.settings is None else case.compiled(self.settings())


def _flag() -> Mapping[str, Any]:
    name = "cpp.enable_floating_point_contract_flag"
    return {name: f"{setting(name)} {GCC_FLAG}"}


CURES = (
    Cure("flag", f"the C++ compiler's flag {GCC_FLAG}", _flag),
    Cure("roundings", "emulate_precision_casts", lambda: {"emulate_precision_casts": True}),
    Cure("uncompiled", "running this graph operator by operator", None),
)
