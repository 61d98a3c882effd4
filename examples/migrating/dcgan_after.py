"""A DCGAN: two networks and two optimizers; with mpcompile."""

from __future__ import annotations

import torch
from small_nets import discriminator, generator, pictures
from torch import nn

from mpcompile import mpcompile

BATCH, NOISE = 32, 16


def main(steps=20, dtype=torch.float16, emit="inductor"):
    """Train, and return the losses of D and of G, one after the other."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    netG = mpcompile(generator(NOISE).to(device), dtype=dtype, emit=emit)
    netD = mpcompile(discriminator().to(device), dtype=dtype, emit=emit)
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    ones, zeros = torch.ones(BATCH, device=device), torch.zeros(BATCH, device=device)

    losses = []
    for _ in range(steps):
        real = pictures(BATCH, device)[0][:, :1] - 1
        noise = torch.randn(BATCH, NOISE, 1, 1, device=device)

        # D: real pictures are real, generated ones are not
        netD.zero_grad()
        errD_real = criterion(netD(real), ones)
        errD_real.backward()
        fake = netG(noise)
        errD_fake = criterion(netD(fake.detach()), zeros)
        errD_fake.backward()
        optimizerD.step()

        # G: what it generates passes for real
        netG.zero_grad()
        errG = criterion(netD(fake), ones)
        errG.backward()
        optimizerG.step()
        losses += [(errD_real + errD_fake).item(), errG.item()]
    print(f"loss of D {losses[-2]:.3f}, of G {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
