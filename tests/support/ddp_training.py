"""Trainings on several ranks, beside one process in FP64 with the batches of all of them."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from low_gradients import Net
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mpcompile import LossScale, MPOptimizer, loss_scale_of, mpcompile
from mpcompile.runtime.records import compiled_in

Optimizing = Callable[[Any], torch.optim.Optimizer]
OVERFLOW = 1e30  # times a loss: beyond FP16 at any scale


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def ours(model: nn.Module) -> torch.optim.Optimizer:
    return MPOptimizer(sgd(model), emit="eager")


def everyones(value: Any) -> list[Any]:
    """What each rank passed."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def whole(tensor: torch.Tensor) -> torch.Tensor:
    full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


def flat(model: nn.Module) -> torch.Tensor:
    """All parameters, whole, as one vector."""
    return torch.cat([whole(p).flatten() for p in model.parameters()])


def check_same(*values: Any) -> None:
    """All ranks have the same, bit for bit."""
    for value in values:
        plain = flat(value).tolist() if isinstance(value, nn.Module) else value
        first, *others = everyones(plain)
        assert all(other == first for other in others), everyones(plain)


@dataclass
class Training:
    """A model on all ranks, and its plain twin in one process.

    Attributes:
        make: makes the model; what is compiled in it is plain in the twin.
        engine: takes the model and `settings`, and returns what is called: a DDP of it, or the
            model, sharded.
        settings: of the engine.
        options: of mpcompile.
        order: what is done to the model, one after the other; "use" is a backward.
        optimizing, plainly: make the optimizer, and that of the twin.
        scales: the loss scales; by default those of all that is compiled.
        set_to_none: how gradients are zeroed.
    """

    make: Callable[[], nn.Module] = Net
    engine: Callable[..., nn.Module] = DistributedDataParallel
    settings: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    order: str = "engine, mpcompile, optimizer"
    optimizing: Optimizing = sgd
    plainly: Optimizing = sgd
    scales: list[LossScale] = field(default_factory=list)
    set_to_none: bool = True

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        torch._dynamo.reset()
        small = "bucket_cap_mb" in self.settings  # then the first bucket is, too
        dist._DEFAULT_FIRST_BUCKET_BYTES = 64 if small else 2**20
        self.model = self.make()
        self.twin = copy.deepcopy(self.model).double()
        self.start = flat(self.twin)
        self.plain = self.plainly(self.twin)
        options: dict[str, Any] = {"dtype": torch.float16, "emit": "eager", "strict": True}
        if self.options.get("dtype") is not torch.bfloat16:
            options["loss_scale"] = LossScale.dynamic(2.0**10)
        for part in self.order.split(", "):
            if part == "engine":
                self.model = self.engine(self.model, **self.settings)
            elif part == "mpcompile":
                mpcompile(self.model, **{**options, **self.options})
            elif part == "optimizer":
                self.optimizer: Any = self.optimizing(self.model)
            else:  # "use"
                self.model(torch.randn(4, 8)).mean().backward()
        self.model.zero_grad()
        self.scales = self.scales or [loss_scale_of(m) for m in compiled_in(self.model)]
        self.data = torch.Generator().manual_seed(1)

    def batches(self) -> torch.Tensor:
        """The batches of all ranks, (ranks, 4, 8)."""
        return torch.randn(dist.get_world_size(), 4, 8, generator=self.data)

    def backward(self, xs: torch.Tensor, factor: float = 1.0, gradient: float = 1.0) -> None:
        """The backward of this rank's batch, its loss or the loss's gradient times a factor."""
        result = self.model(xs[dist.get_rank()])
        if gradient != 1.0:
            result.register_hook(lambda grad: grad * gradient)
        (result.square().mean() * factor).backward()

    def twin_backward(self, xs: torch.Tensor) -> None:
        losses = [self.twin(x.double()).square().mean() for x in xs]
        torch.stack(losses).mean().backward()

    def step(self, change: Callable[[nn.Module], Any] = lambda model: None) -> None:
        """A good step of both; `change` may change the gradients before it."""
        xs, before = self.batches(), flat(self.model)
        self.backward(xs)
        known = [p.grad for p in self.model.parameters() if p.grad is not None]
        assert {gradient.dtype for gradient in known} == {torch.float32}
        self.twin_backward(xs)
        self.take(change)
        assert not torch.equal(flat(self.model), before)

    def take(self, change: Callable[[nn.Module], Any] = lambda model: None) -> None:
        for model, optimizer in ((self.model, self.optimizer), (self.twin, self.plain)):
            change(model)
            optimizer.step()
            optimizer.zero_grad(set_to_none=self.set_to_none)

    def overflow(
        self, ranks: Sequence[int], *, factor: float = OVERFLOW, gradient: bool = False
    ) -> None:
        """A step whose gradients overflow on these ranks; it must change nothing, on any rank."""
        before, states = flat(self.model), [scale.state for scale in self.scales]
        factor = factor if dist.get_rank() in ranks else 1.0
        self.backward(self.batches(), **{"gradient" if gradient else "factor": factor})
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.set_to_none)
        after = [scale.state for scale in self.scales]
        assert torch.equal(flat(self.model), before)
        for new, old in zip(after, states, strict=True):
            assert (new.skipped_steps, new.scale) == (old.skipped_steps + 1, old.scale / 2)
        check_same(after)
        assert getattr(self.optimizer, "skipped", True), "so an MPOptimizer says"

    def check(self, near: float = 1e-3, *, moved: bool = False) -> None:
        """The parameters are the same on all ranks, and those of the twin: up to a part of their
        norm, or of how far they have moved.
        """
        check_same(self.model)
        wanted = flat(self.twin)
        size = (wanted - self.start if moved else wanted).norm()
        off = (flat(self.model) - wanted).norm()
        assert off <= near * size, f"{self.order}, {self.options}: {off / size}"
