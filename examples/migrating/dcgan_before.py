"""A DCGAN with autocast: two networks, two optimizers, and a GradScaler for each."""

from __future__ import annotations

import torch
from small_nets import discriminator, generator, pictures
from torch import nn

BATCH, NOISE = 32, 16


def main(steps=20, dtype=torch.float16):
    """Train, and return the losses of D and of G, one after the other."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    netG, netD = generator(NOISE).to(device), discriminator().to(device)
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    autocast = torch.autocast(device, dtype, enabled=dtype != torch.float32)
    scalerG = torch.amp.GradScaler(device, enabled=dtype == torch.float16)
    scalerD = torch.amp.GradScaler(device, enabled=dtype == torch.float16)
    ones, zeros = torch.ones(BATCH, device=device), torch.zeros(BATCH, device=device)

    losses = []
    for _ in range(steps):
        real = pictures(BATCH, device)[0][:, :1] - 1
        noise = torch.randn(BATCH, NOISE, 1, 1, device=device)

        # D: real pictures are real, generated ones are not
        netD.zero_grad()
        with autocast:
            errD_real = criterion(netD(real), ones)
        scalerD.scale(errD_real).backward()
        with autocast:
            fake = netG(noise)
            errD_fake = criterion(netD(fake.detach()), zeros)
        scalerD.scale(errD_fake).backward()
        scalerD.step(optimizerD)
        scalerD.update()

        # G: what it generates passes for real
        netG.zero_grad()
        with autocast:
            errG = criterion(netD(fake), ones)
        scalerG.scale(errG).backward()
        scalerG.step(optimizerG)
        scalerG.update()
        losses += [(errD_real + errD_fake).item(), errG.item()]
    print(f"loss of D {losses[-2]:.3f}, of G {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
