"""A vision Transformer and a text Transformer that meet in one space, in the manner of CLIP."""

import math

import torch
import torch.nn.functional as F
from public_loops import optimizer, usual
from torch import Tensor, nn

VOCAB, LENGTH, WIDTH, SPACE, PATCH = 40, 8, 32, 16, 4


class LayerNorm(nn.LayerNorm):
    """In FP32, whatever it is given."""

    def forward(self, x: Tensor) -> Tensor:
        kept = x.dtype
        return super().forward(x.type(torch.float32)).type(kept)


class QuickGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class Block(nn.Module):
    def __init__(self, mask: Tensor | None = None) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, 2)
        self.ln_1, self.ln_2 = LayerNorm(WIDTH), LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), QuickGELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.attn_mask = mask

    def attention(self, x: Tensor) -> Tensor:
        if self.attn_mask is not None:
            self.attn_mask = self.attn_mask.to(dtype=x.dtype, device=x.device)
        return self.attn(x, x, x, need_weights=False, attn_mask=self.attn_mask)[0]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Vision(nn.Module):
    def __init__(self, size: int = 12) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, WIDTH, kernel_size=PATCH, stride=PATCH, bias=False)
        scale = WIDTH**-0.5
        self.class_embedding = nn.Parameter(scale * torch.randn(WIDTH))
        self.positional_embedding = nn.Parameter(
            scale * torch.randn((size // PATCH) ** 2 + 1, WIDTH)
        )
        self.ln_pre, self.ln_post = LayerNorm(WIDTH), LayerNorm(WIDTH)
        self.blocks = nn.Sequential(Block())
        self.proj = nn.Parameter(scale * torch.randn(WIDTH, SPACE))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        x = x.reshape(x.shape[0], x.shape[1], -1).permute(0, 2, 1)
        zeros = torch.zeros(x.shape[0], 1, x.shape[-1], dtype=x.dtype, device=x.device)
        x = torch.cat([self.class_embedding.to(x.dtype) + zeros, x], dim=1)
        x = self.ln_pre(x + self.positional_embedding.to(x.dtype))
        x = self.blocks(x.permute(1, 0, 2)).permute(1, 0, 2)
        return self.ln_post(x[:, 0, :]) @ self.proj


class CLIP(nn.Module):
    """Returns the logits of each image over the texts, and of each text over the images."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = Vision()
        mask = torch.empty(LENGTH, LENGTH).fill_(float("-inf")).triu_(1)
        self.transformer = nn.Sequential(Block(mask))
        self.token_embedding = nn.Embedding(VOCAB, WIDTH)
        self.positional_embedding = nn.Parameter(torch.empty(LENGTH, WIDTH))
        self.ln_final = LayerNorm(WIDTH)
        self.text_projection = nn.Parameter(torch.empty(WIDTH, SPACE))
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))
        nn.init.normal_(self.token_embedding.weight, std=0.02)
        nn.init.normal_(self.positional_embedding, std=0.01)
        nn.init.normal_(self.text_projection, std=WIDTH**-0.5)

    @property
    def dtype(self) -> torch.dtype:
        return self.visual.conv1.weight.dtype

    def encode_text(self, text: Tensor) -> Tensor:
        x = self.token_embedding(text).type(self.dtype)
        x = x + self.positional_embedding.type(self.dtype)
        x = self.transformer(x.permute(1, 0, 2)).permute(1, 0, 2)
        x = self.ln_final(x).type(self.dtype)
        # The last token of each text is the highest number in it.
        return x[torch.arange(x.shape[0]), text.argmax(dim=-1)] @ self.text_projection

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        images = self.visual(image.type(self.dtype))
        texts = self.encode_text(text)
        images = images / images.norm(dim=1, keepdim=True)
        texts = texts / texts.norm(dim=1, keepdim=True)
        logits = self.logit_scale.exp() * images @ texts.t()
        return logits, logits.t()


def clip() -> list[nn.Module]:
    return [CLIP()]


def batch() -> tuple[Tensor, ...]:
    """Images of one colour each, and texts that begin with the number of the colour."""
    kind = torch.randperm(16)
    image = (
        0.3 * torch.randn(16, 3, 12, 12)
        + torch.sin(kind[:, None] * torch.tensor([1.0, 2, 3]))[:, :, None, None]
    )
    text = torch.randint(20, VOCAB - 1, (16, LENGTH))
    text[:, 0] = kind
    text[torch.arange(16), torch.randint(2, LENGTH, (16,))] = VOCAB - 1
    return image, text


adamw = optimizer(torch.optim.AdamW, 1e-3, betas=(0.9, 0.98), eps=1e-6)


@usual
def step(model: nn.Module, image: Tensor, text: Tensor) -> Tensor:
    per_image, per_text = model(image, text)
    wanted = torch.arange(len(image), device=image.device)
    return (F.cross_entropy(per_image, wanted) + F.cross_entropy(per_text, wanted)) / 2
