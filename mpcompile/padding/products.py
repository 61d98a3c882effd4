"""The operators that multiply matrices, in one form: their dimensions, labelled as in einsum.

    linear   x[m0, m1, k] weight[n, k] bias[n]                -> [m0, m1, n]
    bmm      a[b, m, k] b[b, k, n]                            -> [b, m, n]
    conv2d   x[b, c, -, -] weight[o, c, -, -] bias[o]         -> [b, o, -, -]
    attention  q[.., -, e] k[.., -, e] v[.., -, v]            -> [.., -, v]
    lstm     x[-, -, i] weight_ih[-, i] ...

All questions about products are answered here; no pass distinguishes the operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from torch import fx

from .. import ir
from ..ir.shapes import Labels, Path, Product, Size
from ..rules.rule import NAMED, signature
from ..torch_inside.graphs import schema

_GEMM_DIMS = ("batch", "m", "n", "k")


def product(node: fx.Node) -> Product | None:
    """The node as a product, or None if it is not one that Tensor Cores run.

    Products with vectors (mv, dot, a 1-d operand of matmul) don't count: memory bounds them.
    """
    if not ir.is_op(node):
        return None
    text = ir.rule(node).product
    if text is None:
        return None
    if (named := _NAMED.get(text)) is not None:
        return named(node)
    found = signature(text)
    assert found is not None, f"{ir.op_name(node)}: {text!r} is no product"
    return _two_factors(node, found.factors, found.result, added=found.added)


# -- matrix products ------------------------------------------------------------------------------


def _gemm(
    operands: Mapping[Path, tuple[fx.Node, Labels]],
    result: Labels,
    factors: tuple[Path, Path],
    batch: Mapping[str, Size] | None = None,
) -> Product | None:
    """A product of two factors, and the operands that are added to it; `batch`: the sizes of
    dimensions without a label, which are broadcast against each other and never padded.
    """
    sizes: dict[str, Size] = {}
    for path in factors:
        value, labels = operands[path]
        for label, size in zip(labels, ir.shape(value), strict=True):
            if label is not None and not ir.known_equal(sizes.setdefault(label, size), size):
                return None  # a dimension of size 1 that is broadcast
    left, right = (operands[path][1] for path in factors)
    roles: dict[str, list[str]] = {name: [] for name in _GEMM_DIMS}
    for label in sizes:
        inside = label in left, label in right, label in result
        role = {(True, True, True): "batch", (True, False, True): "m",
                (False, True, True): "n", (True, True, False): "k"}.get(inside)  # fmt: skip
        if role is None:
            return None  # summed over one operand alone
        roles[role].append(label)
    if not (roles["m"] and roles["n"] and roles["k"]):
        return None
    roles["batch"] += batch or {}
    sizes = {**(batch or {}), **sizes}
    added = {path for path in operands if path not in factors}
    return Product(
        kind="gemm",
        operands={
            path: _aligned(labels, ir.shape(value), sizes) if path in added else labels
            for path, (value, labels) in operands.items()
        },
        result=result,
        sizes=sizes,
        dims={name: tuple(labels) for name, labels in roles.items()},
        terms=(tuple(sizes),),
        strides=("n", "k"),
        rows=("m",),
        added=frozenset(added),
    )


def _aligned(labels: Labels, shape: Sequence[Size], sizes: Mapping[str, Size]) -> Labels:
    """The labels of an operand that is added, by broadcasting, to a result with these labels."""
    last = labels[len(labels) - len(shape) :]
    return tuple(
        label if label is not None and ir.known_equal(sizes[label], size) else None
        for label, size in zip(last, shape, strict=True)
    )


def _linear(node: fx.Node) -> Product | None:
    rank = len(ir.shape(ir.argument(node, "input")))
    rows = tuple(f"m{i}" for i in range(rank - 1))
    labels: dict[str, Labels] = {"input": (*rows, "k"), "weight": ("n", "k")}
    return _two_factors(node, labels, (*rows, "n"), added="bias")


def _matmul(node: fx.Node) -> Product | None:
    left, right = (len(ir.shape(ir.argument(node, name))) for name in ("self", "other"))
    if min(left, right) < 2:
        return None
    if right == 2:
        rows = tuple(f"m{i}" for i in range(left - 1))
        labels: dict[str, Labels] = {"self": (*rows, "k"), "other": ("k", "n")}
        return _two_factors(node, labels, (*rows, "n"))
    batch = {f"b{i}": size for i, size in enumerate(ir.shape(node)[:-2])}
    labels = {"self": (*[None] * (left - 2), "m", "k"), "other": (*[None] * (right - 2), "k", "n")}
    return _two_factors(node, labels, (*[None] * len(batch), "m", "n"), batch=batch)


def _two_factors(
    node: fx.Node,
    names: Mapping[str, Labels],
    result: Labels,
    *,
    added: str | None = None,
    batch: Mapping[str, Size] | None = None,
) -> Product | None:
    operands: dict[Path, tuple[fx.Node, Labels]] = {
        (ir.position_of(node, n),): (ir.argument(node, n), x) for n, x in names.items()
    }
    left, right = operands
    if added is not None and isinstance(value := ir.argument(node, added), fx.Node):
        operands[ir.position_of(node, added),] = (value, result)
    return _gemm(operands, result, (left, right), batch)


def _einsum(node: fx.Node) -> Product | None:
    """Only an einsum that is one product: two operands, `->` present, no ellipsis, no diagonal."""
    equation, tensors = ir.argument(node, "equation"), ir.argument(node, "tensors")
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return None
    inputs, result = equation.replace(" ", "").split("->")
    terms = inputs.split(",")
    if len(terms) != 2 or any(len(set(term)) < len(term) for term in terms):
        return None
    operands: dict[Path, tuple[fx.Node, Labels]] = {
        (1, i): (tensors[i], tuple(term)) for i, term in enumerate(terms)
    }
    return _gemm(operands, tuple(result), ((1, 0), (1, 1)))


# -- convolutions, attention, recurrent layers ----------------------------------------------------


def is_transposed(node: fx.Node) -> bool:
    """Whether a convolution is a transposed one."""
    if "transposed" in [argument.name for argument in schema(node.target).arguments]:
        return bool(ir.argument(node, "transposed"))
    return "transpose" in ir.op_name(node)


def _convolution(node: fx.Node) -> Product | None:
    transposed = is_transposed(node)
    value, weight, bias = (ir.argument(node, name) for name in ("input", "weight", "bias"))
    groups = ir.argument(node, "groups")
    spatial = (None,) * (len(ir.shape(weight)) - 2)
    batched = len(ir.shape(value)) == len(ir.shape(weight))
    sides: Labels = ("in", "out") if transposed else ("out", "in")
    batch: Labels = (None,) * batched
    operands: dict[Path, Labels] = {(0,): (*batch, "in", *spatial), (1,): (*sides, *spatial)}
    if isinstance(bias, fx.Node):
        operands[2,] = ("out",)
    walked = value if transposed else node  # the positions at which the kernel is applied
    kernel = ir.shape(weight)
    sizes = {
        "batch": ir.shape(value)[0] if batched else 1,
        "positions": math.prod(ir.shape(walked)[1 + batched :]),
        "in": kernel[0] // groups if transposed else kernel[1],
        "out": kernel[1] if transposed else kernel[0] // groups,
        "kernel": math.prod(kernel[2:]),
        "groups": groups,
    }
    fixed = {} if groups == 1 else dict.fromkeys(("in", "out"), "each group is a product alone")
    return _conv(operands, (*batch, "out", *spatial), sizes, fixed)


def _conv_tbc(node: fx.Node) -> Product:
    kernel, channels, out = ir.shape(ir.argument(node, "weight"))
    time, batch = ir.shape(node)[:2]
    sizes = {
        "batch": batch, "positions": time, "in": channels, "out": out, "kernel": kernel, "groups": 1
    }  # fmt: skip
    operands: dict[Path, Labels] = {(0,): (None, None, "in"), (1,): (None, "in", "out")}
    return _conv({**operands, (2,): ("out",)}, (None, None, "out"), sizes, {})


def _conv(
    operands: Mapping[Path, Labels],
    result: Labels,
    sizes: Mapping[str, Size],
    fixed: Mapping[str, str],
) -> Product:
    return Product(
        kind="conv",
        operands=operands,
        result=result,
        sizes=sizes,
        dims={
            "batch": ("batch",), "positions": ("positions",), "in_channels": ("in",),
            "out_channels": ("out",), "kernel": ("kernel",), "groups": ("groups",),
        },
        terms=(tuple(sizes),),
        strides=("in_channels", "out_channels"),
        added=frozenset({(2,)}) & operands.keys(),
        fixed=fixed,
    )  # fmt: skip


def _attention(node: fx.Node) -> Product:
    query, key, value = (ir.shape(ir.argument(node, name)) for name in ("query", "key", "value"))

    def labels(shape: tuple[Size, ...], last: str) -> Labels:
        return (*[None] * (len(shape) - 1), last)

    number = isinstance(query[-1], int) or ir.argument(node, "scale") is not None
    return Product(
        kind="attention",
        operands={(0,): labels(query, "e"), (1,): labels(key, "e"), (2,): labels(value, "v")},
        result=labels(ir.shape(node), "v"),
        sizes={
            "batch": math.prod(ir.shape(node)[:-2]), "queries": query[-2], "keys": key[-2],
            "e": query[-1], "v": value[-1],
        },
        dims={
            "batch": ("batch",), "queries": ("queries",), "keys": ("keys",), "head": ("e",),
            "value_head": ("v",),
        },
        terms=(("batch", "queries", "keys", "e"), ("batch", "queries", "keys", "v")),
        strides=("head", "value_head"),
        fixed={} if number else dict.fromkeys("ev", "its size is a symbol, and so is the scale"),
    )  # fmt: skip


def _recurrent(node: fx.Node) -> Product:
    """A recurrent operator. Only the input's size can be padded: the gates' weights are stacked in
    one tensor, so padding the hidden size would move their boundaries.
    """
    params: list[fx.Node] = list(ir.argument(node, "params"))
    where = ir.position_of(node, "params")
    both = 2 if ir.argument(node, "bidirectional") else 1
    layers = ir.argument(node, "num_layers")
    step = len(params) // (layers * both)  # tensors of one direction of one layer
    packed = "batch_sizes" in [argument.name for argument in schema(node.target).arguments]
    value = node.args[0]
    assert isinstance(value, fx.Node)
    *steps, width = ir.shape(value)
    recurrent = ir.rule(node).recurrent
    assert recurrent is not None
    gates = recurrent.gates
    hidden = ir.shape(params[0])[0] // gates
    sizes = {
        "steps": math.prod(steps), "samples": _samples(node, steps), "input": width,
        "hidden": hidden, "gates": gates,
        "both": both, "later": layers - 1, "below": ir.shape(params[1])[1] * both,
        "recurrent": ir.shape(params[1])[1], "layers": layers,
    }  # fmt: skip
    weights: dict[Path, Labels] = {(where, step * i): (None, "input") for i in range(both)}
    return Product(
        kind="rnn",
        operands={(0,): (*[None] * (1 if packed else 2), "input"), **weights},
        result=None,
        sizes=sizes,
        dims={"steps": ("steps",), "input": ("input",), "hidden": ("hidden",), "gates": ("gates",)},
        terms=(
            ("both", "steps", "gates", "hidden", "input"),
            ("later", "both", "steps", "gates", "hidden", "below"),
            ("layers", "both", "steps", "gates", "hidden", "recurrent"),
        ),
        strides=("input", "hidden"),
        fixed={"hidden": "the weights of its gates are stacked in one tensor"},
    )


def _samples(node: fx.Node, steps: list[Size]) -> Size:
    """How many sequences run side by side; 1 if that is unknown, as for a packed batch."""
    if len(steps) < 2:
        return 1
    return steps[0] if ir.argument(node, "batch_first") else steps[1]


# -- the names used in the table ------------------------------------------------------------------

_NAMED: Mapping[str, Callable[[fx.Node], Product | None]] = {
    "linear": _linear,
    "matmul": _matmul,
    "einsum": _einsum,
    "convolution": _convolution,
    "conv_tbc": _conv_tbc,
    "attention": _attention,
    "recurrent": _recurrent,
}
assert tuple(_NAMED) == NAMED
