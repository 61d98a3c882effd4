"""`.grad` of a parameter that a function writes in place under its name: `p -= lr * p.grad`.

In Python, `p` is still the parameter. Dynamo takes the result for a tensor of its own: it forgets a
`p.grad = None` behind it, so the next backward adds to a gradient that should be gone, and it reads
`p.grad` when the graph runs, not as the function has set it. Here the gradient of such a result is
that of the input that was written.

Torch internals used here were read in torch 2.13 and exist in 2.11.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables import TensorVariable

# `p += x` and its like, where tensors do that in place: `p @= x` makes a new one.
_IN_PLACE = frozenset(
    getattr(operator, name)
    for name in dir(operator)
    if name[0] == "i"
    and hasattr(torch.Tensor, f"__{name}__")
    and hasattr(operator, f"__{name[1:]}__")
)


class _Thread(threading.local):
    depth = 0  # of contexts


_thread = _Thread()


@contextlib.contextmanager
def gradients_of_rebound() -> Iterator[None]:
    """In this context, Dynamo of this thread sets and reads `.grad` of what was written."""
    _thread.depth += 1
    try:
        yield
    finally:
        _thread.depth -= 1


def written(tensor: Any, output: OutputGraph) -> Any:
    """The input that a tensor of Dynamo's is, if operators in place made it of one; or itself."""
    if not isinstance(tensor, TensorVariable) or tensor.source is not None:
        return tensor
    node: Any = tensor.as_proxy().node
    while _is_in_place(node):
        node = node.args[0]
    inputs = output.input_source_to_var.values()
    found = (v for v in inputs if isinstance(v, TensorVariable) and v.as_proxy().node is node)
    return next(found, tensor)


def _is_in_place(node: fx.Node) -> bool:
    """Whether a node's result is its first argument."""
    if not (node.args and isinstance(node.args[0], fx.Node)):
        return False
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__")
    return node.op == "call_function" and node.target in _IN_PLACE


# Dynamo's reading of an attribute: `var_getattr` up to torch 2.13, `tp_getattro_impl` from 2.14 on.
GETATTR = "var_getattr" if hasattr(TensorVariable, "var_getattr") else "tp_getattro_impl"
_store, _read = SideEffects.store_attr, getattr(TensorVariable, GETATTR)


@functools.wraps(_store)
def _store_attr(self: Any, item: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    if name == "grad" and _thread.depth:
        item = written(item, self.output_graph_weakref())
    return _store(self, item, name, *args, **kwargs)


@functools.wraps(_read)
def _var_getattr(self: Any, tx: Any, name: str) -> Any:
    if name == "grad" and _thread.depth:
        self = written(self, tx.output)
    return _read(self, tx, name)


# For the process; they do what they did, outside of the context.
SideEffects.store_attr = _store_attr  # type: ignore[method-assign]
setattr(TensorVariable, GETATTR, _var_getattr)
