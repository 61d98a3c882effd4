"""Take a private name from torch before mpcompile is imported, and see what follows.

Run as a program, it imports torch once. For each path that it reads from its input, it forks, and
the child prints one line of JSON: `Seen`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Seen:
    """What followed.

    Attributes:
        how: "deleted"; "hidden": torch needs it itself, so only mpcompile can't find it; "kept": it
            can't be taken away.
        found: what is said of the names that are gone.
        steps: a part of mpcompile -> what is wrong with a training by it, or None.
        error: an exception that came up elsewhere, or None.
    """

    how: str
    found: list[str] = dataclasses.field(default_factory=list)
    steps: dict[str, str | None] = dataclasses.field(default_factory=dict)
    error: str | None = None


def seen(path: str) -> Seen:
    """Take the name away, import mpcompile with all names, and train."""
    how = take_away(path)
    from mpcompile.torch_inside import private_names
    from mpcompile.torch_inside.health import why_off
    from mpcompile.torch_inside.private_names import NAMES, Part

    private_names.take_all()
    if how == "hidden" and not NAMES[path].taken:
        return Seen("kept")  # an attribute that is read where it is used
    found = [str(why_off(name.part)) for name in private_names.GONE]
    steps: dict[str, str | None] = {}
    for part in {Part.COMPILE, NAMES[path].part}:
        try:
            steps[part.name] = wrong(part.name)
        except Exception as error:  # what torch raises without it, or mpcompile, which names it
            steps[part.name] = f"{type(error).__name__}: {error}"
    return Seen(how, found, steps)


def wrong(part: str) -> str | None:
    """Train by what the part is for, and by torch in FP64. How they differ, if they do."""
    results = [trained(part, low=low) for low in (True, False)]
    pairs = zip(*results, strict=True)
    far = max(((a.double() - b).abs().max() / b.abs().max()).item() for a, b in pairs)
    return None if far < 0.02 else f"differs from FP64 by {far:.2g}"


def trained(part: str, *, low: bool) -> list[torch.Tensor]:
    """How far the parameters of a model have moved after two steps; `low`: by mpcompile."""
    from mpcompile import MPOptimizer, explain, mpcompile

    torch.compiler.reset()
    torch.manual_seed(0)
    recurrent = part == "RECURRENT"
    net: Any = nn.LSTM(6, 8) if recurrent else nn.Sequential(nn.Linear(6, 8), nn.GELU())
    x = torch.randn(5, 3, 6)
    net, x = (net, x) if low else (net.double(), x.double())
    start = [p.detach().clone() for p in net.parameters()]
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    emit = "inductor" if part == "INDUCTOR" else "aot_eager"
    if low and part == "OPTIMIZER":
        optimizer = MPOptimizer(optimizer, emit=emit)
    if low and part == "EXPLAIN":
        explain(net, x)
    options: Any = {"dtype": torch.float16, "emit": emit, "loss_scale": 1024.0}
    model = mpcompile(net, **options) if low and part != "WHOLE_STEP" else net

    def step() -> None:
        result = model(x)
        (result[0] if recurrent else result).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    run = mpcompile(step, **options) if low and part == "WHOLE_STEP" else step
    for _ in range(2):
        run()
    return [now.detach() - then for now, then in zip(net.parameters(), start, strict=True)]


def take_away(path: str) -> str:
    """Delete a name from torch, if torch can do without it; else hide it from mpcompile."""
    module, _, names = path.partition(":")
    *within, last = names.split(".")
    try:
        holder = functools.reduce(getattr, within, importlib.import_module(module))
        value = vars(holder)[last]
        delattr(holder, last)
    except (ImportError, AttributeError, KeyError, TypeError):
        return "kept"  # it isn't there, or it belongs to a type written in C
    if torch_needs(holder, last):
        setattr(holder, last, value)
        hide(module, names)
        return "hidden"
    return "deleted"


def torch_needs(holder: Any, name: str) -> bool:
    """Whether a function beside it reads the name, or torch alone can't train without it."""
    beside = [f.__code__ for f in vars(holder).values() if isinstance(f, FunctionType)]
    if any(name in code.co_names for code in beside):
        return True
    if (child := os.fork()) == 0:  # where it fails, it may leave anything behind
        try:
            torch_trains()
        except BaseException:  # whatever torch says without it
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] != 0


def torch_trains() -> None:
    """One step compiled by torch alone; raises where it can't."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        torch.compile(model, backend="aot_eager")(torch.randn(2, 4)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def hide(module: str, names: str) -> None:
    """Have `importlib.import_module(module)`, as mpcompile calls it, return what lacks the name."""
    real = importlib.import_module

    def without(found: Any, path: list[str]) -> Any:
        first, *rest = path
        others = {key: getattr(found, key) for key in dir(found) if key != first}
        return SimpleNamespace(
            **others, **({first: without(getattr(found, first), rest)} if rest else {})
        )

    def import_module(name: str, package: str | None = None) -> Any:
        found = real(name, package)
        asked = sys._getframe(1).f_code.co_filename.endswith("private_names.py")
        return without(found, names.split(".")) if asked and name == module else found

    importlib.import_module = import_module


def in_a_child(work: Callable[[], Seen]) -> None:
    """Fork; the child prints what `work` returns, on the output that the parent had."""
    if (child := os.fork()) != 0:
        os.waitpid(child, 0)
        return
    answer = os.dup(1)
    os.dup2(2, 1)  # what programs print is no answer
    try:
        result = work()
    except BaseException:
        result = Seen("?", error=traceback.format_exc())
    os.write(answer, json.dumps(dataclasses.asdict(result)).encode() + b"\n")
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)  # threads don't survive a fork
    for module in ("torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.fsdp"):
        importlib.import_module(module)  # whole, before anything of theirs is taken away
    for line in sys.stdin:
        in_a_child(functools.partial(seen, line.strip()))
