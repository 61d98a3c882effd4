"""Low-rank adapters on a frozen base; weights that thaw, join an optimizer, or are replaced."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops import MOSTLY_O1, WAYS, Way, agree, low_nodes, same, snapshot
from torch import nn


class Adapted(nn.Module):
    """A frozen linear layer plus a trained product of rank 4."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(4, base.in_features) / base.in_features**0.5)
        self.B = nn.Parameter(torch.zeros(base.out_features, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 2.0 * F.linear(F.linear(x, self.A), self.B)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(20, 32), nn.LayerNorm(32)
        self.up, self.down, self.head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 20)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.head(x + self.down(F.gelu(self.up(self.norm(x)))))


def adapt(model: Base) -> None:
    model.requires_grad_(False)
    model.up, model.down = Adapted(model.up), Adapted(model.down)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def train(way: Way, model: nn.Module, optimizer: Any, steps: int, planted: int | None) -> None:
    tokens = torch.randint(20, (steps, 4, 9))
    for step, update in way.updates(steps, model, optimizer, planted=planted):
        logits = model(tokens[step, :, :-1])
        update(F.cross_entropy(logits.flatten(0, 1), tokens[step, :, 1:].flatten()))


@pytest.mark.slow_rows("a loop in each way of training, against FP64")
@WAYS
@pytest.mark.parametrize("when", ["before", "after", "after a run"])
def test_adapters_added(when: str, way: Way) -> None:
    """Before compiling, after it, and after the compiled base was already in use."""

    def loop(way: Way) -> None:
        model: Any = Base()
        if when == "before":
            adapt(model)
            way.model(model)
        else:
            way.model(model)
            if when == "after a run":
                with torch.no_grad():
                    model(torch.randint(20, (4, 8)))
            adapt(model)
        frozen = [p for p in model.parameters() if not p.requires_grad]
        before = snapshot(frozen)
        optimizer = way.optimizer(torch.optim.AdamW(trained(model), lr=1e-2, eps=1e-3))
        train(way, model, optimizer, 4, planted=2)
        assert same(before, snapshot(frozen))
        assert all(p.grad is None for p in frozen)

    agree(way, loop, tolerance=0.2 if way.dtype is torch.bfloat16 else None)


@MOSTLY_O1
def test_adapters_merged_into_the_base(way: Way) -> None:
    """After training the product is added to the base weight and the adapter goes."""

    def loop(way: Way) -> None:
        model: Any = way.model(Base())
        adapt(model)
        optimizer = way.optimizer(torch.optim.SGD(trained(model), lr=1.0))
        train(way, model, optimizer, 3, planted=1)
        tokens = torch.randint(20, (4, 8))
        model.eval()
        with torch.no_grad():
            adapted = model(tokens)
            for name in ("up", "down"):
                layer = getattr(model, name)
                layer.base.weight += 2.0 * layer.B @ layer.A
                setattr(model, name, layer.base)
            merged = model(tokens)
        way.log(adapted)
        # The same function, through other roundings.
        assert (merged - adapted).norm() <= 0.02 * adapted.norm()

    agree(way, loop)


@WAYS
def test_a_frozen_backbone_thaws_and_joins_the_optimizer(way: Way) -> None:
    def loop(way: Way) -> None:
        model = way.model(Base())
        backbone = [model.embed, model.norm, model.up, model.down]
        for module in backbone:
            module.requires_grad_(False)
        optimizer = way.optimizer(torch.optim.SGD(model.head.parameters(), lr=0.5, momentum=0.9))
        before = snapshot(backbone)
        train(way, model, optimizer, 3, planted=1)
        assert same(before, snapshot(backbone))
        for module in backbone:
            module.requires_grad_(True)
        optimizer.add_param_group(
            {"params": [p for m in backbone for p in m.parameters()], "lr": 0.1}
        )
        train(way, model, optimizer, 3, planted=1)
        assert not same(before, snapshot(backbone))

    agree(way, loop)


@MOSTLY_O1
def test_a_backbone_thaws_layer_by_layer(way: Way) -> None:
    """All parameters are in the optimizer from the start; which have gradients changes."""

    def loop(way: Way) -> None:
        model = way.model(Base())
        layers = [model.head, model.down, model.up, model.norm, model.embed]
        model.requires_grad_(False)
        optimizer = way.optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        for layer in layers[:3]:
            layer.requires_grad_(True)
            train(way, model, optimizer, 2, planted=0)
        model.head.requires_grad_(False)  # and one freezes again
        head = snapshot([model.head])
        train(way, model, optimizer, 1, planted=None)
        assert same(head, snapshot([model.head]))

    agree(way, loop)


@WAYS
def test_weights_assigned_after_compiling(way: Way) -> None:
    """`load_state_dict(assign=True)` puts new Parameters in place of those that were compiled."""

    def loop(way: Way) -> None:
        model = way.model(Base())
        tokens = torch.randint(20, (4, 8))
        with torch.no_grad():
            first = model(tokens)
        torch.manual_seed(5)
        other = Base()
        model.load_state_dict(other.state_dict(), assign=True)
        with torch.no_grad():
            second = model(tokens)
            wanted = other(tokens)
        assert not torch.allclose(first, second, atol=0.1)
        assert (second - wanted).norm() <= 0.03 * wanted.norm()
        optimizer = way.optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        train(way, model, optimizer, 3, planted=1)

    agree(way, loop)


@pytest.mark.slow("a loop in each way of training, against FP64")
@WAYS
def test_weights_assigned_in_the_middle_of_training(way: Way) -> None:
    """The optimizer holds the old Parameters, so the user makes a new one, as torch says."""

    def loop(way: Way) -> None:
        model = way.model(Base())
        optimizer = way.optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        train(way, model, optimizer, 2, planted=None)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        optimizer = way.optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        train(way, model, optimizer, 3, planted=1)

    mixed = agree(way, loop)
    assert low_nodes(mixed.models[0])
