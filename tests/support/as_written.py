"""An optimizer as people write it: a loop over the parameters, everything else in `update`."""

from typing import Any

import torch
from torch.optim import Optimizer


class AsWritten(Optimizer):
    """Its defaults are `lr` and what else is given."""

    def __init__(self, params: Any, lr: float = 0.1, **others: Any) -> None:
        super().__init__(params, {"lr": lr, **others})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(group, p, self.state[p])

    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        """One parameter, which has a gradient."""
        raise NotImplementedError


class MakesState(AsWritten):
    """It makes its state, an average of the gradients, in its first step."""

    def update(self, group: dict[str, Any], p: Any, state: dict[str, Any]) -> None:
        mean = state.setdefault("mean", torch.zeros_like(p))
        p.add_(mean.lerp_(p.grad, 0.5), alpha=-group["lr"])
