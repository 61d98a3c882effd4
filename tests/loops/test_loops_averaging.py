"""A small ResNet with what surrounds it: averaged weights, OneCycleLR, accumulation, clipping."""

import copy

import pytest
import torch
import torch.nn.functional as F
from loops import MOSTLY_O1, WAYS, Way, agree, finite, low_nodes, same, snapshot
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

# A norm over so few numbers makes the roundings before it larger.
TOLERANCE = {torch.float16: 0.08, torch.bfloat16: 0.3}


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


@WAYS
def test_averaged_model_one_cycle_accumulation_and_clipping(way: Way) -> None:
    def loop(way: Way) -> None:
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

    agree(way, loop, tolerance=TOLERANCE[way.dtype])


@pytest.mark.slow("a loop in each way of training, against FP64")
@WAYS
def test_hand_written_average_swapped_in_for_evaluation(way: Way) -> None:
    """Kept by `lerp_`, copied into the model to evaluate, and out of it again to train on."""

    def loop(way: Way) -> None:
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

    agree(way, loop, tolerance=TOLERANCE[way.dtype])


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
