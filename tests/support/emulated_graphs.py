"""Runs graphs as Inductor hands them to CUDA graph trees, on a GPU that is emulated, and tells.

python tests/support/emulated_graphs.py h100
"""

from benchmarks import emucuda  # isort: skip  (before torch)

import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch._inductor.cudagraph_utils import PlaceholderInfo

from benchmarks.emucuda import graphs

CUDA = torch.device("cuda")


def double(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [inputs[0] * 2]


def handed(run: Callable[[list[Any]], Any], **said: Any) -> Callable[..., Any]:
    """A graph in Inductor's hands, called with its inputs."""
    trees = sys.modules["torch._inductor.cudagraph_trees"]
    graph = trees.cudagraphify_impl(run, [], **said)
    return lambda *inputs: graph(list(inputs))


def new_step() -> None:
    torch.compiler.cudagraph_mark_step_begin()


def counted() -> dict[str, Any]:
    return dataclasses.asdict(graphs.counts())


def stages() -> dict[str, Any]:
    graph, results, addresses = handed(double), [], []
    for step in range(4):
        new_step()
        (result,) = graph(torch.full((3,), float(step), device=CUDA))
        results.append(result.tolist())
        addresses.append(result.data_ptr())
    return {"results": results, "fixed": len(set(addresses[1:])) == 1, **counted()}


def kept_results() -> dict[str, Any]:
    graph, seen = handed(double), []
    for _ in range(3):
        new_step()
        (result,) = graph(torch.ones(3, device=CUDA))
        seen.append(result)
        before = result.tolist()
    new_step()
    copied = seen[-1].clone()
    graph(torch.ones(3, device=CUDA) * 4)
    return {"at once": before, "kept": seen[-1].tolist(), "copied": copied.tolist(),
            "warmed up": seen[0].isnan().all().item()}  # fmt: skip


def written_inputs() -> dict[str, Any]:
    def write(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [inputs[0].add_(1) * 2]

    placeholders = [PlaceholderInfo("x", None, [], None)]
    counters.clear()
    found = {}
    for name, stay in (("stays", (0,)), ("moves", ())):
        torch._dynamo.reset()
        said = {"mutated_input_idxs": (0,), "placeholders": placeholders}
        graph, x = handed(write, static_input_idxs=stay, **said), torch.zeros(3, device=CUDA)
        for _ in range(3):
            new_step()
            graph(x)
        found[name] = {"value": x.tolist(), **counted()}
    return {**found, "skips": counters["inductor"]["cudagraph_skips"]}


def main(name: str) -> None:
    emucuda.become(name)
    found = {}
    for part in (stages, kept_results, written_inputs):
        torch._dynamo.reset()
        found[part.__name__] = part()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
