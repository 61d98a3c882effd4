"""Character-level GPTs in the manner of nanoGPT and of minGPT, and what one step of theirs does."""

import math

import torch
import torch.nn.functional as F
from public_loops import Clip, Models, Optimizers, Step
from torch import Tensor, nn
from torch.optim import Optimizer

VOCAB, CONTEXT, WIDTH, HEADS = 61, 16, 32, 2
MICRO_STEPS = 2


class Norm(nn.Module):
    """A layer norm whose bias may be left out."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class NewGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
        return 0.5 * x * (1.0 + torch.tanh(inner))


class Attention(nn.Module):
    """Causal: by the fused operator, or by a mask that is kept as a buffer."""

    def __init__(self, fused: bool, bias: bool, dropout: float) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH, bias=bias)
        self.c_proj = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.attn_dropout, self.resid_dropout = nn.Dropout(dropout), nn.Dropout(dropout)
        self.fused, self.dropout = fused, dropout
        if not fused:
            mask = torch.tril(torch.ones(CONTEXT, CONTEXT))
            self.register_buffer("bias", mask.view(1, 1, CONTEXT, CONTEXT))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(WIDTH, dim=2)
        k = k.view(B, T, HEADS, C // HEADS).transpose(1, 2)
        q = q.view(B, T, HEADS, C // HEADS).transpose(1, 2)
        v = v.view(B, T, HEADS, C // HEADS).transpose(1, 2)
        if self.fused:
            rate = self.dropout if self.training else 0
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            scores = scores.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            y = self.attn_dropout(F.softmax(scores, dim=-1)) @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class Block(nn.Module):
    def __init__(self, nano: bool, dropout: float) -> None:
        super().__init__()
        self.ln_1 = Norm(WIDTH, bias=False) if nano else nn.LayerNorm(WIDTH)
        self.ln_2 = Norm(WIDTH, bias=False) if nano else nn.LayerNorm(WIDTH)
        self.attn = Attention(nano, not nano, dropout)
        self.mlp = nn.ModuleDict(
            {
                "c_fc": nn.Linear(WIDTH, 4 * WIDTH, bias=not nano),
                "act": nn.GELU() if nano else NewGELU(),
                "c_proj": nn.Linear(4 * WIDTH, WIDTH, bias=not nano),
                "dropout": nn.Dropout(dropout),
            }
        )
        m = self.mlp
        self.mlpf = lambda x: m.dropout(m.c_proj(m.act(m.c_fc(x))))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlpf(self.ln_2(x))


class GPT(nn.Module):
    """Returns the logits and, given targets, the loss."""

    def __init__(self, nano: bool, dropout: float = 0.0, layers: int = 1) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCAB, WIDTH),
                "wpe": nn.Embedding(CONTEXT, WIDTH),
                "drop": nn.Dropout(dropout),
                "h": nn.ModuleList([Block(nano, dropout) for _ in range(layers)]),
                "ln_f": Norm(WIDTH, bias=False) if nano else nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        if nano:
            self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._start)
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2 * layers))

    def _start(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        _, t = idx.size()
        assert t <= CONTEXT, f"a sequence of {t} is longer than {CONTEXT}"
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        flat = logits.view(-1, logits.size(-1))
        return logits, F.cross_entropy(flat, targets.view(-1), ignore_index=-1)


def nano_gpt() -> list[nn.Module]:
    return [GPT(nano=True)]


def min_gpt() -> list[nn.Module]:
    return [GPT(nano=False, dropout=0.1)]


def adamw_groups(models: Models, rate: float) -> list[Optimizer]:
    """Weight decay for matrices alone."""
    parameters = [p for p in models[0].parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [torch.optim.AdamW(groups, lr=3e-3 * rate, betas=(0.9, 0.95))]


def _tokens(rows: int) -> tuple[Tensor, Tensor]:
    """Counting in steps of one to three, so that the next token can be learned."""
    first, stride = torch.randint(VOCAB, (rows, 1)), torch.randint(1, 4, (rows, 1))
    text = (first + stride * torch.arange(CONTEXT + 1)) % VOCAB
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def nano_batch() -> tuple[Tensor, ...]:
    x, y = _tokens(4 * MICRO_STEPS)
    y[:, :2] = -1
    return x, y


def min_batch() -> tuple[Tensor, ...]:
    return _tokens(8)


def nano_step(models: Models, optimizers: Optimizers, clip: Clip) -> Step:
    (model,), (optimizer,) = models, optimizers

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
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

    return step


def min_step(models: Models, optimizers: Optimizers, clip: Clip) -> Step:
    (model,), (optimizer,) = models, optimizers

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        _, loss = model(x, y)
        model.zero_grad(set_to_none=True)
        loss.backward()
        clip(model.parameters())
        optimizer.step()
        return (loss.detach(),)

    return step
