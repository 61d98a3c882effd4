"""Weights that change in a training: adapters on a frozen base, weights that thaw or are replaced,
and a small ResNet whose weights are averaged.
"""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops import MOSTLY_O1, WAYS, Way, agreeing, finite, low_nodes, same, snapshot
from module_of import module_of
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

# -- adapters, thawing, replacing ------------------------------------------------------------------


def adapted(base: nn.Linear) -> Any:
    """A frozen linear layer plus a trained product of rank 4."""
    return module_of(
        lambda m, x: m.base(x) + 2.0 * F.linear(F.linear(x, m.A), m.B),
        base=base.requires_grad_(False),
        A=nn.Parameter(torch.randn(4, base.in_features) / base.in_features**0.5),
        B=nn.Parameter(torch.zeros(base.out_features, 4)),
    )


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
    model.up, model.down = adapted(model.up), adapted(model.down)


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
@agreeing(bf16=0.2)
def test_adapters_added(when: str, way: Way) -> None:
    """Before compiling, after it, and after the compiled base was already in use."""
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


@agreeing(MOSTLY_O1)
def test_adapters_merged_into_the_base(way: Way) -> None:
    """After training the product is added to the base weight and the adapter goes."""
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


@agreeing(WAYS)
def test_a_frozen_backbone_thaws_and_joins_the_optimizer(way: Way) -> None:
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
    optimizer.add_param_group({"params": [p for m in backbone for p in m.parameters()], "lr": 0.1})
    train(way, model, optimizer, 3, planted=1)
    assert not same(before, snapshot(backbone))


@agreeing(MOSTLY_O1)
def test_a_backbone_thaws_layer_by_layer(way: Way) -> None:
    """All parameters are in the optimizer from the start; which have gradients changes."""
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


@agreeing(WAYS)
def test_weights_assigned_after_compiling(way: Way) -> None:
    """`load_state_dict(assign=True)` puts new Parameters in place of those that were compiled."""
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


@pytest.mark.slow("a loop in each way of training, against FP64")
@agreeing(WAYS)
def test_weights_assigned_in_the_middle_of_training(way: Way) -> None:
    """The optimizer holds the old Parameters, so the user makes a new one, as torch says."""
    model = way.model(Base())
    optimizer = way.optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    train(way, model, optimizer, 2, planted=None)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    optimizer = way.optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    train(way, model, optimizer, 3, planted=1)


# -- averaging -------------------------------------------------------------------------------------


# A norm over so few numbers makes the roundings before it larger.


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.relu(self.norm1(self.conv1(x)), inplace=True)
        out = self.norm2(self.conv2(out))
        out += x
        return F.relu(out, inplace=True)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1, bias=False)
        self.norm, self.block, self.head = nn.BatchNorm2d(8), Block(8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(F.relu(self.norm(self.stem(x))))
        return self.head(x.mean((2, 3)))


@agreeing(WAYS, tolerance=0.08, bf16=0.3)
def test_averaged_model_one_cycle_accumulation_and_clipping(way: Way) -> None:
    model = way.model(ResNet())
    ema = way.follow(AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)))
    optimizer = way.optimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4),
        max_grad_norm=1.0,
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.1, total_steps=4, cycle_momentum=False
    )
    x, y = torch.randn(4, 2, 8, 3, 6, 6), torch.randint(5, (4, 2, 8))
    for step, factor in way.steps(4, model, optimizer, planted=2):
        optimizer.zero_grad()
        for micro in range(2):
            loss = F.cross_entropy(model(x[step, micro]), y[step, micro]) / 2
            (loss * (factor if micro == 0 else 1)).backward()
            way.log(loss)
        optimizer.step()
        scheduler.step()
        ema.update_parameters(model)
    ema.eval()
    with torch.no_grad():
        way.log(F.cross_entropy(ema(x[0, 0]), y[0, 0]))


@pytest.mark.slow("a loop in each way of training, against FP64")
@agreeing(WAYS, tolerance=0.08, bf16=0.3)
def test_hand_written_average_swapped_in_for_evaluation(way: Way) -> None:
    """Kept by `lerp_`, copied into the model to evaluate, and out of it again to train on."""
    model = way.model(ResNet())
    shadow = copy.deepcopy(model).eval().requires_grad_(False)
    way.follow(shadow)
    optimizer = way.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = torch.randn(3, 8, 3, 6, 6), torch.randint(5, (3, 8))
    for step, factor in way.steps(3, model, optimizer, planted=1):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[step]), y[step])
        (loss * factor).backward()
        optimizer.step()
        with torch.no_grad():
            for kept, p in zip(shadow.parameters(), model.parameters(), strict=True):
                kept.lerp_(p, 0.5)
        own = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p, kept in zip(model.parameters(), shadow.parameters(), strict=True):
                p.copy_(kept)
            model.eval()
            way.log(F.cross_entropy(model(x[step]), y[step]))
            model.train()
            for p, old in zip(model.parameters(), own, strict=True):
                p.copy_(old)


@pytest.mark.slow("a loop in each way of training, against FP64")
@MOSTLY_O1
def test_the_averaged_model_can_be_compiled_too(way: Way) -> None:
    """It is a plain copy, so it may be; its updates are seen though nothing tells it of them."""
    way = way.again
    model = way.model(ResNet())
    ema = way.model(AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)))
    optimizer = way.optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    x, y = torch.randn(8, 3, 6, 6), torch.randint(5, (8,))
    ema.eval()
    with torch.no_grad():
        before = ema(x)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    ema.update_parameters(model)  # the first call copies
    update_bn([x], ema)
    ema.eval()
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(ema.module.stem.weight, model.stem.weight, rtol=0, atol=0)
        after = ema(x)
    assert not torch.equal(before, after)
    assert low_nodes(ema)
    assert finite(ema)
    assert same(snapshot([ema.module]), snapshot([model]))
