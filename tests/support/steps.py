"""Graphs of optimizer steps for tests: trace a tiny one, run the passes before one, then that."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from mpcompile import ir
from mpcompile.ir.scale import ScaleRule
from mpcompile.ir.step_config import Gradient, StepConfig
from mpcompile.optim.first_state import initialise_state
from mpcompile.optim.members import Member
from mpcompile.optim.trace import trace
from mpcompile.optim.updates import STEP_PASSES, StepPass

DYNAMIC = ScaleRule(min_scale=1.0)
STATIC = ScaleRule("static")
LOW = Gradient(torch.bfloat16, (0,))


def traced(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], tensors: Sequence[torch.Tensor]
) -> fx.GraphModule:
    """The step of an optimizer over these parameters, before any pass."""
    params = [nn.Parameter(t) for t in tensors]
    optimizer = make(params)
    for p in params:
        p.grad = torch.zeros_like(p)
    members = [Member(0, p) for p in params]
    initialise_state(optimizer, members)
    strides = [p.stride() for p in params]
    return trace(optimizer, members, strides=strides, foreach=False).graph


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.1)


class StepStage:
    """A step's graph in front of one pass: by default of SGD, one parameter, one static scale."""

    def __init__(
        self,
        pass_: StepPass,
        *sizes: tuple[int, ...],
        make: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = sgd,
        **config: Any,
    ) -> None:
        sizes = sizes or ((3,),)
        default: dict[str, Any] = {
            "gradients": (Gradient(torch.float32, (0,)),) * len(sizes),
            "copies": (None,) * len(sizes),
            "scales": (STATIC,),
        }
        self.config = StepConfig(**{**default, **config})
        tensors = [torch.ones(s) for s in sizes]
        self.gm = traced(make, tensors)
        self.pass_ = pass_
        for earlier in STEP_PASSES[: STEP_PASSES.index(pass_)]:
            earlier(self.gm, self.config)
        self.before = self.text.splitlines()

    @property
    def text(self) -> str:
        return ir.render(self.gm.graph)

    def run(self) -> str:
        """Run the pass. Returns the lines that are new, then those that went, with a minus."""
        changed = self.pass_(self.gm, self.config)
        self.gm.graph.lint()
        after = self.text.splitlines()
        assert changed == (after != self.before)
        added = [line for line in after if line not in self.before]
        gone = [f"- {line}" for line in self.before if line not in after]
        return "\n".join(added + gone) + "\n"

    def leaves_alone(self) -> bool:
        return not self.pass_(self.gm, self.config) and self.text.splitlines() == self.before
