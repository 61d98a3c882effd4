"""Text of a graph and its nodes, and where in the user's program a node comes from."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import fx

from ..torch_inside.modules import COMPILED_CALL
from .dtypes import SHORT
from .marks import is_marked, mark
from .values import op_name

OWN_CALL = f".{COMPILED_CALL}._module"
"""In Dynamo's expression of what is in a module whose call is ours (`runtime/module_call.py`)."""


def module_path(node: fx.Node) -> str:
    """Dotted path of the module that made the node (`"layers.0.fc1"`), or the empty string."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(next(reversed(stack.values()))[0]).replace(OWN_CALL, "")
    path = re.sub(r"\._modules\['([^']*)'\]|\[['\"]?([^'\"\]]*)['\"]?\]",
                  lambda m: "." + (m.group(1) or m.group(2)), path)  # fmt: skip
    head, _, rest = path.partition(".")  # "L.self.layers.0": drop the variable Dynamo names
    return rest.partition(".")[2] if head in ("L", "G") else path


# Functions of ours that call what is compiled.
_ROOMS = ("runtime", "torch_inside", "steps.py")
_OURS = tuple(str(Path(__file__).parents[1] / name) for name in _ROOMS)
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.*)')


def frames(node: fx.Node) -> tuple[str, ...]:
    """`("train.py:30 in forward", "model.py:12 in forward")`: the user's frames, innermost last."""
    found = _FRAME.finditer(node.meta.get("stack_trace") or "")
    return tuple(
        f"{at['file'].rsplit('/', 1)[-1]}:{at['line']} in {at['function'].strip()}"
        for at in found
        if not at["file"].startswith(_OURS)
    )


def source(node: fx.Node) -> str:
    """`"model.py:12"`: the user's innermost frame that made the node, or the empty string."""
    return frames(node)[-1].partition(" in ")[0] if frames(node) else ""


def type_text(value: Any) -> str:
    """`f16[4, 3]`; tuples in parentheses; symbolic sizes by name."""
    if isinstance(value, torch.Tensor):
        return (
            f"{SHORT.get(value.dtype, str(value.dtype))}[{', '.join(str(s) for s in value.shape)}]"
        )
    if isinstance(value, (tuple, list)):
        return f"({', '.join(type_text(v) for v in value)})"
    return type(value).__name__


def _argument_text(argument: Any) -> str:
    if isinstance(argument, fx.Node):
        return argument.name
    if isinstance(argument, (tuple, list)):
        return f"[{', '.join(_argument_text(a) for a in argument)}]"
    return (
        SHORT.get(argument, str(argument)) if isinstance(argument, torch.dtype) else repr(argument)
    )


def line(node: fx.Node) -> str:
    """One node as text: `linear: f16[4, 3] = linear(x, weight)`."""
    arguments = [_argument_text(a) for a in node.args]
    if node.op == "placeholder":
        return f"{node.name}: {type_text(node.meta.get('val'))} = input"
    if node.op == "output":
        results = node.args[0] if isinstance(node.args[0], (tuple, list)) else node.args
        return f"return {', '.join(map(_argument_text, results))}"
    arguments += [f"{k}={_argument_text(v)}" for k, v in node.kwargs.items()]
    if node.op == "get_attr":
        return f"{node.name} = self.{node.target}"
    name = op_name(node).removeprefix("aten::")
    return f"{node.name}: {type_text(node.meta.get('val'))} = {name}({', '.join(arguments)})"


def render(graph: fx.Graph, *, reasons: bool = False) -> str:
    """The graph as text, one line for each node; with `reasons`, what was decided for it:
    `... # FULL: why [rule] (module, file)`.
    """
    lines = []
    for node in graph.nodes:
        text = line(node)
        if reasons and is_marked(node):
            decided = mark(node)
            where = ", ".join(filter(None, (module_path(node), source(node))))
            text = f"{text:<72}  # {decided.precision.value}: {decided.reason} [{decided.rule}]"
            text += f" ({where})" if where else ""
        lines.append(text)
    return "\n".join(lines) + "\n"


Place = tuple[str, str, str, int]
"""The place of one operator: its module, source and operator, as in a plan; and which one it is, of
those in the graph that share all of these."""


def places(graph: fx.Graph) -> dict[str, Place]:
    """The place of each operator of a captured graph, before any pass, by its name."""
    found: dict[str, Place] = {}
    seen: Counter[tuple[str, str, str]] = Counter()
    for node in graph.nodes:
        if node.op in ("call_function", "call_method"):
            where = module_path(node), source(node), op_name(node)
            found[node.name] = (*where, seen[where])
            seen[where] += 1
    return found


def scaled(count: int, unit: str, digits: int = 2) -> str:
    """`(69632, "B")` -> `"69.63 kB"`."""
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= scale:
            return f"{count / scale:.{digits}f} {prefix}{unit}"
    return f"{count} {unit}"
