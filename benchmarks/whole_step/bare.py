"""A step without its compiled graphs: each call of one returns at once what it returned before."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch._inductor.output_code import CompiledFxGraph

from mpcompile.optim import step as step_module
from mpcompile.whole_step.call import Call


class Graphs:
    """The calls of compiled graphs in one step.

    Args:
        step: runs once.

    Attributes:
        whole: how many of the calls were of whole training steps.
    """

    def __init__(self, step: Callable[[], object]) -> None:
        self._returned: dict[int, list[list[Any]]] = {}
        with self._patched(self._remembering):
            step()
        self._next = {owner: itertools.cycle(all_) for owner, all_ in self._returned.items()}
        self.whole = sum(len(self._returned.get(id(call), ())) for call in _alive(Call))

    def do_nothing(self) -> contextlib.AbstractContextManager[None]:
        """In this context they return what they returned then, call by call."""
        return self._patched(self._repeating)

    @contextlib.contextmanager
    def _patched(self, changed: Callable[[int, Any], Callable[..., Any]]) -> Iterator[None]:
        inductor = CompiledFxGraph.__call__

        def call_inductor(graph: CompiledFxGraph, inputs: Sequence[Any]) -> Any:
            return changed(id(graph), functools.partial(inductor, graph))(inputs)

        with contextlib.ExitStack() as patches:
            patches.enter_context(mock.patch.object(CompiledFxGraph, "__call__", call_inductor))
            # These call the function below Inductor's object.
            for kind, attribute in _BELOW.items():
                for owner in _alive(kind):
                    run = changed(id(owner), getattr(owner, attribute))
                    patches.enter_context(mock.patch.object(owner, attribute, run))
            yield

    def _remembering(self, owner: int, run: Callable[..., Any]) -> Callable[..., Any]:
        def remember(*args: Any) -> Any:
            results = run(*args)
            self._returned.setdefault(owner, []).append(_again(results))
            return results

        return remember

    def _repeating(self, owner: int, run: Callable[..., Any]) -> Callable[..., Any]:
        # A graph that did not run then is another arm's.
        returned = self._next.get(owner)
        return run if returned is None else lambda *args: _again(next(returned))


_BELOW = {Call: "_run", step_module._Bound: "_run", step_module._AtOnce: "_run"}


def _alive(kind: type) -> list[Any]:
    # Not isinstance(): it asks objects for `__class__`, and some answer with a warning.
    return [o for o in gc.get_objects() if type(o) is kind]


def _again(results: Sequence[Any]) -> list[Any]:
    """The same values as new tensors: autograd writes to the ones that it gets."""
    with torch.no_grad():
        return [r.detach() if isinstance(r, torch.Tensor) else r for r in results]
