"""What Dynamo sees of optimizers while it traces a whole training step.

Dynamo doesn't trace `optimizer.step()` and `zero_grad()` behind a `backward()`: torch's own methods
break the graph on purpose. So while such a function is traced, they are other methods. `step`
leaves one operator in the graph (`operators/take_step.py`), with the parameters that have a
gradient and these gradients; the backend puts the optimizer's step in its place. `zero_grad` sets
every gradient to None without looking at it, so nothing is guarded on.

Dynamo guards on the methods that it saw. These are gone when the function runs, so those guards are
dropped (`keeps`); what they would notice of an optimizer, `calls.py` checks.

Torch internals used here were read in torch 2.13 and exist in 2.11.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.variables import TensorVariable, torch_function
from torch._dynamo.variables.optimizer import OptimizerVariable
from torch.optim import Optimizer

from ..capture.rebound import GETATTR, written
from ..errors import CannotRewrite
from ..ranks.zero import is_zero
from ..state import hooks

_tracing = threading.Lock()  # the methods of a class are the same for all threads


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

_STATIC = "_dynamo_static_input_type"  # what `torch._dynamo.mark_static_address` sets


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
            torch._dynamo.graph_break()
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


_own_getattr = getattr(TensorVariable, GETATTR)


def _traced_getattr(self: Any, tx: Any, name: str) -> Any:
    """Dynamo's reading of a tensor's attribute, but for a `.grad` that the traced function has set.

    Dynamo says of what was set that it can be found in `.grad`. It can't: there is what was there
    before the function. And where it is None, Dynamo says so of the one None that it has for all
    that is traced in this process.
    """
    if name == "grad":
        self, effects = written(self, tx.output), tx.output.side_effects
        if effects.has_pending_mutation_of_attr(self, name):
            return effects.load_attr(self, name)
    return _own_getattr(self, tx, name)


_own_validate = OutputGraph._validate_outputs_safe_for_autograd_nodes


def _accept_outputs(self: Any, rv: Any, tx: Any) -> None:
    """Dynamo's check that no result's graph was used up by a backward. `return loss` is what most
    people write; `Program` returns such results detached, and refuses others that need a gradient.
    """


_own_backward = TensorVariable.method_backward
_METHODS_OF_TENSORS: Any = vars(TensorVariable).get("tp_methods")  # what torch 2.14 calls
_OWN_ENTRY = _METHODS_OF_TENSORS and _METHODS_OF_TENSORS["backward"]


def _noted_backward(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """Dynamo's tracing of `backward()`, which leaves nothing in the graph if it finds no leaf."""
    _patches[-1].output = tx.output
    return _own_backward(self, tx, *args, **kwargs)


def _traced_groups(self: Any, tx: Any, name: str) -> Any:
    """Dynamo's reading of an optimizer's attribute. For `param_groups`, its own marks parameters as
    static (see `_Patches`), and makes the optimizer capturable.
    """
    if name == "param_groups":
        return getattr(super(OptimizerVariable, self), GETATTR)(tx, name)
    return _own_groups(self, tx, name)


_own_groups = getattr(OptimizerVariable, GETATTR)
_GETSET: Any = vars(OptimizerVariable).get("tp_getset")  # from torch 2.14 on


class _Patches:
    """The methods of all optimizers, replaced.

    Attributes:
        output: Dynamo's record of the traced function, once that has called `backward()`.
    """

    def __init__(self) -> None:
        self.output: OutputGraph | None = None
        self._methods = [
            (cls, name, method, _METHODS[name](method))
            for cls in (Optimizer, *_below(Optimizer))
            for name in _METHODS
            if (method := vars(cls).get(name)) is not None
            and (cls is not Optimizer or name == "zero_grad")
        ]
        living = _living()
        self._numbers = [(o, _numbered(o)) for o in living]
        # A scheduler wraps the step of its optimizer, in a file that Dynamo doesn't trace.
        self._wrapped = [
            (o, vars(o)["step"])
            for o in living
            if hasattr(vars(o).get("step"), "_wrapped_by_lr_sched")
        ]
        # Once Dynamo has traced an optimizer, it takes that one's parameters for constants of each
        # graph, under two names: what `backward()` does to one, `step()` doesn't see at the other.
        self._static = [
            (p, vars(p)[_STATIC])
            for o in living
            for p in dict.fromkeys(parameters_of(o))
            if _STATIC in vars(p)
        ]
        # Dynamo traces `.grad` of a Parameter, and not of a subclass of it, such as a MasterWeight.
        self._banned = [name for name in torch_function.banned_attrs if name != "grad"]

    def apply(self) -> None:
        self._swap_banned()
        setattr(TensorVariable, GETATTR, _traced_getattr)
        TensorVariable.method_backward = _noted_backward  # type: ignore[method-assign]
        if _METHODS_OF_TENSORS:
            _METHODS_OF_TENSORS["backward"] = type(_OWN_ENTRY)(_noted_backward)
        if _GETSET is None:
            setattr(OptimizerVariable, GETATTR, _traced_groups)
        else:
            kept = {name: one for name, one in _GETSET.items() if name != "param_groups"}
            OptimizerVariable.tp_getset = kept  # type: ignore[attr-defined]
        OutputGraph._validate_outputs_safe_for_autograd_nodes = _accept_outputs  # type: ignore[method-assign]
        for cls, name, _, traced in self._methods:
            setattr(cls, name, traced)
        for optimizer, _ in self._wrapped:
            vars(optimizer).pop("step", None)
        for optimizer, number in self._numbers:
            vars(optimizer)[_NUMBER] = str(number)
        for param, _ in self._static:
            vars(param).pop(_STATIC, None)

    def revert(self) -> None:
        self._swap_banned()
        setattr(TensorVariable, GETATTR, _own_getattr)
        TensorVariable.method_backward = _own_backward  # type: ignore[method-assign]
        if _METHODS_OF_TENSORS:
            _METHODS_OF_TENSORS["backward"] = _OWN_ENTRY
        if _GETSET is None:
            setattr(OptimizerVariable, GETATTR, _own_groups)
        else:
            OptimizerVariable.tp_getset = _GETSET  # type: ignore[attr-defined]
        OutputGraph._validate_outputs_safe_for_autograd_nodes = _own_validate  # type: ignore[method-assign]
        for cls, name, own, _ in self._methods:
            setattr(cls, name, own)
        for optimizer, wrapped in self._wrapped:
            vars(optimizer)["step"] = wrapped
        for optimizer, _ in self._numbers:
            vars(optimizer).pop(_NUMBER, None)
        for param, kind in self._static:
            vars(param)[_STATIC] = kind

    def _swap_banned(self) -> None:
        banned = torch_function.banned_attrs
        torch_function.banned_attrs, self._banned = self._banned, banned


_patches: list[_Patches] = []  # of the trace that runs


@contextlib.contextmanager
def traceable_optimizers() -> Iterator[None]:
    """In this context, Dynamo traces the steps of all optimizers as `take_step`."""
    with _tracing:
        _patches.append(_Patches())
        _patches[-1].apply()
        try:
            yield
        finally:
            _patches.pop().revert()


def went_backward() -> bool:
    """Whether the function that is being traced has called `backward()`."""
    return bool(_patches) and _patches[-1].output is not None


def changes_settings() -> bool:
    """Whether that function changes a setting of an optimizer: Dynamo does that behind its graph,
    and a step reads them before.
    """
    output = _patches[-1].output if _patches else None
    if output is None:
        return False
    effects = output.side_effects
    parts = [
        part
        for o in _living()
        for part in (o, o.state, *o.state.values(), o.param_groups, *o.param_groups)
    ]
    known = [effects.id_to_variable.get(id(part)) for part in parts]
    return any(effects.is_modified(variable) for variable in known if variable is not None)


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
