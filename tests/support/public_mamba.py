"""A selective state space model in the manner of mamba-minimal: the scan is a loop in Python."""

import math

import torch
import torch.nn.functional as F
from public_loops import optimizer, usual
from torch import Tensor, nn

VOCAB, LENGTH, WIDTH, INNER, STATES, KERNEL = 40, 10, 24, 48, 8, 4
RANK = math.ceil(WIDTH / 16)


class RMSNorm(nn.Module):
    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.in_proj = nn.Linear(WIDTH, 2 * INNER, bias=False)
        self.conv1d = nn.Conv1d(INNER, INNER, KERNEL, groups=INNER, padding=KERNEL - 1)
        self.x_proj = nn.Linear(INNER, RANK + 2 * STATES, bias=False)
        self.dt_proj = nn.Linear(RANK, INNER)
        self.A_log = nn.Parameter(torch.log(torch.arange(1, STATES + 1).repeat(INNER, 1)))
        self.D = nn.Parameter(torch.ones(INNER))
        self.out_proj = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        x, gate = self.in_proj(x).split(split_size=[INNER, INNER], dim=-1)
        x = self.conv1d(x.transpose(1, 2))[:, :, :length].transpose(1, 2)
        return self.out_proj(self.ssm(F.silu(x)) * F.silu(gate))

    def ssm(self, x: Tensor) -> Tensor:
        A, D = -torch.exp(self.A_log.float()), self.D.float()
        delta, B, C = self.x_proj(x).split(split_size=[RANK, STATES, STATES], dim=-1)
        return self.scan(x, F.softplus(self.dt_proj(delta)), A, B, C, D)

    def scan(self, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
        rows, length, inner = u.shape
        decay = torch.exp(torch.einsum("bld,dn->bldn", delta, A))
        driven = torch.einsum("bld,bln,bld->bldn", delta, B, u)
        state = torch.zeros((rows, inner, STATES), device=decay.device)
        found = []
        for i in range(length):
            state = decay[:, i] * state + driven[:, i]
            found.append(torch.einsum("bdn,bn->bd", state, C[:, i, :]))
        return torch.stack(found, dim=1) + u * D


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.norm = Mixer(), RMSNorm()

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(self.norm(x)) + x


class Mamba(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(1)])
        self.norm_f = RMSNorm()
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.lm_head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm_f(x))


def mamba() -> list[nn.Module]:
    return [Mamba()]


def batch() -> tuple[Tensor, ...]:
    first, stride = torch.randint(VOCAB, (8, 1)), torch.randint(1, 4, (8, 1))
    return ((first + stride * torch.arange(LENGTH + 1)) % VOCAB,)


adamw = optimizer(torch.optim.AdamW, 2e-3)


@usual
def step(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
