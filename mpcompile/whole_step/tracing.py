"""What Dynamo sees of optimizers while it traces a whole training step.

Dynamo doesn't trace `optimizer.step()` and `zero_grad()` after a `backward()`: torch's own methods
break the graph on purpose. So while such a function is traced, Dynamo reads other functions: `step`
leaves one operator in the graph (`mpcompile::take_step`), with the parameters that have a
gradient and these gradients; the backend puts the optimizer's step in its place. `zero_grad` sets
every gradient to None without looking at it, so nothing is guarded on. The optimizers stay as they
are; what Dynamo does not guard on of them, `call.py` checks.

What stands in the place of Dynamo's own proves in each trace that it was reached (`check_reached`).
Where an optimizer's `step` or `zero_grad`, or the check of the results, were not, Dynamo breaks its
graph at torch's own, which it can't in a whole step.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.optim import Optimizer

from ..capture import rebound
from ..errors import CannotRewrite
from ..ranks.zero import is_zero
from ..scaling import hooks
from ..scaling.parameters import parameters_of
from ..torch_inside import dynamo, names
from ..torch_inside.replace import Spot, applied, calls_of, method, put, reads_of


class _Parameters:
    """The parameters of each optimizer, in an attribute of its own (`_name`): Dynamo reads those of
    the first before the second is known, and looks up attributes, but not a dict, each time.
    """


_PARAMETERS = _Parameters()
_optimizers: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()


def optimizer_of(number: int) -> Optimizer:
    """The optimizer that a `take_step` in a graph stands for.

    Raises:
        CannotRewrite: its step can't be a part of a graph.
    """
    optimizer = _optimizers[number]
    if is_zero(optimizer):
        raise CannotRewrite("ZeroRedundancyOptimizer exchanges parameters in its step")
    if hooks.has_others(optimizer):
        raise CannotRewrite(f"{type(optimizer).__name__} has step hooks")
    return optimizer


def _numbered(optimizer: Optimizer) -> int:
    """The number of an optimizer, under which its parameters can be read."""
    known = next((n for n, one in _optimizers.items() if one is optimizer), None)
    number = next(_unused) if known is None else known
    name = _name(number)
    if known is None:
        _optimizers[number] = optimizer
        weakref.finalize(optimizer, vars(_PARAMETERS).pop, name, None).atexit = False
    setattr(_PARAMETERS, name, parameters_of(optimizer))
    return number


_unused = itertools.count()


def _name(number: int) -> str:
    return f"of_{number}"


# What Dynamo reads in the place of an optimizer's methods. These take its number, as an operator of
# the graph does.


def _traced_step(number: int, *args: Any, **kwargs: Any) -> None:
    if any(arg is not None for arg in (*args, *kwargs.values())):  # `take_step` takes nothing
        names.graph_break()
    params, grads = [], []
    for param in getattr(_PARAMETERS, _name(number)):
        if param.grad is not None:
            params.append(param)
            grads.append(param.grad)
    if params:
        with torch.no_grad():
            torch.ops.mpcompile.take_step.default(number, params, grads)


def _traced_zero_grad(number: int, set_to_none: bool = True) -> None:
    for param in getattr(_PARAMETERS, _name(number)):
        if set_to_none:
            param.grad = None
        elif param.grad is not None:
            with torch.no_grad():
                param.grad.zero_()


def _go_backward(theirs: Any, *args: Any, **kwargs: Any) -> Any:
    """Dynamo's tracing of `backward()`, which leaves nothing in the graph if it finds no leaf."""
    return theirs(*args, **kwargs)


def _accept_outputs(theirs: Any, output: Any, rv: Any, tx: Any) -> None:
    """Dynamo's checks of results that need a gradient, which a backward has used up. `return loss`
    is what most people write; `StepProgram` returns such results detached, and refuses all others.
    """


def _not_static(theirs: Any, tensor: Any) -> None:
    """Whether a tensor's address is static, for Dynamo. Once it has traced an optimizer, those of
    its parameters are; it takes them for constants of each graph, under two names: what
    `backward()` does to one, `step()` doesn't see at the other.
    """


class _Patches:
    """What Dynamo does of its own for optimizers, replaced.

    Attributes:
        backward: in the place of Dynamo's tracing of `backward()`.
        groups: in the place of its reading of `param_groups`.
        seen: the optimizers that it has met, by their numbers.
        stepped: the numbers of those whose `step` it has read.
    """

    def __init__(self) -> None:
        self.seen: dict[int, Optimizer] = {}
        self.stepped: set[int] = set()
        optimizers = names.OptimizerVariable
        self.backward = calls_of(names.TensorVariable, "backward", _go_backward)
        self.groups = reads_of(optimizers, "param_groups", self._read_groups)
        self._replaced = (
            self.backward,
            self.groups,
            reads_of(optimizers, "step", functools.partial(self._read, _traced_step)),
            reads_of(optimizers, "zero_grad", functools.partial(self._read, _traced_zero_grad)),
            *(
                method(names.OutputGraph, name, _accept_outputs)
                for i, name in enumerate(dynamo.CHECK_OUTPUTS)
                if i == 0 or hasattr(names.OutputGraph, name)
            ),
            method(names.builder, dynamo.IS_STATIC, _not_static),
        )

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """In this context, all are in place; no other thread compiles.

        Raises:
            MissingInTorch: Dynamo has no such place. Then none is.
        """
        with applied(*self._replaced), contextlib.ExitStack() as undo:
            # Dynamo traces `.grad` of a Parameter, and not of a subclass, such as a MasterWeight.
            module = names.torch_function
            banned = [name for name in module.banned_attrs if name != "grad"]
            undo.callback(put(Spot(module, "banned_attrs"), banned))
            _patches.append(self)
            undo.callback(_patches.pop)
            yield

    def _read(self, ours: Any, theirs: Any, variable: Any, tx: Any) -> Any:
        number = self._number(variable)
        if ours is _traced_step:
            self.stepped.add(number)
        return dynamo.with_number(ours, number)

    def _read_groups(self, theirs: Any, variable: Any, tx: Any) -> None:
        """As of any attribute: Dynamo's own marks parameters as static, and makes the optimizer
        capturable.
        """
        self._number(variable)

    def _number(self, variable: Any) -> int:
        number = _numbered(variable.value)
        self.seen[number] = variable.value
        return number


_patches: list[_Patches] = []  # of the trace that runs


def traceable_optimizers() -> contextlib.AbstractContextManager[None]:
    """In this context, Dynamo traces the steps of all optimizers as `take_step`; no other thread
    compiles.
    """
    return _Patches().applied()


def check_reached(has_backward: bool) -> None:
    """See that Dynamo has traced a function by what stands here in the place of its own.

    Args:
        has_backward: whether the graph that Dynamo has made of it contains a backward.

    Raises:
        CannotRewrite: it has gone another way, so it may have lost a gradient or a setting.
    """
    patches, known = _current(), _traced().id_to_variable
    if patches.backward.reached and not has_backward:
        raise CannotRewrite("no gradient of its backward is read")
    if has_backward and not patches.backward.reached:
        raise CannotRewrite("Dynamo has traced its backward() in a way that is not known")
    rebound.check_reached(reads_gradients=has_backward)
    seen = patches.seen.values()
    if any(id(o.param_groups) in known for o in seen) and not patches.groups.reached:
        raise CannotRewrite("Dynamo has read an optimizer's param_groups in a way not known")


def stepped_without_gradient(graph: fx.Graph) -> list[Optimizer]:
    """The optimizers whose step left nothing in the graph: it comes before the backward."""
    takes = graph.find_nodes(op="call_function", target=torch.ops.mpcompile.take_step.default)
    patches, taken = _current(), {node.args[0] for node in takes}
    return [patches.seen[number] for number in sorted(patches.stepped - taken)]


def changes_settings() -> bool:
    """Whether the function that is being traced changes a setting of an optimizer: Dynamo does that
    after its graph, and a step reads them before.
    """
    effects = _traced()
    parts = [
        part
        for o in _current().seen.values()
        for part in (o, o.state, *o.state.values(), o.param_groups, *o.param_groups)
    ]
    known = [effects.id_to_variable.get(id(part)) for part in parts]
    return any(effects.is_modified(variable) for variable in known if variable is not None)


def _traced() -> names.SideEffects:
    """What Dynamo has noted of the function that it is tracing."""
    output = dynamo.traced_output()
    if output is None:
        raise CannotRewrite("Dynamo does not say what it is tracing")
    return output.side_effects


def _current() -> _Patches:
    if not _patches:
        raise CannotRewrite("Dynamo did not say that it began to trace")
    return _patches[-1]
