"""A GPT, trained as nanoGPT does it: accumulation, clipping, a set lr; with mpcompile."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from small_nets import GPT, text

from mpcompile import MPOptimizer, mpcompile

ACCUMULATE, CONTEXT, CLIP = 2, 16, 1.0
PEAK, FLOOR, WARMUP = 1e-2, 1e-3, 4


def lr_at(step: int, steps: int) -> float:
    """Linear warmup, then a cosine."""
    if step < WARMUP:
        return PEAK * (step + 1) / WARMUP
    share = (step - WARMUP) / max(1, steps - WARMUP)
    return FLOOR + (PEAK - FLOOR) * (1 + math.cos(math.pi * share)) / 2


@torch.no_grad()
def evaluate(model, device):
    model.eval()
    losses = [model(*text(16, CONTEXT, device))[1].item() for _ in range(2)]
    model.train()
    return sum(losses) / len(losses)


def main(steps=20, dtype=torch.float16, checkpoint=None, emit="inductor"):
    """Train, and return the loss of each step."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = mpcompile(GPT(context=CONTEXT).to(device), dtype=dtype, emit=emit)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95))
    optimizer = MPOptimizer(optimizer, max_grad_norm=CLIP, emit=emit)
    first = 0
    if checkpoint and Path(checkpoint).exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])  # with the loss scale
        first = saved["step"]

    losses = []
    for step in range(first, steps):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, steps)
        total = 0.0
        for _ in range(ACCUMULATE):
            tokens, targets = text(16, CONTEXT, device)
            _, loss = model(tokens, targets)
            loss = loss / ACCUMULATE
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
        if step % 10 == 0:
            held_out, norm = evaluate(model, device), optimizer.grad_norm
            print(f"{step}: loss {total:.3f}, held out {held_out:.3f}, |g| {norm:.3f}")

    if checkpoint:
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**saved, "step": steps}, checkpoint)
    return losses


if __name__ == "__main__":
    main(checkpoint=sys.argv[1] if len(sys.argv) > 1 else None)
