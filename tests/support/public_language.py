"""A character-level GPT in the manner of nanoGPT, and what one step of it does."""

import math

import torch
import torch.nn.functional as F
from public_loops import Clip, Models, Optimizers, Step
from torch import Tensor, nn
from torch.optim import Optimizer

VOCAB, CONTEXT, WIDTH, HEADS = 61, 16, 32, 2
MICRO_STEPS = 2


class Norm(nn.Module):
    """A layer norm without a bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, None, 1e-5)


class Attention(nn.Module):
    """Causal, by the fused operator."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.c_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(WIDTH, dim=2)
        k = k.view(B, T, HEADS, C // HEADS).transpose(1, 2)
        q = q.view(B, T, HEADS, C // HEADS).transpose(1, 2)
        v = v.view(B, T, HEADS, C // HEADS).transpose(1, 2)
        dropout = self.dropout if self.training else 0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = Norm(WIDTH), Norm(WIDTH)
        self.attn = Attention()
        self.mlp = nn.ModuleDict(
            {
                "c_fc": nn.Linear(WIDTH, 4 * WIDTH, bias=False),
                "act": nn.GELU(),
                "c_proj": nn.Linear(4 * WIDTH, WIDTH, bias=False),
            }
        )
        m = self.mlp
        self.mlpf = lambda x: m.c_proj(m.act(m.c_fc(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlpf(self.ln_2(x))


class GPT(nn.Module):
    """Returns the logits and, given targets, the loss."""

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCAB, WIDTH),
                "wpe": nn.Embedding(CONTEXT, WIDTH),
                "h": nn.ModuleList([Block() for _ in range(layers)]),
                "ln_f": Norm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._start)
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2 * layers))

    def _start(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        _, t = idx.size()
        assert t <= CONTEXT, f"a sequence of {t} is longer than {CONTEXT}"
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        flat = logits.view(-1, logits.size(-1))
        return logits, F.cross_entropy(flat, targets.view(-1), ignore_index=-1)


def gpt() -> list[nn.Module]:
    return [GPT()]


def adamw_groups(models: Models, rate: float) -> list[Optimizer]:
    """Weight decay for matrices alone."""
    parameters = [p for p in models[0].parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [torch.optim.AdamW(groups, lr=3e-3 * rate, betas=(0.9, 0.95))]


def batch() -> tuple[Tensor, ...]:
    """Counting in steps of one to three, so that the next token can be learned."""
    first, stride = torch.randint(VOCAB, (8, 1)), torch.randint(1, 4, (8, 1))
    text = (first + stride * torch.arange(CONTEXT + 1)) % VOCAB
    y = text[:, 1:].contiguous()
    y[:, :2] = -1
    return text[:, :-1].contiguous(), y


def step(models: Models, optimizers: Optimizers, clip: Clip) -> Step:
    (model,), (optimizer,) = models, optimizers

    def take(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(())
        for some, wanted in zip(x.chunk(MICRO_STEPS), y.chunk(MICRO_STEPS), strict=True):
            _, loss = model(some, wanted)
            loss = loss / MICRO_STEPS
            loss.backward()
            total = total + loss.detach()
        clip(model.parameters())
        optimizer.step()
        return (total,)

    return take
