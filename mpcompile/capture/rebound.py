"""`.grad` of a parameter that a function writes in place under its name: `p -= lr * p.grad`.

In Python, `p` is still the parameter. Dynamo takes the result for a tensor of its own: it forgets a
`p.grad = None` after it, so the next backward adds to a gradient that should be gone, and it reads
`p.grad` when the graph runs, not as the function has set it. Here the gradient of such a result is
that of the input that was written, and a gradient that was set is read back as it was set.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..errors import CannotRewrite, MPCompileError
from ..ir import written_by_name
from ..torch_inside.names import OutputGraph, SideEffects, TensorVariable
from ..torch_inside.private_names import MissingInTorch
from ..torch_inside.replace import applied, method, reads_of
from ..torch_inside.version import is_untested


def gradients_of_rebound() -> AbstractContextManager[None]:
    """In this context, Dynamo sets and reads `.grad` of what was written; no other thread compiles.

    Raises:
        MissingInTorch: it can't be followed with this torch.
    """
    return applied(_STORING, _READING)


def written(tensor: Any, output: OutputGraph) -> Any:
    """The input that a tensor of Dynamo's is, if operators in place made it of one; or itself."""
    if not isinstance(tensor, TensorVariable) or tensor.source is not None:
        return tensor
    node: Any = tensor.as_proxy().node
    while made_of := written_by_name(node):
        node = made_of[0]
    inputs = output.input_source_to_var.values()
    found = (v for v in inputs if isinstance(v, TensorVariable) and v.as_proxy().node is node)
    return next(found, tensor)


def check_torch() -> None:
    """Raise MPCompileError if gradients can't be followed with this torch.

    What Dynamo has set of a tensor that it takes for a result leaves no trace. So a release that
    the tests have not seen shows once that it sets and reads gradients by what stands here.
    """
    if (missing := _missing()) is not None:
        raise MPCompileError(f"functions can't be compiled: {missing}")
    if is_untested(torch.__version__) and not _is_followed():
        raise MPCompileError(
            f"functions can't be compiled: torch {torch.__version__} sets or reads gradients in a "
            "new way; compile the module instead"
        )


@functools.cache
def _missing() -> MissingInTorch | None:
    """Why gradients can't be followed with this torch, or None."""
    try:
        with gradients_of_rebound():
            return None
    except MissingInTorch as missing:
        return missing


@functools.cache
def _is_followed() -> bool:
    """Whether Dynamo sets and reads the gradient of the input in a small program."""

    def program(p: Any) -> Any:
        with torch.no_grad():
            p -= 1
            p.grad = p.grad + 1
            return p.grad + 1

    p: Any = torch.zeros(1, requires_grad=True)
    p.grad = torch.zeros(1)
    with gradients_of_rebound():
        result = torch.compile(program, backend="eager")(p)
    return (float(p.grad), float(result)) == (1, 2) and _READING.reached > 0


def check_reached(reads_gradients: bool) -> None:
    """See that Dynamo has read gradients by what stands here in the place of its own.

    Args:
        reads_gradients: whether the graph that is compiled reads a `.grad`.

    Raises:
        CannotRewrite: it has gone another way.
    """
    if _READING.is_applied and reads_gradients and not _READING.reached:
        raise CannotRewrite("Dynamo reads gradients in a new way")


def _store_attr(theirs: Any, self: Any, item: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    if name == "grad":
        item = written(item, self.output_graph_weakref())
    return theirs(self, item, name, *args, **kwargs)


def _read_grad(theirs: Any, variable: Any, tx: Any) -> Any:
    """Dynamo says of a gradient that the function has set that it is found in `.grad`. It isn't:
    there is what was there before the function. And where it is None, Dynamo says so of the one
    None that it has for all that is traced in this process.
    """
    variable, effects = written(variable, tx.output), tx.output.side_effects
    if effects.has_pending_mutation_of_attr(variable, "grad"):
        return effects.load_attr(variable, "grad")
    return theirs(variable, tx)


_STORING = method(SideEffects, "store_attr", _store_attr)
_READING = reads_of(TensorVariable, "grad", _read_grad)
