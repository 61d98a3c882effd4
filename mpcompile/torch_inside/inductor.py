"""AOTAutograd, which gives a graph's forward and backward, apart, and Inductor, which compiles
them: settings, what they note on graphs, and the passes of others that they run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, fx

from .names import get_cpp_compiler, inductor_config, save_graph_repro
from .private_names import Part, refuse

PRE_FUSION = "_pre_fusion_custom_pass"
"""Inductor's setting for a pass over the scheduler's nodes."""

UNCHECKED = "saved_tensor_with_no_vc_check"
"""AOTAutograd's note on a node that a function of the user's has put on `ctx`: it is kept after
all others, and may be written before the backward."""

CHECKPOINTED = "recompute"
"""AOTAutograd's note on a node of a joint graph that stands in a checkpoint of the program's."""

Call = TypeVar("Call", bound=Callable[..., Any])


def check_how(how: str) -> None:
    """Raise an MPCompileError for `emit="inductor"` where Inductor isn't what it was."""
    if how == "inductor":
        refuse(Part.INDUCTOR, 'emit="inductor"', 'pass emit="aot_eager"')


# -- AOTAutograd -----------------------------------------------------------------------------------


def boxed(call: Call) -> Call:
    """Tell AOTAutograd that this takes all inputs as one list, which it empties."""
    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def donated_inputs(context: Any) -> Collection[int]:
    """The inputs of a backward whose memory it may use for others, by number.

    Args:
        context: the `TracingContext` in which it is compiled; None: there is none.
    """
    facts = getattr(context, "fw_metadata", None)
    return tuple(getattr(facts, "bw_donated_idxs", None) or ())


def is_compiled(function: Any) -> bool:
    """Whether an autograd.Function is one that AOTAutograd made of a graph."""
    return hasattr(function, "_aot_id")


class CopiedContext:
    """The context of a backward of AOTAutograd's, with copies of the saved tensors of these
    numbers.
    """

    def __init__(
        self, ctx: Any, numbers: Collection[int], copy: Callable[[Tensor], Tensor]
    ) -> None:
        self._ctx, self._numbers, self._copy = ctx, numbers, copy
        self.saved_tensors = self._copied(ctx.saved_tensors)

    @property
    def _tensors_no_vc_check(self) -> tuple[Tensor, ...]:
        """Those whose version isn't checked: they count on from the others."""
        return self._copied(self._ctx._tensors_no_vc_check, len(self.saved_tensors))

    def _copied(self, tensors: Sequence[Tensor], first: int = 0) -> tuple[Tensor, ...]:
        return tuple(
            self._copy(tensor) if number in self._numbers else tensor
            for number, tensor in enumerate(tensors, first)
        )

    def maybe_clear_saved_tensors(self) -> None:
        """Keep what is saved: the backward runs once more."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


# -- Inductor --------------------------------------------------------------------------------------


def setting(name: str) -> Any:
    """The value of a setting of Inductor's, such as `"cpp.cxx"`."""
    return functools.reduce(getattr, name.split("."), inductor_config)


def cpp_compiler() -> str | None:
    """The command of the C++ compiler that Inductor finds; None: there is none."""
    try:
        return get_cpp_compiler()
    except RuntimeError:
        return None


def has_setting(name: str) -> bool:
    """Whether this release knows the setting."""
    return hasattr(inductor_config, name)


def results_of_callers(graph: fx.Graph) -> Collection[int]:
    """Which results, by number, of a graph that Inductor is about to lower have the strides that
    the caller expects. Others are stored for the backward, in any strides. All if it doesn't say.
    """
    output = graph.output_node()
    results: Any = output.args[0]
    found: Collection[int] = output.meta.get("user_visible_output_idxs", range(len(results)))
    return found


def results_of(compiled: Any) -> int:
    """How many results the code has that AOTAutograd's wrappers end in; -1: it is none."""
    strides = getattr(compiled, "output_strides", None)
    return -1 if strides is None else len(strides)


def write_program(file: Path, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Write a program of torch's alone that compares a graph compiled and not, for a report."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8") as program:
        save_graph_repro(program, gm, inputs, "inductor", accuracy=True)


def computes_reads(node: Any) -> bool:
    """Whether a node of the scheduler works out its reads: not where it is a call of a kernel."""
    return hasattr(node, "_compute_attrs")


def wrap_reads(node: Any, wrap: Callable[[Any], Any]) -> None:
    """Let `wrap` replace the method by which a node of the scheduler works out its reads."""
    node._compute_attrs = wrap(node._compute_attrs)
