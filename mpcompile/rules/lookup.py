"""Questions about operators, answered from the table and from the rows that users registered."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from ..errors import MPCompileError, did_you_mean
from ..torch_inside.graphs import overload_name, schema
from ..torch_inside.names import HigherOrderOperator, OpOverload
from .op_names import op_exists, op_key
from .policy import Precision
from .rule import DIMS, NAMED, UNKNOWN, Recurrent, Rule, signature
from .table import TABLE

_REGISTERED: dict[str, Rule] = {}

# Names from Python and Dynamo that are not operators of the table but come down to products.
_MADE_OF_PRODUCTS = frozenset(("imatmul", "higher_order::flex_attention"))


def rule_for(op: object) -> Rule:
    """The row of an operator (OpOverload), or `UNKNOWN`. A user's row beats the table's."""
    if not isinstance(op, (OpOverload, HigherOrderOperator)):
        return UNKNOWN
    key = op_key(op)
    if isinstance(op, OpOverload) and key not in _REGISTERED:
        return TABLE.get(f"{key}.{overload_name(op)}") or _row(key)
    return _row(key)


def known_ops() -> frozenset[str]:
    """Every operator with a row, built in or registered."""
    return frozenset(TABLE) | frozenset(_REGISTERED)


def multiplies(name: str) -> bool:
    """Whether this name is that of a matrix product, convolution or attention: an operator's name,
    or that of a function or method that a program calls (`"matmul"`).
    """
    return name in _MADE_OF_PRODUCTS or rule_named(name).multiplies


def rule_named(name: str) -> Rule:
    """The row of the operator of this name, or of a function or method that a program calls."""
    return _row(op_key(name))


def castable(op: object, position: int) -> bool:
    """Whether the argument at this position may be passed in another dtype."""
    return position not in places(op, rule_for(op).uncast)


def written_args(op: object) -> frozenset[int]:
    """Positions of the arguments an operator writes to, declared in its schema or not."""
    if not isinstance(op, OpOverload):
        return frozenset()
    declared = {
        i
        for i, argument in enumerate(schema(op).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    return frozenset(declared) | places(op, rule_for(op).writes)


def register_rule(op: object, precision: Precision | str, why: str, **facts: Any) -> None:
    """State what is known about an operator, for this process; replaces the user's earlier row.

    Args:
        op: `"mylib::op"`, or the `torch.ops` object.
        precision: "low", "full" or "follow" (or a `Precision`). "low" promises kernels, forward and
            backward, for FP16/BF16 inputs; "keep" is what an unregistered op gets anyway.
        why: the reason shown beside every node of this op in plans and dumps.
        **facts: the other attributes of `mpcompile.rules.Rule`, as `grows=True` or
            `product="x[m,k] w[n,k] -> [m,n]"`. Facts not given stay as in the table; for an
            operator without a row they are the defaults of `Rule`, except `fuses=False`: it is a
            kernel of its own.

    Raises:
        MPCompileError: no such operator, an unknown precision, an empty reason, a fact that `Rule`
            doesn't have or of another type, an argument that the operator doesn't have.
    """
    key = op_key(op)
    if not op_exists(key):
        raise MPCompileError(
            f"register_rule({op!r}): no such operator is registered with torch; "
            "define it first (torch.library.custom_op), then register its rule"
        )
    if isinstance(precision, str):
        if precision.upper() not in Precision.__members__:
            raise MPCompileError(
                f"register_rule({op!r}): unknown precision {precision!r}; "
                "use 'low', 'full', 'follow' or 'keep'"
            )
        precision = Precision[precision.upper()]
    if not why.strip():
        raise MPCompileError(f"register_rule({op!r}): say why; the plan shows it")
    _check_facts(key, facts)
    known = TABLE.get(key, UNKNOWN)
    _REGISTERED[key] = dataclasses.replace(known, precision=precision, reason=why, **facts)


def _row(key: str) -> Rule:
    return _REGISTERED.get(key) or TABLE.get(key, UNKNOWN)


@functools.cache
def places(op: object, names: str) -> frozenset[int]:
    """Positions of some arguments, given by their names in the operator's schema, as facts of its
    rule do: `places(op, rule_for(op).digits)`.
    """
    if not names or not isinstance(op, OpOverload):
        return frozenset()
    wanted = names.split()
    return frozenset(i for i, a in enumerate(schema(op).arguments) if a.name in wanted)


def _check_facts(key: str, facts: dict[str, Any]) -> None:
    known = {field.name: field.default for field in dataclasses.fields(Rule)}
    for name in ("precision", "reason"):
        del known[name]
    for name, value in facts.items():
        if name not in known:
            raise MPCompileError(
                f"register_rule({key!r}): unknown fact {name!r}{did_you_mean(name, known)}; "
                f"known: {', '.join(known)}"
            )
        kind = _TYPES.get(name, type(known[name]))
        if not isinstance(value, kind):
            raise MPCompileError(
                f"register_rule({key!r}): {name}={value!r}: give a {kind.__name__}"
            )
    if (dims := facts.get("dims")) is not None and dims not in DIMS:
        raise MPCompileError(
            f"register_rule({key!r}): dims={dims!r}{did_you_mean(dims, DIMS)}; "
            f"use one of {', '.join(DIMS)}"
        )
    arguments = _argument_names(key)
    for name in _named_arguments(key, facts):
        if name not in arguments:
            hint = did_you_mean(name, arguments)
            raise MPCompileError(f"register_rule({key!r}): it has no argument {name!r}{hint}")


# The types of the facts whose default is None.
_TYPES: dict[str, type] = {
    "product": str, "recurrent": Recurrent, "low_form": str, "fill": str, "dims": str,
}  # fmt: skip


# The facts that name arguments.
_NAMING = ("uncast", "writes", "masks", "fill", "digits", "compares", "finds")


def _named_arguments(key: str, facts: dict[str, Any]) -> list[str]:
    """The names of operator arguments that the facts mention."""
    named = " ".join(facts.get(name, "") for name in _NAMING).split()
    if (text := facts.get("product")) is not None and text not in NAMED:
        if (found := signature(text)) is None:
            raise MPCompileError(
                f"register_rule({key!r}): product={text!r}: write it as 'x[m,k] w[n,k] -> [m,n]', "
                f"or use one of {', '.join(NAMED)}{did_you_mean(text, NAMED)}"
            )
        named += [*found.factors, *([found.added] if found.added else [])]
    return named


def _argument_names(key: str) -> set[str]:
    namespace, name = key.split(".")[0].split("::")
    packet = getattr(getattr(torch.ops, namespace), name)
    overloads = (getattr(packet, overload) for overload in packet.overloads())
    return {argument.name for overload in overloads for argument in schema(overload).arguments}


# -- recurrent operators --------------------------------------------------------------------------

_RECURRENT = [key.removeprefix("aten::") for key, rule in TABLE.items() if rule.recurrent]

RNN_OPS: frozenset[Any] = frozenset(
    getattr(getattr(torch.ops.aten, name), overload)
    for name in _RECURRENT
    for overload in ("input", "data")  # padded, packed
)

# The recurrent functions as Dynamo names them, in the graph that capture replays. A graph that
# could not be captured reaches `emit` with these.
PACKETS: dict[Any, Any] = {getattr(torch, n): getattr(torch.ops.aten, n) for n in _RECURRENT}
