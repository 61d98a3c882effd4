"""CUDA graph trees without CUDA graphs: what they do to memory, and when they record.

Inductor hands each compiled graph to `torch._inductor.cudagraph_trees`, in whose place this stands.
A graph runs once to warm up, is recorded the second time, and is replayed from then on, if its
inputs that are said to stay have stayed; else it is recorded once more. Here each of the three runs
the graph. But its other inputs are copied to places of the recording's, and its results lie in the
recording's memory, as on a GPU; and when a new step begins, what the last one returned turns into
NaN, which a GPU would write over sooner or later.

Torch internals used here were read in torch 2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters


@dataclass
class Counts:
    """What was done since the last `torch._dynamo.reset()`.

    Attributes:
        warmups: runs before a recording.
        recordings: of graphs, each under the path of graphs that ran before it in its step.
        replays: of recordings.
        skipped: runs without a graph, since an input is written to that does not stay.
        rerecorded: recordings of a graph that had one at this place, each with the indices of
            the inputs that were elsewhere.
    """

    warmups: int = 0
    recordings: int = 0
    replays: int = 0
    skipped: int = 0
    rerecorded: list[tuple[int, ...]] = field(default_factory=list)


@dataclass(eq=False)
class _Graph:
    """One compiled graph, and what Inductor says of it."""

    run: Callable[[list[Any]], Any]
    stay: tuple[int, ...]
    written: tuple[int, ...]
    placeholders: Any
    backward: bool
    inference: bool
    warm: bool = False


@dataclass(eq=False)
class _Recording:
    """A graph as recorded: where its inputs must be, and where everything else lies."""

    addresses: dict[int, int]
    places: dict[int, Tensor]
    results: list[torch.UntypedStorage | None]  # None: an input's, or no tensor of the device
    next: dict[_Graph, list[_Recording]] = field(default_factory=dict)


class _Trees:
    """All recordings, and the path through them of the step that runs."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.roots: dict[_Graph, list[_Recording]] = {}
        self.now: _Recording | None = None  # the end of the path
        self.returned: list[torch.UntypedStorage] = []  # on the path
        self.warming = self.recording = self.backward_due = False
        self.generation: int | None = None
        self.marks = 0  # steps that the user has begun, counted downwards as torch does

    def run(self, graph: _Graph, inputs: list[Any]) -> Any:
        results = self._run(graph, inputs)
        if graph.backward:
            self.backward_due = False
        elif not graph.inference:
            self.backward_due = True
        return results

    def set_to_running_backward(self) -> None:
        """Torch says so before a backward, whose graph may be missing."""
        self.backward_due = False

    def _run(self, graph: _Graph, inputs: list[Any]) -> Any:
        if (self.warming or (self.now is not None and self.recording)) and self._may_begin():
            self._end_step()
        if graph.written and self._refuses(graph, inputs):
            self.counts.skipped += 1
            return graph.run(inputs)
        if not graph.warm or self.warming:
            return self._warm_up(graph, inputs)
        known = (self.roots if self.now is None else self.now.next).setdefault(graph, [])
        addresses = self._addresses(graph, inputs)
        for recording in known:
            if recording.addresses == addresses:
                return self._replay(graph, recording, inputs)
        if self.now is not None and self.roots.get(graph) and self._may_begin():
            self._end_step()
            return self._run(graph, inputs)
        if known:
            before = known[-1].addresses
            moved = tuple(i for i, address in addresses.items() if before.get(i) != address)
            self.counts.rerecorded.append(moved)
        return self._record(graph, addresses, inputs, known)

    def _generation(self) -> int:
        from torch._dynamo.mutation_guard import GenerationTracker

        return self.marks or GenerationTracker.generation

    def _may_begin(self) -> bool:
        """A new step begins where the user says so, or a model is called and no backward is due."""
        return self.generation != self._generation() and (bool(self.marks) or not self.backward_due)

    def _end_step(self) -> None:
        for storage in self.returned:
            _bytes(storage).fill_(0xFF)
        self.returned, self.now, self.warming = [], None, False

    def _refuses(self, graph: _Graph, inputs: list[Any]) -> bool:
        from torch._inductor import cudagraph_utils

        said = SimpleNamespace(
            mutated_input_idxs=graph.written, static_input_idxs=graph.stay,
            placeholders=graph.placeholders,
        )  # fmt: skip
        why = cudagraph_utils.check_for_mutation(said, inputs, self._is_ours)  # type: ignore[arg-type]
        if why:
            cudagraph_utils.log_cudagraph_skip_and_bump_counter(why)
        return bool(why)

    def _is_ours(self, tensor: Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        return any(address == storage.data_ptr() for storage in self.returned)

    def _addresses(self, graph: _Graph, inputs: list[Any]) -> dict[int, int]:
        """Of the inputs that stay: those that Inductor says so of, and results on the path."""
        return {
            i: x.data_ptr()
            for i, x in enumerate(inputs)
            if isinstance(x, Tensor) and (i in graph.stay or (x.is_cuda and self._is_ours(x)))
        }

    def _warm_up(self, graph: _Graph, inputs: list[Any]) -> Any:
        self.generation = self._generation()
        self.counts.warmups += 1
        self.warming = graph.warm = True
        given = _storages_of(inputs)
        results = graph.run(inputs)
        self.returned += filter(None, _made(results, given))
        return results

    def _record(
        self, graph: _Graph, addresses: dict[int, int], inputs: list[Any], known: list[_Recording]
    ) -> Any:
        self.counts.recordings += 1
        counters["inductor"]["cudagraph_recorded_non_static_inputs"] += len(inputs) - len(addresses)
        self.generation, self.recording = self._generation(), True
        places = {
            i: torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="cuda").copy_(x)
            for i, x in enumerate(inputs)
            if isinstance(x, Tensor) and x.is_cuda and i not in addresses
        }
        given = _storages_of([inputs[i] for i in addresses])
        for i, place in places.items():
            inputs[i] = place
        results = graph.run(inputs)
        self.now = _Recording(addresses, places, _made(results, given))
        known.append(self.now)
        self.returned += filter(None, self.now.results)
        return results

    def _replay(self, graph: _Graph, recording: _Recording, inputs: list[Any]) -> list[Any]:
        self.counts.replays += 1
        self.generation, self.recording = self._generation(), False
        for i, place in recording.places.items():
            inputs[i] = place.copy_(inputs[i])
        results = list(graph.run(inputs))
        for i, (result, storage) in enumerate(zip(results, recording.results, strict=True)):
            if storage is None:
                continue
            if result.untyped_storage().data_ptr() != storage.data_ptr():
                _bytes(storage).copy_(_bytes(result.untyped_storage()))
            results[i] = torch.empty(0, dtype=result.dtype, device="cuda").set_(
                storage, result.storage_offset(), result.size(), result.stride()
            )
        self.now = recording
        self.returned += filter(None, recording.results)
        return results


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)


def _storages_of(inputs: Sequence[Any]) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in inputs if isinstance(x, Tensor)}


def _made(results: Sequence[Any], given: set[int]) -> list[torch.UntypedStorage | None]:
    """The memory of each result, but for what was given."""
    found = [x.untyped_storage() if isinstance(x, Tensor) and x.is_cuda else None for x in results]
    return [None if s is None or s.data_ptr() in given else s for s in found]


_trees = _Trees()


def counts() -> Counts:
    """What was warmed up, recorded and replayed so far."""
    return _trees.counts


def put_in_place() -> None:
    """Let torch import this for its `torch._inductor.cudagraph_trees`."""

    def reset() -> None:
        global _trees
        _trees = _Trees()

    def mark_step_begin() -> None:
        _trees.marks -= 1

    def cudagraphify_impl(
        model: Callable[[list[Any]], Any], inputs: Any, static_input_idxs: Sequence[int] = (),
        *args: Any, is_backward: bool = False, is_inference: bool = False, placeholders: Any = (),
        mutated_input_idxs: Sequence[int] = (), **kwargs: Any,
    ) -> Callable[[list[Any]], Any]:  # fmt: skip
        owner = _trees
        graph = _Graph(
            model, tuple(static_input_idxs), tuple(mutated_input_idxs), placeholders, is_backward,
            is_inference,
        )  # fmt: skip
        return lambda given: owner.run(graph, given)

    module: Any = ModuleType("torch._inductor.cudagraph_trees")
    module.reset_cudagraph_trees = reset
    module.mark_step_begin = mark_step_begin
    module.cudagraphify_impl = cudagraphify_impl
    module.get_manager = lambda device_index=0, create_if_none_exists=True: _trees
    sys.modules[module.__name__] = module
