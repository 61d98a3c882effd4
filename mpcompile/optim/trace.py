"""Traces a torch.optim optimizer's own step to a functional graph.

The step runs once on FakeTensors, on a shadow of the optimizer: an object of the same class, with
the same attributes, whose parameters, gradients and state are the graph's inputs. make_fx records
what it does; `functionalize` turns every in-place operator into its value and one `copy_` at the
end. The graph is exactly the optimizer's arithmetic, also for a user's own class:

    p.mul_(1 - lr * decay)    ->    mul = mul(param0, sub)
    m.lerp_(g, 0.1); ...            copy_(param0, mul); copy_(state0_m, lerp); ...

* Learning rates are inputs (0-d, FP64), so a scheduler needs no new graph. Every other setting that
  the step reads from a param group is a constant of the graph, and is listed in `Trace.reads`.
  Floats that were seen to change (`varying`) become inputs too; what the step asks about them
  (`if momentum != 0`) becomes a guard.
* 0-d state (step counters) is computed in FP64, like the Python numbers that an optimizer makes of
  it in eager mode, and stored in its own dtype.
* Steps that can't be a graph are not traced: those that change state or settings kept as Python
  numbers, branch on a tensor's value, or change tensors that belong to no parameter. They run
  operator by operator (`eager.py`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from .. import ir
from ..errors import CannotRewrite, in_one_line
from ..ir import aten
from ..ir.step_config import Slot
from ..torch_inside.dynamo import compile_session
from ..torch_inside.names import DataDependentOutputException, autocast_off
from ..torch_inside.replace import Spot, put
from .members import Inputs, Member, Setting
from .shadow import Shadow


@dataclass(frozen=True)
class Trace:
    """A traced step.

    Attributes:
        graph: each of its inputs has a `Slot` (`ir.slots`).
        reads: (group index, setting) -> value, for all settings that the step read.
        attributes: the optimizer's own attributes that are plain values: the step may read them.
        guards: what the step assumed about settings that are inputs, as conditions on `symbols`.
        symbols: the slot of each setting that is an input -> its symbol.
    """

    graph: fx.GraphModule
    reads: dict[Setting, Any]
    attributes: dict[str, Any]
    guards: tuple[sympy.Expr, ...]
    symbols: dict[Slot, sympy.Symbol]

    def holds_for(self, values: Mapping[Slot, float]) -> bool:
        """Whether the graph is right for these values of the settings that are inputs."""
        known = {symbol: values[slot] for slot, symbol in self.symbols.items()}
        return all(bool(guard.subs(known)) for guard in self.guards)


def trace(
    optimizer: Optimizer,
    members: Sequence[Member],
    *,
    strides: Sequence[Sequence[int]],
    foreach: bool,
    varying: Iterable[Setting] = (),
) -> Trace:
    """Trace one step of `optimizer` over those of its parameters that have a gradient.

    Args:
        optimizer: its state for the members exists, as far as it can be made beforehand.
        strides: those of the members' gradients.
        foreach: ask for the multi-tensor implementation, if the class has one.
        varying: settings whose floats are to be inputs, because they change from step to step
            (momentum, under a OneCycleLR).

    Raises:
        StateAppeared: the step makes state that isn't there yet.
        CannotRewrite: the step can't be written as one graph; the message says why.
    """
    inputs = Inputs(optimizer, members, varying, strides)
    shadow = Shadow(optimizer, members, foreach=foreach)

    def step(*values: Any) -> tuple[()]:
        shadow.run(dict(zip(inputs.values, values, strict=True)))
        return ()

    with compile_session(), items_stay_tensors(type(optimizer)), torch.no_grad(), autocast_off():
        gm = _functional(step, [*inputs.values.values()])
    for node, slot in zip(gm.graph.find_nodes(op="placeholder"), inputs.values, strict=True):
        ir.set_slot(node, slot)
    if owned := gm.graph.find_nodes(op="get_attr"):
        raise CannotRewrite(f"it uses a tensor of its own ({owned[0].target})")
    _drop_idle_writes(gm.graph)
    guards = tuple(guard.expr for guard in inputs.shape_env.guards)
    constants = {key: value for key, value in shadow.reads.items() if key not in set(varying)}
    return Trace(gm, constants, shadow.attributes, guards, inputs.symbols)


def _functional(step: Callable[..., tuple[()]], values: Sequence[Any]) -> fx.GraphModule:
    """The graph of `step`: the only writes in it are one `copy_` for each changed input."""
    try:
        # First trace the step as it is: functionalize knows no composite in-place operators.
        inplace = make_fx(step, tracing_mode="fake")(*values)
        functional = torch.func.functionalize(inplace, remove="mutations_and_views")
        gm: fx.GraphModule = make_fx(functional, tracing_mode="fake")(*values)
    except CannotRewrite:
        raise
    except (DataDependentOutputException, GuardOnDataDependentSymNode) as error:
        why = "it branches on the value of a tensor, or makes a Python number of it"
        raise CannotRewrite(why) from error
    except Exception as error:  # any error in what can't be traced
        raise CannotRewrite(in_one_line(error)) from error
    return gm


def _drop_idle_writes(graph: fx.Graph) -> None:
    """Drop writes to gradients: `p.grad.add_(p, alpha=decay)` serves only the step itself. And
    those to tensors without an element, as a rank may hold of a sharded parameter.
    """
    for write in graph.find_nodes(op="call_function", target=aten.copy_.default):
        target = write.args[0]
        if target.op != "placeholder":
            continue
        if ir.slot_of(target).kind == "grad" or not ir.value(target).numel():
            graph.erase_node(write)


# -- numbers stay tensors ----------------------------------------------------------------------


@contextlib.contextmanager
def items_stay_tensors(cls: type[Optimizer]) -> Iterator[None]:
    """Make `.item()` return the 0-d tensor, and `min` and `max` in the file of `cls` take tensors,
    in this thread.

    So a step that reads numbers from the device to compute with them (Adafactor) becomes a graph
    without such reads. A branch on such a number still fails.
    """
    namespace = inspect.unwrap(cls.step).__globals__
    pairs = {"min": (min, torch.minimum), "max": (max, torch.maximum)}
    with contextlib.ExitStack() as undo:
        for name, (builtin, pairwise) in pairs.items():
            ours = _of_tensors(namespace.get(name, builtin), pairwise)
            undo.callback(put(Spot(namespace, name), ours))
        undo.enter_context(_ItemIsTensor())
        yield


def _of_tensors(builtin: Callable[..., Any], pairwise: Callable[..., Any]) -> Callable[..., Any]:
    thread = threading.get_ident()

    def choose(*args: Any, **kwargs: Any) -> Any:
        tensor = next((a for a in args if isinstance(a, torch.Tensor)), None)
        if tensor is None or len(args) == 1 or threading.get_ident() != thread:
            return builtin(*args, **kwargs)
        numbers = (a if isinstance(a, torch.Tensor) else torch.full_like(tensor, a) for a in args)
        return functools.reduce(lambda x, y: pairwise(x, y.to(x.dtype)), numbers)

    return choose


class _ItemIsTensor(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.item and args[0].dtype is not torch.bool:
            return args[0].reshape(()).double()  # as wide as the number, and promotes as little
        return func(*args, **(kwargs or {}))
