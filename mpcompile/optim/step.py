"""One compiled step, bound to its tensors: for one pattern of gradients, or for many (`Absent`)."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import fx
from torch.optim import Optimizer

from ..devices.registry import capabilities
from ..ir.step import Slot
from ..ranks.shards import local
from ..torch_inside.amp import autocast_is_on, autocast_off
from ..torch_inside.autograd import set_grad_enabled
from .absent import Absent
from .compile_piece import Emit
from .gathered import Gathered
from .join_pieces import join_small, keep_results
from .key import StepKey
from .pieces import FEW, SMALL, split
from .program import BoundPieces
from .traced_step import TracedStep

_NOTHING = contextlib.nullcontext()


class CompiledStep:
    """The compiled step of one optimizer for one key.

    Args:
        emit: how its pieces are run.
        absent: the parameters of the key, if some may have no gradient; the state that waits for
            their first one is in the optimizer's own meanwhile (`state_stands_by`).
        options: see `TracedStep`, also for what is raised.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        key: StepKey,
        *,
        emit: Emit,
        absent: Absent | None = None,
        **options: Any,
    ) -> None:
        self.key, self._absent = key, absent
        whole = capabilities(key.members[0].param.device).multi_tensor or emit.how != "inductor"
        gathering = () if whole else key.members
        n = len(gathering)
        self._gathered = Gathered(gathering, key.gradients[:n], key.strides[:n])
        self._traced = TracedStep(
            optimizer, key, gathered=self._gathered.groups, absent=absent, **options
        )
        self.rests_on = self._traced.rests_on
        pieces = split(self._traced.graph, whole=whole, together=_is_tiny(key))
        if not whole:
            pieces = keep_results(join_small(pieces))
        held = {**self._traced.held, **self._gathered.held}
        self.program = self._traced.lending(lambda: BoundPieces(pieces, held, emit))
        given = self.program.given
        self._gradients = [
            (node, i)
            for i in range(len(key.members))
            if (node := given.get(Slot("grad", i))) is not None
        ]
        # For each scale, which inputs of the graph each step fills anew.
        scales = range(len(key.scales))
        self._fresh = [[given.get(Slot("scale", k, n)) for n in ("first", "flag")] for k in scales]

    @property
    def is_wide(self) -> bool:
        """Whether some of its parameters may have no gradient."""
        return self._absent is not None

    def covers(self, key: StepKey, optimizer: Optimizer) -> bool:
        """Whether it is wide, and right for the parameters of this key: see `Absent.covers`."""
        return self._absent is not None and self._absent.covers(key, optimizer)

    def still_holds(self, optimizer: Optimizer) -> bool:
        """Whether all that the graph was made from is unchanged, or an input. What waited for a
        first gradient that is here now is the optimizer's from then on.
        """
        if self._absent is not None and self._absent.waiting:
            firsts = self._absent.take_in(optimizer)
            if firsts is None:
                return False
            self.rests_on.state.take_in(optimizer, firsts)
        return self.rests_on.holds(optimizer)

    def run(self, optimizer: Optimizer) -> None:
        """Do the step."""
        env: dict[fx.Node, Any] = {}
        self._traced.begin(optimizer, optimizer, self._fresh, env)
        grad_mode = torch.is_grad_enabled()
        set_grad_enabled(False)  # `torch.no_grad()` takes longer than a small update
        try:
            with autocast_off() if autocast_is_on() else _NOTHING:
                if self._absent is None:
                    self._run_all(env)
                else:
                    self._run_some(self._absent, env)
        finally:
            set_grad_enabled(grad_mode)

    def _run_all(self, env: dict[fx.Node, Any]) -> None:
        members = self.key.members
        for node, i in self._gradients:
            env[node] = local(members[i].param.grad)  # type: ignore[arg-type]  # it is there
        self._gathered.fill()
        self.program.run(env)
        self._traced.ran()

    def _run_some(self, absent: Absent, env: dict[fx.Node, Any]) -> None:
        """The same where some parameters have no gradient."""
        missing = absent.look()
        gradients = absent.gradients()
        env |= {node: gradients[i] for node, i in self._gradients}
        self._gathered.fill(gradients)
        with absent.left_alone([copy.stored if copy else None for copy in self.key.copies]):
            self.program.run(env, missing)
        self._traced.ran(missing)


def _is_tiny(key: StepKey) -> bool:
    """Whether a call costs more than the norm of a gradient, and there are so few that one function
    of all numbers compiles about as fast as one for each kind.
    """
    sizes = [local(member.param).numel() for member in key.members]
    return len(sizes) <= FEW and max(sizes) <= SMALL
