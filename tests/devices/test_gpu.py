"""What only a CUDA device shows: kernels in FP16, no host synchronisation, CUDA graphs.

pytest -m gpu
"""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from emulated import sized
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from mpcompile import MPOptimizer, compiled_plans, mpcompile, train_step

pytestmark = pytest.mark.gpu

LEVELS = ["O1", "O2"]
HALVES = [torch.float16, torch.bfloat16]


class Block(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        q, k, v = self.mix(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return self.head(F.gelu(x))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, 256, (4, 64), device="cuda", generator=generator)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), (tokens.flatten() * 3 + 1) % 256)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("generated", [False, True], ids=["plain", "MPOptimizer"])
def test_training_follows_fp32(level: str, dtype: torch.dtype, generated: bool) -> None:
    reference = Block().cuda()
    model = mpcompile(copy.deepcopy(reference), level=level, dtype=dtype)
    wanted = train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-3), 60)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    got = train(model, MPOptimizer(optimizer) if generated else optimizer, 60)
    assert wanted[-1] < 0.9 * wanted[0]
    assert abs(got[-1] - wanted[-1]) < 0.02 * wanted[-1]


@pytest.mark.parametrize("level", LEVELS)
def test_cuda_graphs_are_recorded_in_the_first_steps_alone(level: str) -> None:
    """A loop keeps its losses, so the allocator gives each step's numbers another place."""
    mode = "reduce-overhead"
    model = mpcompile(Block(32).cuda(), level=level, dtype=torch.float16, mode=mode)
    optimizer = MPOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), mode=mode)
    counters.clear()
    kept = train(model, optimizer, 6)
    recorded = counters["inductor"]["cudagraph_recorded_non_static_inputs"]
    kept += train(model, optimizer, 8)
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert recorded > 0
    assert counters["inductor"]["cudagraph_recorded_non_static_inputs"] == recorded
    assert len(kept) == 14


def test_what_is_kept_of_replayed_steps_stays_as_it_was() -> None:
    """A CUDA graph writes each step's loss to one place, and the norm of its gradients."""
    model, mode = nn.Linear(16, 8).cuda(), "reduce-overhead"
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = MPOptimizer(sgd, max_grad_norm=1.0, mode=mode)
    step = train_step(model, optimizer, F.cross_entropy, dtype=torch.float16, mode=mode)
    x, y = torch.randn(64, 16, device="cuda"), torch.randint(8, (64,), device="cuda")
    kept, seen = [], []
    for _ in range(6):
        kept.append((step(x, y), optimizer.grad_norm))
        seen.append([value.item() for value in kept[-1]])
    assert [[value.item() for value in values] for values in kept] == seen
    assert len({loss for loss, _ in seen}) == len({norm for _, norm in seen}) == 6


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Adagrad", "RMSprop", "Adafactor", "NAdam"])
def test_the_step_equals_eager(optimizer: str) -> None:
    ours = [nn.Parameter(torch.randn(s, device="cuda")) for s in ((64, 32), (32,), (3, 8, 3, 3))]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    make = getattr(torch.optim, optimizer)
    generated, eager = MPOptimizer(make(ours, lr=1e-2)), make(theirs, lr=1e-2)
    for step in range(20):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        if step == 7:
            kept, ours[0].grad = [p.detach().clone() for p in ours], ours[0].grad / 0
            generated.step()
            assert generated.skipped
            assert all(torch.equal(p, k) for p, k in zip(ours, kept, strict=True))
            ours[0].grad = theirs[0].grad
        generated.step()
        eager.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("generated", [False, True], ids=["plain", "MPOptimizer"])
def test_padding_changes_no_result(level: str, generated: bool) -> None:
    """A vocabulary of 50257 and a width of 257, padded where it pays and everywhere."""
    words = sized(50257, 2569)
    reference = nn.Sequential(nn.Linear(257, 1001), nn.GELU(), nn.Linear(1001, words)).cuda()
    x = torch.randn(256, 257, device="cuda")  # with fewer rows, the products wait for memory
    y = torch.randint(words, (256,), device="cuda")
    found = {}
    for pad in ("never", "auto", "always"):
        model = mpcompile(
            copy.deepcopy(reference), dtype=torch.float16, level=level, pad=pad, strict=True
        )
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer = MPOptimizer(optimizer) if generated else optimizer
        losses = []
        for _ in range(5):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        found[pad] = torch.stack(losses).cpu(), compiled_plans(model)[0].tensor_cores
    for losses, _ in found.values():
        torch.testing.assert_close(losses, found["never"][0], rtol=1e-2, atol=0)
    assert found["always"][1].share >= 0.995
    assert found["auto"][1].share >= 0.9  # the head, which pays for any copy


@pytest.mark.parametrize("channels", [64, 128])
def test_inductor_lays_convolutions_out_channels_last(channels: int) -> None:
    """The layout of a convolution's result, for NCHW inputs, and of its gradient: Inductor chooses
    it by itself above 64 channels.
    """
    layers = nn.Conv2d(channels, channels, 3), nn.ReLU(), nn.Conv2d(channels, channels, 3)
    model = mpcompile(nn.Sequential(*layers).cuda(), strict=True)
    x = torch.randn(8, channels, 32, 32, device="cuda")
    _, codes = run_and_get_code(lambda: model(x).square().mean().backward())
    forward, backward = codes
    assert "extern_kernels.convolution" in forward
    assert "convolution_backward" in backward
    # 30 x 30 results with channels innermost
    strides = f"({900 * channels}, 1, {30 * channels}, {channels})"
    assert strides in forward
    assert strides in backward
    assert f"({900 * channels}, 900, 30, 1)" not in forward + backward
