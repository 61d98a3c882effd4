"""A call of a compiled module or function: the compiled call, and workarounds for what Dynamo
doesn't do.

* Dynamo skips frames of torch's own files, so `nn.Sequential(...).compile()` would compile nothing,
  and it counts recompiles per code object, which all instances of a class share. So each module
  gets an entry function (`owned_backend.py`), with a code object of its own.
* Recurrent layers break the graph unless that is prevented (`torch_inside/tracing_settings.py`).
* Half inputs to FP32 layers fail before a backend sees them. They are widened, which is exact; the
  first LOW op narrows them again (`half_inputs.py`).
* Someone may replace the module's forward by one under autocast: refused (`devices/autocast.py`).
* Dynamo guards neither on the module's own hooks nor on which optimizer holds its parameters. So
  the module is compiled again when its hooks change, and when an `MPOptimizer` takes over
  parameters of an O2 model.
* Within what someone else compiles, the graph ends at a call of ours (`read_by_dynamo`).
* FSDP2 gathers parameters in hooks that no graph can hold (`sharded_call.py`).
* TorchScript's tracer, and the ONNX exporter above it, refuse what Dynamo compiled: they get the
  plain module or function.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..devices.autocast import noting_regions, refuse_autocast_forward, without_autocast
from ..errors import MPCompileError
from ..ranks import fsdp
from ..scaling import parameters, uncalled
from ..scaling.kept_copies import follow_grad_mode
from ..torch_inside import given_up
from ..torch_inside.modules import (
    buffers_of,
    compiled_call,
    entered_by_dynamo,
    plain_call,
    set_compiled_call,
)
from ..torch_inside.names import BackendCompilerFailed, autocast_is_on, torchscript_trace
from ..torch_inside.outside_products import aside
from ..torch_inside.owned_backend import compiled_by, entry, shared_entry
from ..torch_inside.tensors import mark_on, version
from ..torch_inside.tracing_settings import is_inlined, settings_for, traced_with
from .half_inputs import refuse_written, widened, widens_inputs
from .left_to_python import ProductsCheck, enter_by_itself
from .regions import Regions, hooks_of
from .sharded_call import between_hooks, ends_graph, own_forward, parts_of

_AS_IT_IS = contextlib.nullcontext()
_REASON = "mpcompile() has compiled this by itself"


def running(
    compiled: Callable[..., Any],
    plain: Callable[..., Any],
    *contexts: Any,
    looking: ProductsCheck | None = None,
    **settings: bool,
) -> Callable[..., Any]:
    """Wrap what torch.compile returned for the function `plain`: Dynamo traces it within these
    contexts and with these settings (`traced_with`), without the caller's autocast, and an
    MPCompileError is raised as it is, without Dynamo's wrapper. `looking` looks at the first calls.
    """
    inner = noting_regions(compiled)
    contexts = (*contexts, aside) if looking is not None else contexts
    inner = traced_with(inner, *contexts, **settings) if contexts or settings else inner

    def untraced(*args: Any, **kwargs: Any) -> Any:
        try:
            with without_autocast() if autocast_is_on() else _AS_IT_IS:
                if looking is not None and looking.due:
                    result = looking.at(inner, args, kwargs)
                else:
                    result = inner(*args, **kwargs)
        except BackendCompilerFailed as failed:
            error = failed.inner_exception
            if isinstance(error, MPCompileError):
                raise error from error.__cause__  # keep our cause; drop Dynamo's wrapper
            raise
        given_up.look()
        return result

    apart = torch.compiler.disable(untraced, reason=_REASON)

    @functools.wraps(compiled)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return (plain if is_inlined() else apart)(*args, **kwargs)
        return (untraced if torchscript_trace() is None else plain)(*args, **kwargs)

    return entered_by_dynamo(run)


def compiled_part(
    backend: Callable[..., Any], compile_kwargs: Mapping[str, Any], module: nn.Module
) -> Callable[..., Any]:
    """The call of a module inside of what is compiled, compiled by itself."""
    own = entry(plain_call(type(module)), module)
    compiled = compiled_by(backend, own, **compile_kwargs)
    return running(compiled, own, looking=None, **settings_for(module))


class ModuleCall:
    """The function that a compiled module's call runs.

    Args:
        module: the module.
        compile_kwargs: arguments of torch.compile, but for the backend.
        backend: takes a graph and its inputs.
        reads_copies: whether its graphs read low copies: an `MPOptimizer`'s, or kept ones.
        check: called with the module before the first call; raises if it can't be compiled.
        called: called with the module after each call, until it returns True.
        looking: what looks at the first calls of a module; None: nobody does.
        regions: the modules inside of it that share a compile.
        scaled: whether its graphs have a loss scale, once it was called.
        method: what a call runs: a function of the module and the arguments; by default the module.
    """

    def __init__(
        self,
        module: nn.Module,
        compile_kwargs: Mapping[str, Any],
        *,
        backend: Callable[..., Any],
        reads_copies: bool,
        check: Callable[[nn.Module], None] = lambda _: None,
        called: Callable[[nn.Module], bool] = lambda _: True,
        looking: Callable[[nn.Module], ProductsCheck] | None = None,
        regions: Regions | None = None,
        scaled: Callable[[], bool] = lambda: False,
        method: Callable[..., Any] | None = None,
    ) -> None:
        self._module, self._compile_kwargs, self._backend = module, compile_kwargs, backend
        self._reads_copies, self._check, self._called = reads_copies, check, called
        self._method, self._regions, self._scaled = method, regions, scaled
        self._buffers: list[tuple[dict[str, Any], str]] = []
        self._looking = looking(module) if looking is not None else None
        self._sample = next(module.parameters(), None)
        self._look_at_dtype()
        self._told = not any(True for _ in module.parameters())
        self._asked: Any = None  # once more at the first call, whatever has changed
        self._compiled_for = self._now()
        self._forward: Any = None
        self._look_at_forward()
        self._compiled = self._compile(divides=False)

    def _look_at_dtype(self) -> None:
        """Learn again what follows from the module's dtype, which a cast of the module changes."""
        self._dtype = self._sample.dtype if self._sample is not None else None
        self._widens, self._checked = widens_inputs(self._module), False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            if not is_inlined():
                return _APART(self, *args, **kwargs)
        elif torchscript_trace() is None:
            return self._call(*args, **kwargs)
        return (self._method or plain_call(type(self._module)))(self._module, *args, **kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if self._sample is not None and self._sample.dtype is not self._dtype:
            self._look_at_dtype()
        if not self._checked:
            self._check(self._module)
            self._checked = True
            held = map(buffers_of, self._module.modules())
            self._buffers = [(buffers, name) for buffers in held for name in buffers]
        self._look_at_forward()
        if self._reads_copies:
            follow_grad_mode(self._module)
        # Equal modules are found at the first call, when hooks and optimizers are there.
        divides = self._regions is not None and not self._regions.divided
        if self._is_stale() or divides:
            self._compiled = self._compile()
        made: list[torch.Tensor] = []
        if self._widens:
            args, kwargs = widened(args, kwargs, made)
        # Whether a training is scaled, its first call tells.
        trains = torch.is_grad_enabled() and (not self._told or self._scaled())
        before = [(held, name, held.get(name)) for held, name in self._buffers] if trains else ()
        result = self._compiled(*args, **kwargs)
        if before and self._scaled():
            keep_finite(before)
        refuse_written(made)
        if not self._told:
            if torch.is_grad_enabled():
                uncalled.called(self._module)
            # After a call that may compile more than this one did, it is too early to tell.
            if self._looking is None or not self._looking.again:
                self._told = self._called(self._module)
        return result

    def _compile(self, *, divides: bool = True) -> Callable[..., Any]:
        """The call, compiled; of a module that FSDP shards, what runs between FSDP's hooks."""
        module = self._module
        fsdp.check_engines(module)
        regions: Collection[nn.Module] = ()
        if self._regions is not None and divides:
            self._regions.divide(self._backend, self._for_each)
            regions = self._regions.modules
        for part in parts_of(module, regions):
            if compiled_call(part) is None:
                self._compile_part(part)
        for enter in self._looking.entries if self._looking is not None else ():
            enter()  # again, as the module itself
        if fsdp.is_sharded(module) and self._method is None:
            return between_hooks(module, self._traced(own_forward(module)))
        return self._traced(self._method or plain_call(type(module)))

    def _compile_part(self, part: nn.Module) -> None:
        """Compile the call of a module inside of this one. If it is not sharded, and a graph is
        traced around it, it becomes part of that graph.
        """
        if not fsdp.is_sharded(part):
            enter_by_itself(part)
            return
        call = ModuleCall(
            part, self._compile_kwargs, backend=self._backend, reads_copies=self._reads_copies
        )
        set_compiled_call(part, ends_graph(call))

    def _for_each(self, kind: type[nn.Module], backend: Callable[..., Any]) -> Callable[..., Any]:
        """The call of any module of a class, compiled; it takes the module, too."""
        return self._running(shared_entry(plain_call(kind), kind), backend, None)

    def _traced(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function(module, ...)`, compiled."""
        return self._running(entry(function, self._module), self._backend, self._looking)

    def _running(
        self, own: Callable[..., Any], backend: Callable[..., Any], looking: ProductsCheck | None
    ) -> Callable[..., Any]:
        """A function with code of its own, compiled."""
        compiled = compiled_by(backend, own, **self._compile_kwargs)
        ends = [self._regions.ending_graphs] if self._regions is not None else []
        return running(compiled, own, *ends, looking=looking, **settings_for(self._module))

    def _is_stale(self) -> bool:
        """Whether something has changed that Dynamo doesn't guard on."""
        module, asked = self._module, self._asked
        changes = parameters.changes() if self._reads_copies else 0
        now = fsdp.engines(module), hooks_of(module), changes
        if now == asked:
            return False
        self._asked = now
        if asked is None or asked[0] != now[0]:  # an engine may have taken charge of parts
            fsdp.check_engines(module)
        before, self._compiled_for = self._compiled_for, self._now()
        return before != self._compiled_for

    def _now(self) -> tuple[Any, ...]:
        """Its hooks; the MPOptimizers whose copies it reads; which parts are sharded."""
        module = self._module
        read = module.parameters() if self._reads_copies else ()
        owners = [id(parameters.owner_of(p)) for p in read]
        return hooks_of(module), owners, [fsdp.is_sharded(m) for m in module.modules()]

    def _look_at_forward(self) -> None:
        forward = vars(self._module).get("forward")  # that someone has set on this very module
        if forward is not self._forward:
            refuse_autocast_forward(self._module)
            self._forward = forward


def keep_finite(before: Iterable[tuple[dict[str, Any], str, Any]]) -> None:
    """Let no overflow stay in buffers that a call has replaced (`self.mean = 0.9 * self.mean + x`):
    what isn't finite is what it was. Those that are written in place a pass keeps so
    (`passes/graph/own_memory.py`), which also finds the results that are infinite by the program (a
    mask). Nothing waits for the device here, either.

    Args:
        before: the dict that holds a buffer, its name, and what it was.
    """
    for held, name, old in before:
        new = held.get(name)
        if new is old or not (isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)):
            continue
        dense = new.layout is torch.strided and new.is_floating_point()
        if (mark := mark_on(new)) is not None and 0 <= mark.as_written == version(new):
            continue
        if dense and new.shape == old.shape and not new.requires_grad:
            held[name] = torch.where(new.isfinite(), new, old)


# Of the class: one of `self` would be a cycle, and a module whose call is replaced tells so at once
# (`scaling/uncalled.py`) only if nothing else holds the call.
_APART = torch.compiler.disable(ModuleCall._call, reason=_REASON)
