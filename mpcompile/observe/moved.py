"""Which modules a call of a graph is about.

Dynamo compiles the forward of a submodule once, if a graph break keeps it out of the model's own
graph, and runs it for every module of that class. The plan names the first of them; the parameters
that a call passes tell which one it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["moved"]


def moved(compiled: Sequence[str | None], called: Sequence[str | None]) -> Callable[[str], str]:
    """Module path in the plan -> module path in this call.

    Args:
        compiled, called: the names of the graph's inputs in the model, when it was compiled and in
            this call: `"layers.0.fc.weight"`; None for an input that is no parameter of it.
    """
    for before, now in zip(compiled, called, strict=True):
        if before is None or now is None or before == now:
            continue
        old, new = before.split("."), now.split(".")
        while old and new and old[-1] == new[-1]:
            old.pop()
            new.pop()
        if old and new:
            return _replaced(".".join(old), ".".join(new))
    return lambda path: path


def _replaced(old: str, new: str) -> Callable[[str], str]:
    def path_now(path: str) -> str:
        inside = path == old or path.startswith(f"{old}.")
        return new + path.removeprefix(old) if inside else path

    return path_now
