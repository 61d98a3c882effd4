"""The random numbers that a compiled program draws, for a run of its graph operator by operator.

Inductor makes one tensor of seeds in each call, by torch's generator. From a seed its kernels make
numbers as they go, by an element's place. So the same seeds, and a kernel that makes nothing but
such numbers, give the same numbers. Operators that torch's own generator serves are run from the
same state of it; their order among one another may be another one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..devices.registry import RandomState
from ..torch_inside.names import FakeTensorMode, TracingContext, compile_inner, tracing

aten, prims = torch.ops.aten, torch.ops.prims

_RANDOM = (prims.inductor_random.default, prims.inductor_randint.default)
_SEEDS = (-(2**63), 2**63 - 1)  # as Inductor's code draws them


def is_random(node: fx.Node) -> bool:
    """Whether an operator draws random numbers, or seeds for them."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags or node.target in _RANDOM


def state_of(graph: fx.Graph, inputs: Sequence[Any]) -> RandomState | None:
    """The generators' states, where a graph draws from them."""
    if not any(is_random(node) for node in graph.nodes if node.op == "call_function"):
        return None
    return RandomState(x.device for x in inputs if isinstance(x, torch.Tensor))


def draw(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a node of a graph draws, as the compiled program does."""
    target: Any = node.target
    if target is prims.inductor_seeds.default:
        count, device = args
        return torch.randint(*_SEEDS, (count,), device=device)
    if target is prims.inductor_seed.default:
        return torch.randint(*_SEEDS, (), device=args[0])
    if target is prims.inductor_random.default:
        size, seed, mode = args
        return _numbers(mode, None, seed.device)(seed, size)
    if target is prims.inductor_randint.default:
        low, high, size, seed = args
        return _numbers("randint", (low, high), seed.device)(seed, size)
    return target(*args, **kwargs)


@functools.lru_cache(maxsize=16)
def _numbers(
    mode: str, bounds: tuple[int, int] | None, device: torch.device
) -> Callable[[torch.Tensor, Sequence[int]], torch.Tensor]:
    """A kernel that makes random numbers and nothing else."""

    @functools.lru_cache(maxsize=64)
    def kernel(count: int) -> Any:
        graph = fx.Graph()
        seed = graph.placeholder("seed")
        if bounds is None:
            made = graph.call_function(prims.inductor_random.default, ([count], seed, mode))
        else:
            made = graph.call_function(prims.inductor_randint.default, (*bounds, [count], seed))
        graph.output((made,))
        fakes = FakeTensorMode()
        with fakes:
            dtype = torch.float32 if bounds is None else torch.int64
            seed.meta["val"] = torch.empty((), dtype=torch.int64, device=device)
            made.meta["val"] = torch.empty(count, dtype=dtype, device=device)
        with torch.no_grad(), tracing(TracingContext(fakes)):
            return compile_inner(fx.GraphModule({}, graph), [seed.meta["val"]], is_inference=True)

    def make(seed: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
        count = math.prod(map(int, size))
        # One kernel serves all shapes with as many elements, and shorter ones: a place is a number.
        numbers: torch.Tensor = kernel(1 << max(10, (count - 1).bit_length()))([seed])[0]
        return numbers[:count].reshape(tuple(size))

    return make
