"""A torch.optim optimizer's own step -> a functional graph.

The step runs once on FakeTensors, on a shadow of the optimizer: an object of the same class, with
the same attributes, whose parameters, gradients and state are the graph's inputs. make_fx records
what it does, `functionalize` turns every in-place operator into its value and one `copy_` at the
end. What comes out is exactly the optimizer's arithmetic, whoever wrote it:

    p.mul_(1 - lr * decay)    ->    mul = mul(param0, sub)
    m.lerp_(g, 0.1); ...            copy_(param0, mul); copy_(state0_m, lerp); ...

* Learning rates are inputs (0-d, FP64), so a scheduler changes nothing. Every other setting that
  the step reads from a param group is a constant of the graph, and part of what `Trace.reads` says;
  floats that were seen to change (`varying`) become inputs too, and what the step asks about them
  (`if momentum != 0`) a guard.
* 0-d state (step counters) is computed in FP64, as the Python numbers are that an optimizer makes
  of it in eager mode, and stored back as it was.
* Whatever a graph can't say is refused: state or settings kept as Python numbers and changed by
  the step, a branch on a tensor's value, tensors that no parameter owns.

Torch internals used here were read in torch 2.13 and exist in 2.11: `_is_compiling_flag`, which
makes torch.optim keep tensors instead of calling `.item()`, and the wrappers around `step`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
)
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from ..errors import CannotRewrite
from ..ir.step import Slot

# Settings that are inputs of the graph, or chosen here.
_NOT_READ = ("params", "foreach", "fused", "capturable")
# Their single-tensor step for graphs divides by the learning rate: at 0, where a warmup starts, an
# element whose moments are 0 becomes 0 / 0. Their other one can be traced as well.
_BETTER_NOT_CAPTURABLE = (torch.optim.Adam, torch.optim.AdamW)
_tracing = threading.Lock()  # the compiling flag is one for the process


class StateAppeared(CannotRewrite):
    """The step made new state: it can be traced once that is there."""


@dataclass(frozen=True)
class Member:
    """A parameter that takes part in a step: its param group's index, and itself."""

    group: int
    param: torch.Tensor


Setting = tuple[int, str]  # of a param group, by its index


@dataclass(frozen=True)
class Trace:
    """A traced step.

    Attributes:
        graph: its inputs carry a `Slot` each, in `meta["mp_slot"]`.
        reads: (group index, setting) -> value, for all settings that the step read.
        attributes: the optimizer's own attributes that are plain values: the step may read them.
        guards: what the step assumed of settings that are inputs, over the symbols of `numbers`.
        numbers: the slot of each setting that is an input -> its symbol.
    """

    graph: fx.GraphModule
    reads: dict[Setting, Any]
    attributes: dict[str, Any]
    guards: tuple[sympy.Expr, ...]
    numbers: dict[Slot, sympy.Symbol]

    def holds_for(self, values: Mapping[Slot, float]) -> bool:
        """Whether the graph is right for these values of the settings that are inputs."""
        known = {symbol: values[slot] for slot, symbol in self.numbers.items()}
        return all(bool(guard.subs(known)) for guard in self.guards)


def varying_numbers(
    groups: Sequence[Mapping[str, Any]], varying: Iterable[Setting]
) -> dict[Slot, float]:
    """The floats in these settings, each with the slot that it has as an input of the graph."""
    found: dict[Slot, float] = {}
    for group, key in varying:
        value = groups[group][key]
        parts = {f"{key}.{i}": v for i, v in enumerate(value)} if _listed(value) else {key: value}
        found |= {Slot("setting", group, k): v for k, v in parts.items() if isinstance(v, float)}
    return found


def _listed(value: Any) -> bool:
    return isinstance(value, (tuple, list))


def trace(
    optimizer: Optimizer,
    members: Sequence[Member],
    *,
    foreach: bool,
    varying: Iterable[Setting] = (),
) -> Trace:
    """Trace one step of `optimizer` over those of its parameters that have a gradient.

    Args:
        optimizer: its state for the members is there already, as far as it can be known.
        members: the parameters of this step.
        foreach: ask for the multi-tensor implementation, where the class has one.
        varying: settings whose floats are to be inputs: they change from step to step (momentum,
            under a OneCycleLR).

    Raises:
        StateAppeared: the step makes state that isn't there yet.
        CannotRewrite: the step can't be written as one graph; the message says why.
    """
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    slots: list[Slot] = []
    fakes: list[Any] = []

    def add(slot: Slot, value: torch.Tensor, layout: torch.Tensor | None = None) -> None:
        slots.append(slot)
        stride = (value if layout is None else layout).stride()
        with mode:  # memory of its own: a fake of `value` would share it with its other fakes
            fakes.append(
                torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device)
            )

    with mode:
        lr = torch.zeros((), dtype=torch.float64, device=members[0].param.device)
    for i, member in enumerate(members):
        add(Slot("param", i), member.param)
        # As the optimizer is to see it: of the parameter's dtype, in the memory it has.
        add(Slot("grad", i), member.param, layout=member.param.grad)
        for key, value in optimizer.state.get(member.param, {}).items():
            if isinstance(value, torch.Tensor):
                add(Slot("state", i, str(key)), value)
    for index in sorted({m.group for m in members}):
        if has_lr(optimizer.param_groups[index]):
            slots.append(Slot("lr", index))
            fakes.append(lr.clone())

    numbers: dict[Slot, sympy.Symbol] = {}
    for slot, number in varying_numbers(optimizer.param_groups, varying).items():
        source = ConstantSource(str(slot))
        numbers[slot] = env.create_unspecified_symbol(
            number, source=source, dynamic_dim=DimDynamic.DYNAMIC
        )
        slots.append(slot)
        fakes.append(env.create_symfloatnode(numbers[slot], hint=number, source=source))

    shadow = _Shadow(optimizer, members, foreach=foreach)

    def step(*inputs: Any) -> tuple[()]:
        shadow.run(dict(zip(slots, inputs, strict=True)))
        return ()

    cls = type(optimizer)
    with (
        _tracing,
        _compiling(),
        _unwrapped(cls),
        _numbers_stay_tensors(cls),
        torch.no_grad(),
        torch._C._DisableAutocast(),
    ):
        try:
            # First as the step is written: functionalize knows no composite in-place operators.
            inplace = make_fx(step, tracing_mode="fake")(*fakes)
            functional = torch.func.functionalize(inplace, remove="mutations_and_views")
            gm = make_fx(functional, tracing_mode="fake")(*fakes)
        except CannotRewrite:
            raise
        except Exception as error:  # whatever a step does that can't be traced
            raise CannotRewrite(_describe(error)) from error
    for node, slot in zip(gm.graph.find_nodes(op="placeholder"), slots, strict=True):
        node.meta["mp_slot"] = slot
        node._rename(str(slot))
    if owned := gm.graph.find_nodes(op="get_attr"):
        raise CannotRewrite(f"it uses a tensor of its own ({owned[0].target})")
    _keep_gradients(gm.graph)
    guards = tuple(guard.expr for guard in env.guards)
    constants = {key: value for key, value in shadow.reads.items() if key not in set(varying)}
    return Trace(gm, constants, shadow.attributes, guards, numbers)


def has_lr(group: dict[str, Any]) -> bool:
    """Whether the learning rate of a param group is a number, and thereby an input of the graph."""
    lr = group.get("lr")
    return isinstance(lr, (int, float, torch.Tensor)) and not isinstance(lr, bool)


def _keep_gradients(graph: fx.Graph) -> None:
    """Drop the writes into gradients: `p.grad.add_(p, alpha=decay)` is for the step's own use."""
    for write in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        target = write.args[0]
        if target.op == "placeholder" and target.meta["mp_slot"].kind == "grad":
            graph.erase_node(write)


def _describe(error: Exception) -> str:
    if isinstance(error, (DataDependentOutputException, GuardOnDataDependentSymNode)):
        return "it branches on the value of a tensor, or makes a Python number of it"
    first = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {first}"


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextlib.contextmanager
def _numbers_stay_tensors(cls: type[Optimizer]) -> Iterator[None]:
    """`.item()` returns the 0-d tensor, and `min` and `max` in the file of `cls` take tensors.

    So a step that reads numbers off the device to compute with them (Adafactor) becomes a graph
    that does not. A branch on such a number still fails.
    """
    namespace = inspect.unwrap(cls.step).__globals__
    theirs = {name: namespace[name] for name in ("min", "max") if name in namespace}
    namespace.update(min=_of_tensors(min, torch.minimum), max=_of_tensors(max, torch.maximum))
    try:
        with _ItemIsTensor():
            yield
    finally:
        for name in ("min", "max"):
            del namespace[name]
        namespace.update(theirs)


@contextlib.contextmanager
def _unwrapped(cls: type[Optimizer]) -> Iterator[None]:
    """No hooks and no profiler ranges in `super().step()`: they are no part of the arithmetic."""
    wrapped: list[Any] = [c for c in cls.__mro__ if getattr(vars(c).get("step"), "hooked", False)]
    steps = [c.step for c in wrapped]
    for base, step in zip(wrapped, steps, strict=True):
        base.step = step.__wrapped__
    try:
        yield
    finally:
        for base, step in zip(wrapped, steps, strict=True):
            base.step = step


def _of_tensors(builtin: Callable[..., Any], pairwise: Callable[..., Any]) -> Callable[..., Any]:
    def choose(*args: Any, **kwargs: Any) -> Any:
        tensor = next((a for a in args if isinstance(a, torch.Tensor)), None)
        if tensor is None or len(args) == 1:
            return builtin(*args, **kwargs)
        numbers = (a if isinstance(a, torch.Tensor) else torch.full_like(tensor, a) for a in args)
        return functools.reduce(lambda x, y: pairwise(x, y.to(x.dtype)), numbers)

    return choose


class _ItemIsTensor(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.item and args[0].is_floating_point():
            return args[0].float()
        return func(*args, **(kwargs or {}))


class _Shadow:
    """Runs the optimizer's step on other tensors, and looks at what else it changed."""

    def __init__(self, optimizer: Optimizer, members: Sequence[Member], *, foreach: bool) -> None:
        self.optimizer = optimizer
        self.members = members
        self.foreach = foreach
        self.reads: dict[Setting, Any] = {}
        self.attributes = _numbers(_own_attributes(optimizer))

    def run(self, tensors: dict[Slot, Any]) -> None:
        optimizer: Any = object.__new__(type(self.optimizer))
        optimizer.__dict__.update(self.optimizer.__dict__)
        optimizer.__dict__.update(_numbers(self.attributes))  # to be changed without consequence
        state: dict[Any, dict[str, Any]] = defaultdict(dict)
        given: dict[Any, dict[str, Any]] = {}
        params: dict[int, list[torch.Tensor]] = defaultdict(list)
        for i, member in enumerate(self.members):
            param = tensors[Slot("param", i)]
            param.grad = tensors[Slot("grad", i)]
            params[member.group].append(param)
            if member.param in self.optimizer.state:
                entries = self.optimizer.state[member.param]
                state[param] = {k: self._working(tensors, i, k, v) for k, v in entries.items()}
            given[param] = dict(state.get(param, {}))
        optimizer.state = state
        optimizer.param_groups = [
            _Group(
                self.reads,
                index,
                self._settings(group, index, tensors, params[index]),
            )
            for index, group in enumerate(self.optimizer.param_groups)
            if index in params
        ]
        settings = [_numbers(dict(group)) for group in optimizer.param_groups]
        raw_step(type(self.optimizer))(optimizer)
        _refuse_changes("attribute", self.attributes, _numbers(_own_attributes(optimizer)))
        for before, group in zip(settings, optimizer.param_groups, strict=True):
            _refuse_changes("setting of its param group", before, _numbers(dict(group)))
        if other := [key for key in state if not any(key is p for p in given)]:
            raise CannotRewrite(
                f"it keeps state that belongs to no parameter of this step ({other[0]!r})"
            )
        for i in range(len(self.members)):
            param = tensors[Slot("param", i)]
            self._write_back(tensors, i, given[param], state.get(param, {}))

    def _settings(
        self,
        group: dict[str, Any],
        index: int,
        inputs: dict[Slot, Any],
        params: list[torch.Tensor],
    ) -> dict[str, Any]:
        def taken(key: str, value: Any) -> Any:  # an input of the graph, where it is one
            if _listed(value):
                return type(value)(taken(f"{key}.{i}", v) for i, v in enumerate(value))
            return inputs.get(Slot("setting", index, key), value)

        changed = {
            key: taken(key, value) for key, value in _fresh(group).items() if key != "params"
        }
        changed["params"] = params
        if Slot("lr", index) in inputs:
            changed["lr"] = inputs[Slot("lr", index)]
        if "foreach" in group:
            changed["foreach"] = self.foreach
        if "fused" in group:
            changed["fused"] = False
        if "capturable" in group:
            changed["capturable"] = self.foreach or not isinstance(
                self.optimizer, _BETTER_NOT_CAPTURABLE
            )
        return changed

    def _working(self, tensors: dict[Slot, torch.Tensor], index: int, key: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        tensor = tensors[Slot("state", index, str(key))]
        # The moments of a 0-d parameter are 0-d too; what counts its steps is called "step".
        number = tensor.ndim == 0 and (tensors[Slot("param", index)].ndim > 0 or key == "step")
        counts = number and tensor.is_floating_point() and tensor.dtype is not torch.float64
        return tensor.double() if counts else tensor

    def _write_back(
        self,
        tensors: dict[Slot, torch.Tensor],
        index: int,
        given: dict[str, Any],
        after: dict[str, Any],
    ) -> None:
        if new := [k for k, v in after.items() if v is not None and given.get(k) is None]:
            raise StateAppeared(f"its first step makes the state {', '.join(map(repr, new))}")
        _refuse_changes("entry of its state", _numbers(given), _numbers(after))
        for key, value in after.items():
            if isinstance(value, torch.Tensor):
                stored = tensors[Slot("state", index, str(key))]
                if value is stored:
                    continue
                if value.shape != stored.shape:
                    raise CannotRewrite(f"it changes the shape of its state {key!r}")
                stored.copy_(value)


class _Group(dict[str, Any]):
    """A param group that notes which settings are read: they are constants of the graph."""

    def __init__(self, reads: dict[Setting, Any], index: int, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self._reads, self._index = reads, index

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if key not in _NOT_READ and not (key == "lr" and isinstance(value, torch.Tensor)):
            self._reads[self._index, key] = _fresh(value)
        return value

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401 (reads through __getitem__)


_NUMBERS = (bool, int, float, str, type(None))


def _numbers(table: dict[str, Any]) -> dict[str, Any]:
    """The entries that are plain Python values, or tuples, lists and dicts of them; copies."""
    return {k: _fresh(v) for k, v in table.items() if _is_plain(v)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(v) for v in value)
    if isinstance(value, dict):
        return all(_is_plain(v) for v in value.values())
    return isinstance(value, _NUMBERS)


def _fresh(value: Any) -> Any:
    """The same, in lists and dicts of its own."""
    if isinstance(value, list):
        return [_fresh(v) for v in value]
    if isinstance(value, dict):
        return {k: _fresh(v) for k, v in value.items()}
    return value


def _own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    return {k: v for k, v in vars(optimizer).items() if k not in ("param_groups", "state")}


def _refuse_changes(what: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    if new := after.keys() - before.keys():
        raise StateAppeared(f"its first step makes the {what} {min(new)!r}")
    for key in before.keys() | after.keys():
        if before.get(key) != after.get(key):
            raise CannotRewrite(
                f"it keeps the {what} {key!r} as a Python value and changes it in every step; "
                "keep it as a tensor in `state`"
            )


def raw_step(cls: type[Optimizer]) -> Callable[..., Any]:
    """`cls.step` without torch's own wrappers (profiling and hooks, the grad mode switch).

    Decorators of the user's, `@torch.no_grad()` among them, stay.
    """
    step: Any = cls.step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    if getattr(step, "__code__", None) is not None and step.__code__.co_name == "_use_grad":
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]
