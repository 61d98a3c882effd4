"""One model's gradients by every arm, against those of the same model in FP64.

`python -m benchmarks.zoo.measure 7 timm/swin timm/vit_tiny` measures each for 7 draws of weights
and batch, and prints a line of JSON for each as soon as it is there.
"""

from __future__ import annotations

import contextlib
import copy
import json
import sys
from typing import Any

import torch
from torch import Tensor, nn

from .arms import ARMS, Draw, Stepped, floating, gradients, run
from .catalogue import LIBRARIES
from .making import Entry

__all__ = ["FLOOR", "measure"]

FLOOR = 2.0**-10
"""What FP16 may round a number by, relatively. A parameter whose gradient is a smaller part of the
whole gradient than that is measured against this part: exact arithmetic may make it zero."""

Gradients = dict[str, Tensor]


def measure(name: str, draws: int) -> dict[str, Any]:
    """Measure `library/model`.

    After the draws, each arm takes one more step for each of the entry's batches of other sizes.

    Returns:
        `arms`: for each, `error` and `worst` (of each draw), `dead` (parameters whose gradient is
        exactly zero where FP64's is not), `graphs` (after the draws), `resized` (graphs at the
        end), `frames`, `skipped`, `left`, `warned`;
        or `failed`, why it didn't run.
    """
    library, _, model_name = name.partition("/")
    entry = LIBRARIES[library][model_name]
    drawers = [*[entry.draw] * draws, *entry.others]
    drawn = [Draw(_model(entry, seed).state_dict(), draw(torch.Generator().manual_seed(seed)))
             for seed, draw in enumerate(drawers)]  # fmt: skip
    model = _model(entry, 0)
    exact = [_exact(entry, model, draw) for draw in drawn]
    arms = {}
    for arm in ARMS:
        try:
            arms[arm] = _compared(run(arm, entry, model, drawn), exact, draws)
        except Exception as error:
            arms[arm] = {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
    kind = entry.kind if entry.low == torch.float16 else f"{entry.kind}, BF16"
    return {"name": name, "kind": kind, "arms": arms}


def _model(entry: Entry, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return entry.build()


def _exact(entry: Entry, model: nn.Module, draw: Draw) -> Gradients:
    in_fp64 = copy.deepcopy(model)
    in_fp64.load_state_dict(draw.weights)
    in_fp64.double()
    if hasattr(in_fp64, "set_experts_implementation"):  # torch's grouped product has no FP64
        with contextlib.suppress(ValueError):  # a model without experts
            in_fp64.set_experts_implementation("eager")
    torch.manual_seed(0)  # as in `run`
    entry.loss(in_fp64, floating(draw.inputs, torch.float64)).backward()
    return gradients(in_fp64)


def _compared(found: Stepped, exact: list[Gradients], draws: int) -> dict[str, Any]:
    errors = [_errors(*pair) for pair in zip(found.gradients, exact, strict=True)]
    return {
        "error": [error for error, _, _ in errors],
        "worst": [worst for _, worst, _ in errors],
        "worst_parameter": [name for _, _, name in errors],
        "dead": sorted(set().union(*map(_dead, found.gradients, exact))),
        "graphs": found.graphs[draws - 1],
        "resized": found.graphs[-1],
        "frames": found.frames,
        "skipped": found.skipped,
        "left": found.left,
        "warned": found.warned,
    }


def _errors(found: Gradients, exact: Gradients) -> tuple[float, float, str]:
    """Relative, over all parameters together; of the worst one; and which one that is.

    Raises:
        RuntimeError: not the same parameters have gradients.
    """
    if found.keys() != exact.keys():
        raise RuntimeError(f"gradients differ: {sorted(found.keys() ^ exact.keys())}")
    whole = _norm(exact)
    off = {name: found[name] - exact[name] for name in exact}
    worst = {
        name: float(off[name].norm() / max(float(exact[name].norm()), FLOOR * whole))
        for name in exact
    }
    name = max(worst, key=lambda name: worst[name])
    return _norm(off) / whole, worst[name], name


def _dead(found: Gradients, exact: Gradients) -> set[str]:
    """The parameters whose gradients are exactly zero although FP64's are well above rounding."""
    least = FLOOR * _norm(exact)
    return {n for n in exact if not bool(found[n].any()) and float(exact[n].norm()) > least}


def _norm(tensors: Gradients) -> float:
    return float(torch.stack([tensor.norm() for tensor in tensors.values()]).norm())


if __name__ == "__main__":
    torch.set_num_threads(1)
    for wanted in sys.argv[2:]:
        print(json.dumps(measure(wanted, draws=int(sys.argv[1]))), flush=True)
