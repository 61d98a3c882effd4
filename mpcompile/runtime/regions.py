"""Equal modules of a model that share one compile (`regional=True`).

    for block in self.blocks:       # 24 equal blocks: 24 calls of one function, compiled once
        x = block(x)

Dynamo keeps what it compiled at a function's code, and guards on what the graph reads of a module:
not on which module it is. So equal modules are called through one function. They are the outermost
ones that have an equal in the same `ModuleList`, `ModuleDict` or `Sequential`.

A plan also depends on what Dynamo does not guard on: on the module's path, by the policy; on the
optimizer that holds a parameter; on hooks; on whether a parameter belongs to other modules, too.
Modules that differ in this share no function.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import fx, nn

from ..errors import MPCompileError
from ..ranks import fsdp
from ..rules.policy import Policy
from ..scaling import parameters
from ..torch_inside.dynamo import calls_of_modules
from ..torch_inside.modules import compiled_call, hooks_around, set_compiled_call
from ..torch_inside.names import dynamo_config
from ..torch_inside.replace import applied
from .sharded_call import ends_graph

Function = Callable[..., Any]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def equal_modules(model: nn.Module, policy: Policy) -> list[list[nn.Module]]:
    """The modules of a model that share a compile, in groups; a group may hold a single one.

    Args:
        policy: the user's.

    Returns:
        The groups; none where nothing is equal, or everything was compiled before.
    """
    held = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    groups: dict[Any, list[nn.Module]] = {}
    for path, module in _repeated(model, ""):
        within = (*_shape(module), *_unguarded(path, module, policy, held))
        groups.setdefault(within, []).append(module)
    return list(groups.values())


def _repeated(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules that have an equal beside them, each with its path."""
    children = {name: m for name, m in module.named_children() if not _is_taken(m)}
    shapes = {name: _shape(m) for name, m in children.items()}
    seen = Counter(shapes.values()) if isinstance(module, _CONTAINERS) else Counter()
    for name, child in children.items():
        at = f"{path}.{name}" if path else name
        if seen[shapes[name]] > 1 and any(True for _ in child.children()):
            yield at, child
        else:
            yield from _repeated(child, at)


def _is_taken(module: nn.Module) -> bool:
    """Whether someone else says how the module is compiled: the user, or FSDP's hooks."""
    return compiled_call(module) is not None or fsdp.is_sharded(module)


def _shape(module: nn.Module) -> tuple[Any, ...]:
    """What equal modules have in common: classes, and all of their tensors but the numbers."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return (
        tuple((name, type(m)) for name, m in module.named_modules()),
        tuple((name, x.shape, x.dtype, x.device, x.requires_grad) for name, x in tensors),
    )


def _unguarded(
    path: str, module: nn.Module, policy: Policy, held: Mapping[int, int]
) -> tuple[Any, ...]:
    """What else a plan of the module depends on."""
    within = list(module.named_modules(remove_duplicate=False))
    own = [p for _, p in module.named_parameters()]
    changed = any("forward" in vars(m) or any(hooks_around(m)) for _, m in within)
    elsewhere = any(held[id(p)] > 1 for p in own)
    return (
        tuple(policy.for_module(f"{path}.{name}" if name else path) for name, _ in within),
        tuple(id(parameters.owner_of(p)) for p in own),
        id(module) if changed or elsewhere else None,
    )


def hooks_of(module: nn.Module) -> tuple[int, ...]:
    """The numbers of the hooks on a module itself."""
    kinds = hooks_around(module)
    return tuple(number for kind in kinds for number in kind) if any(kinds) else ()


class Shared:
    """What is compiled for a group of equal modules.

    They may turn out to differ in something that Dynamo guards on, such as a number that each has
    and reads. It compiles a function only so many times: modules that come after the first kinds
    have functions of their own.

    Args:
        backend: takes a graph and its inputs.
        compiled: (backend) -> a function of a module and its arguments, with code of its own.
    """

    def __init__(self, backend: Function, compiled: Callable[[Function], Function]) -> None:
        self._backend, self._compiled = backend, compiled
        self._graphs = self._kinds = 0
        self._shared = compiled(self._count)

    def call_of(self, module: nn.Module) -> Function:
        """What a call of the module from Python runs."""
        run: Function | None = None
        hooks = hooks_of(module)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal run, hooks
            if (now := hooks_of(module)) != hooks:  # Dynamo doesn't guard on them
                run, hooks = self._compiled(self._count), now
            if run is not None:
                return run(module, *args, **kwargs)
            many = self._kinds >= dynamo_config.recompile_limit // 2
            run, before = self._compiled(self._count) if many else self._shared, self._graphs
            result = run(module, *args, **kwargs)
            self._kinds += self._graphs > before
            return result

        return ends_graph(call)

    def _count(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        self._graphs += 1
        return self._backend(gm, example_inputs)


class Regions:
    """The equal modules of a model. All that a call of the model may go through shares them: the
    model itself, a DDP around it, the steps of a LightningModule.

    Attributes:
        modules: those that share a compile; none before `divide`.
        divided: whether they were looked for.

    Raises:
        MPCompileError: there are none.
    """

    def __init__(self, model: nn.Module, policy: Policy) -> None:
        self._model, self._policy = model, policy
        self.modules: list[nn.Module] = []
        self.divided = False
        self._calls = calls_of_modules(lambda module: module in self.modules)
        if not equal_modules(model, policy):
            raise MPCompileError(
                f"regional=True: {type(model).__name__} holds no equal modules, such as the blocks "
                "of a transformer, in a ModuleList, ModuleDict or Sequential: leave it out"
            )

    def divide(
        self, backend: Function, compiled: Callable[[type[nn.Module], Function], Function]
    ) -> None:
        """Give the modules their calls, again if they have some.

        Args:
            backend: takes a graph and its inputs.
            compiled: (class, backend) -> a function of a module of that class and its arguments.
        """
        for module in self.modules:
            set_compiled_call(module, None)
        self.modules.clear()
        for group in equal_modules(self._model, self._policy):
            shared = Shared(backend, functools.partial(compiled, type(group[0])))
            for module in group:
                set_compiled_call(module, shared.call_of(module))
            self.modules += group
        self.divided = True

    def ending_graphs(self) -> AbstractContextManager[None]:
        """In this context, Dynamo ends a graph before it calls one of the modules. It would trace
        through to their code otherwise, whatever a call of them runs.
        """
        return applied(self._calls)
