"""A classifier, trained as timm does it: EMA, mixup, a scheduler; with mpcompile."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from small_nets import classifier, pictures

from mpcompile import loss_scale_of, mpcompile

CLASSES, MIXUP, SMOOTHING, CLIP, DECAY = 4, 0.2, 0.1, 1.0, 0.9


def mixed(x, labels):
    """Mixup with the batch in reverse, and smoothed labels: x and (B, CLASSES)."""
    share = torch.distributions.Beta(MIXUP, MIXUP).sample().item()
    off, on = SMOOTHING / CLASSES, 1 - SMOOTHING + SMOOTHING / CLASSES
    target = torch.full((len(x), CLASSES), off, device=x.device)
    target = target.scatter_(1, labels[:, None], on)
    return share * x + (1 - share) * x.flip(0), share * target + (1 - share) * target.flip(0)


@torch.no_grad()
def update_ema(ema, model):
    for old, new in zip(ema.state_dict().values(), model.state_dict().values(), strict=True):
        if old.is_floating_point():
            old.lerp_(new, 1 - DECAY)
        else:
            old.copy_(new)


@torch.no_grad()
def accuracy(model, device):
    model.eval()
    x, labels = pictures(64, device)
    right = (model(x).argmax(1) == labels).float().mean().item()
    model.train()
    return right


def main(steps=20, dtype=torch.float16, checkpoint=None, emit="inductor"):
    """Train, and return the loss of each step."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = mpcompile(classifier(CLASSES).to(device), dtype=dtype, emit=emit)
    ema = copy.deepcopy(model)  # plain FP32; compile it, too, if its evaluation takes long
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    if checkpoint and Path(checkpoint).exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["state_dict"])
        ema.load_state_dict(saved["state_dict_ema"])
        optimizer.load_state_dict(saved["optimizer"])
        loss_scale_of(model).load_state_dict(saved["amp_scaler"])  # also one of a GradScaler

    losses = []
    for _ in range(steps):
        x, target = mixed(*pictures(32, device))
        output = model(x)
        loss = F.cross_entropy(output, target)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
        update_ema(ema, model)
        losses.append(loss.item())
    right, right_ema = accuracy(model, device), accuracy(ema, device)
    print(f"accuracy {right:.2f}, of the EMA {right_ema:.2f}")

    if checkpoint:
        saved = {"state_dict": model.state_dict(), "state_dict_ema": ema.state_dict()}
        saved |= {"optimizer": optimizer.state_dict()}
        saved |= {"amp_scaler": loss_scale_of(model).state_dict()}
        torch.save(saved, checkpoint)
    return losses


if __name__ == "__main__":
    main(checkpoint=sys.argv[1] if len(sys.argv) > 1 else None)
