"""What Dynamo sees of optimizers while it traces a whole training step.

Dynamo doesn't trace `optimizer.step()` and `zero_grad()` behind a `backward()`: torch's own methods
break the graph on purpose. So while such a function is traced, they are other methods. `step`
leaves one operator in the graph (`operators/take_step.py`), with the parameters that have a
gradient and these gradients; the backend puts the optimizer's step in its place. `zero_grad` sets
every gradient to None without looking at it, so nothing is guarded on.

Dynamo guards on the methods that it saw. These are gone when the function runs, so those guards are
dropped (`keeps`); what they would notice of an optimizer, `calls.py` checks.

What stands in the place of Dynamo's own proves in each trace that it was reached (`check_reached`).
Where an optimizer's `step` or `zero_grad`, or the check of the results, were not, Dynamo breaks its
graph at torch's own, which it can't in a whole step.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ..capture import rebound
from ..errors import CannotRewrite
from ..ranks.zero import is_zero
from ..state import hooks
from ..torch_inside import dynamo
from ..torch_inside.graphs import STATIC_INPUT
from ..torch_inside.optimizers import is_wrapped_by_scheduler
from ..torch_inside.replace import calls_of, method, reads_of


class _Parameters:
    """The parameters of each optimizer, in an attribute of its own (`_name`): Dynamo reads those of
    the first before the second is known, and looks up attributes, but not a dict, each time.
    """


_PARAMETERS = _Parameters()
_optimizers: dict[int, weakref.ref[Optimizer]] = {}

# The number of an optimizer, an attribute of it while a function is traced. Dynamo of 2.11 calls no
# function that takes an optimizer; so it reads the number from there, as a text: an integer might
# be a symbol.
_NUMBER = "_mpcompile_number"


def optimizer_of(number: int) -> Optimizer:
    """The optimizer that a `take_step` in a graph stands for.

    Raises:
        CannotRewrite: its step can't be a part of a graph.
    """
    optimizer = _optimizers[number]()
    assert optimizer is not None
    if is_zero(optimizer):
        raise CannotRewrite("ZeroRedundancyOptimizer exchanges parameters in its step")
    if hooks.has_others(optimizer):
        raise CannotRewrite(f"{type(optimizer).__name__} has step hooks")
    return optimizer


def parameters_of(optimizer: Optimizer) -> tuple[torch.Tensor, ...]:
    """All parameters of an optimizer, in the order of its groups."""
    return tuple(p for group in optimizer.param_groups for p in group["params"])


def _numbered(optimizer: Optimizer) -> int:
    """The number of an optimizer, under which its parameters can be read."""
    known = next((n for n, ref in _optimizers.items() if ref() is optimizer), None)
    number = next(_unused) if known is None else known
    name = _name(number)
    if known is None:
        _optimizers[number] = weakref.ref(optimizer, lambda _: _forget(number))
    setattr(_PARAMETERS, name, parameters_of(optimizer))
    return number


_unused = itertools.count()


def _forget(number: int) -> None:
    vars(_PARAMETERS).pop(_name(number), None)
    _optimizers.pop(number, None)


def _name(number: int) -> str:
    return f"of_{number}"


def _traced_step(eager: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():  # of another thread
            return eager(self, *args, **kwargs)
        if any(arg is not None for arg in (*args, *kwargs.values())):  # `take_step` takes nothing
            dynamo.graph_break()
        number = int(getattr(self, _NUMBER))
        params, grads = [], []
        for param in getattr(_PARAMETERS, _name(number)):
            if param.grad is not None:
                params.append(param)
                grads.append(param.grad)
        if params:
            with torch.no_grad():
                torch.ops.mpcompile.take_step.default(number, params, grads)
        return None

    return step


def _traced_zero_grad(eager: Callable[..., Any]) -> Callable[..., Any]:
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            return eager(self, *args, **kwargs)
        set_to_none = args[0] if args else kwargs.get("set_to_none", True)
        for param in getattr(_PARAMETERS, _name(int(getattr(self, _NUMBER)))):
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                with torch.no_grad():
                    param.grad.zero_()
        return None

    return zero_grad


_METHODS = {"step": _traced_step, "zero_grad": _traced_zero_grad}


def _go_backward(theirs: Any, *args: Any, **kwargs: Any) -> Any:
    """Dynamo's tracing of `backward()`, which leaves nothing in the graph if it finds no leaf."""
    return theirs(*args, **kwargs)


def _accept_outputs(theirs: Any, output: Any, rv: Any, tx: Any) -> None:
    """Dynamo's check that no result's graph was used up by a backward. `return loss` is what most
    people write; `Program` returns such results detached, and refuses others that need a gradient.
    """


def _read_groups(theirs: Any, variable: Any, tx: Any) -> None:
    """Dynamo's reading of `param_groups` as of any attribute: its own marks parameters as static
    (see `_Patches`), and makes the optimizer capturable.
    """


class _Patches:
    """The methods of all optimizers, and what Dynamo does of its own for them, replaced.

    Attributes:
        backward: in the place of Dynamo's tracing of `backward()`.
        groups: in the place of its reading of `param_groups`.
    """

    def __init__(self) -> None:
        self.backward = calls_of(dynamo.TensorVariable, "backward", _go_backward)
        self.groups = reads_of(dynamo.OptimizerVariable, "param_groups", _read_groups)
        self._replaced = (
            self.backward,
            self.groups,
            method(dynamo.OutputGraph, dynamo.CHECK_OUTPUTS, _accept_outputs),
        )
        self._methods = [
            (cls, name, own, _METHODS[name](own))
            for cls in (Optimizer, *_below(Optimizer))
            for name in _METHODS
            if (own := vars(cls).get(name)) is not None
            and (cls is not Optimizer or name == "zero_grad")
        ]
        living = _living()
        self._numbers = [(o, _numbered(o)) for o in living]
        # A scheduler wraps the step of its optimizer, in a file that Dynamo doesn't trace.
        self._wrapped = [
            (o, vars(o)["step"]) for o in living if is_wrapped_by_scheduler(vars(o).get("step"))
        ]
        # Once Dynamo has traced an optimizer, it takes that one's parameters for constants of each
        # graph, under two names: what `backward()` does to one, `step()` doesn't see at the other.
        self._static = [
            (p, vars(p)[STATIC_INPUT])
            for o in living
            for p in dict.fromkeys(parameters_of(o))
            if STATIC_INPUT in vars(p)
        ]
        # Dynamo traces `.grad` of a Parameter, and not of a subclass of it, such as a MasterWeight.
        self._banned = [name for name in dynamo.torch_function.banned_attrs if name != "grad"]

    def apply(self) -> None:
        """Put all in place, or nothing.

        Raises:
            MissingInTorch: Dynamo has no such place.
        """
        with contextlib.ExitStack() as undo:
            for replacement in self._replaced:
                replacement.apply()
                undo.callback(replacement.revert)
            self._swap_banned()
            undo.callback(self._swap_banned)
            for cls, name, own, traced in self._methods:
                setattr(cls, name, traced)
                undo.callback(setattr, cls, name, own)
            for optimizer, wrapped in self._wrapped:
                vars(optimizer).pop("step", None)
                undo.callback(vars(optimizer).update, step=wrapped)
            for optimizer, number in self._numbers:
                vars(optimizer)[_NUMBER] = str(number)
                undo.callback(vars(optimizer).pop, _NUMBER, None)
            for param, kind in self._static:
                vars(param).pop(STATIC_INPUT, None)
                undo.callback(vars(param).update, {STATIC_INPUT: kind})
            self._undo = undo.pop_all()

    def revert(self) -> None:
        self._undo.close()

    def _swap_banned(self) -> None:
        module = dynamo.torch_function
        module.banned_attrs, self._banned = self._banned, module.banned_attrs


_patches: list[_Patches] = []  # of the trace that runs


@contextlib.contextmanager
def traceable_optimizers() -> Iterator[None]:
    """In this context, Dynamo traces the steps of all optimizers as `take_step`."""
    with dynamo.compile_lock:  # the methods of a class are the same for all threads
        patches = _Patches()
        patches.apply()
        _patches.append(patches)
        try:
            yield
        finally:
            _patches.pop().revert()


def check_reached(has_backward: bool) -> None:
    """See that Dynamo has traced a function by what stands here in the place of its own.

    Args:
        has_backward: whether the graph that Dynamo has made of it contains a backward.

    Raises:
        CannotRewrite: it has gone another way, so it may have lost a gradient or a setting.
    """
    if not _patches:
        raise CannotRewrite("Dynamo did not say that it began to trace")
    patches, known = _patches[-1], _traced().id_to_variable
    if patches.backward.reached and not has_backward:
        raise CannotRewrite("no gradient of its backward is read")
    if has_backward and not patches.backward.reached:
        raise CannotRewrite("Dynamo has traced its backward() in a way that is not known")
    rebound.check_reached(reads_gradients=has_backward)
    if any(id(o.param_groups) in known for o in _living()) and not patches.groups.reached:
        raise CannotRewrite("Dynamo has read an optimizer's param_groups in a way not known")


def changes_settings() -> bool:
    """Whether the function that is being traced changes a setting of an optimizer: Dynamo does that
    behind its graph, and a step reads them before.
    """
    effects = _traced()
    parts = [
        part
        for o in _living()
        for part in (o, o.state, *o.state.values(), o.param_groups, *o.param_groups)
    ]
    known = [effects.id_to_variable.get(id(part)) for part in parts]
    return any(effects.is_modified(variable) for variable in known if variable is not None)


def _traced() -> dynamo.SideEffects:
    """What Dynamo has noted of the function that it is tracing."""
    output = dynamo.traced_output()
    if output is None:
        raise CannotRewrite("Dynamo does not say what it is tracing")
    return output.side_effects


@contextlib.contextmanager
def optimizers_as_they_are() -> Iterator[None]:
    """In this context, within the other one, all optimizers have their own methods."""
    if not _patches:
        yield
        return
    _patches[-1].revert()
    try:
        yield
    finally:
        _patches[-1].apply()


def _below(cls: type[Any]) -> Iterator[type[Any]]:
    sub: type[Any]
    for sub in cls.__subclasses__():
        yield sub
        yield from _below(sub)


def _living() -> list[Optimizer]:
    """All living optimizers that have parameters."""
    # Not isinstance(): it asks objects for `__class__`, and some answer with a warning.
    alive = (o for o in gc.get_objects() if issubclass(type(o), Optimizer))
    return [o for o in alive if hasattr(o, "param_groups")]


def keeps(guards: Sequence[Any]) -> list[bool]:
    """Which of Dynamo's guards to keep: not those on the methods that were replaced, and on the
    numbers of optimizers (a `guard_filter_fn` of torch.compile).
    """
    optimizers = [g.name for g in guards if g.has_value and isinstance(g.value, Optimizer)]

    def is_of_replaced(guard: Any) -> bool:
        return _NUMBER in guard.name or any(
            f"type({name})" in guard.name
            or (guard.name == name and guard.guard_type == "NOT_PRESENT_IN_GENERIC_DICT")
            for name in optimizers
        )

    return [not is_of_replaced(guard) for guard in guards]
