"""What was seen while one graph ran: plain numbers by the names of its nodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .numbers import EXPONENTS, Numbers, Shares


@dataclass(frozen=True)
class BackwardStep:
    """One node of autograd's graph that ran in a backward pass.

    Attributes:
        node: the node of our graph whose gradient it computed.
        name: autograd's name of it: `"MulBackward0"`; inside the backward of a user's
            autograd.Function, the operator's name there.
        frames: the user's frames inside such a backward, outermost first; else empty.
        received, passed_on: the gradients that came in, and those that it computed.
    """

    node: str
    name: str
    received: Numbers
    passed_on: Numbers
    frames: tuple[str, ...] = ()


@dataclass
class Record:
    """One run of one graph, forward and backward.

    Attributes:
        values: of the result of each node, by its name.
        gradients: of the gradient of each node's result, as it is in the graph (that is, multiplied
            by the loss scale where the graph scales), summed over backward passes.
        steps: the backward, in the order in which it ran.
        exact: the results of each node, and `exact_gradients` the gradient of each of them (name,
            number of the result), if they are kept for a comparison.
        errors, gradient_errors: by how much values and gradients are off, relative to the norm of
            the exact ones. Gradients are compared without the loss scale.
        shares, gradient_shares: what the low dtype makes of the exact values, and of the exact
            gradients times the loss scale, where the graph stores them in the low dtype.
        lost: the share of a gradient's elements that are zero here and not in the exact one.
        path_of: module path in the plan -> module path in this run, see `moved.py`.
        histogram: of the exact gradients: elements by binary exponent, see `EXPONENTS`.
    """

    values: dict[str, Numbers] = field(default_factory=dict)
    gradients: dict[str, Numbers] = field(default_factory=lambda: defaultdict(Numbers))
    steps: list[BackwardStep] = field(default_factory=list)
    exact: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    exact_gradients: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    gradient_errors: dict[str, float] = field(default_factory=dict)
    shares: dict[str, Shares] = field(default_factory=dict)
    gradient_shares: dict[str, Shares] = field(default_factory=dict)
    lost: dict[str, float] = field(default_factory=dict)
    path_of: Callable[[str], str] = str
    histogram: torch.Tensor = field(
        default_factory=lambda: torch.zeros(len(EXPONENTS), dtype=torch.int64)
    )
