"""Language models of words in the manner of pytorch/examples: an LSTM that the loop itself updates,
and a Transformer.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from public_loops import Clip, Models, Optimizers, Step, optimizer, usual
from torch import Tensor, nn
from torch.optim import Optimizer

WORDS, WIDTH, LENGTH, ROWS, LAYERS = 50, 32, 10, 8, 2
Hidden = tuple[Tensor, Tensor]


def _start(encoder: nn.Embedding, decoder: nn.Linear) -> None:
    nn.init.uniform_(encoder.weight, -0.1, 0.1)
    nn.init.zeros_(decoder.bias)
    nn.init.uniform_(decoder.weight, -0.1, 0.1)


class RNNModel(nn.Module):
    """Its embedding and its decoder are one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(WORDS, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, LAYERS, dropout=0.2)
        self.decoder = nn.Linear(WIDTH, WORDS)
        self.decoder.weight = self.encoder.weight
        _start(self.encoder, self.decoder)

    def forward(self, words: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
        output, hidden = self.rnn(self.drop(self.encoder(words)), hidden)
        decoded = self.decoder(self.drop(output)).view(-1, WORDS)
        return F.log_softmax(decoded, dim=1), hidden

    def init_hidden(self, rows: int) -> Hidden:
        weight = next(self.parameters())
        return weight.new_zeros(LAYERS, rows, WIDTH), weight.new_zeros(LAYERS, rows, WIDTH)


class PositionalEncoding(nn.Module):
    def __init__(self, longest: int = 40) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)
        table = torch.zeros(longest, WIDTH)
        position = torch.arange(0, longest, dtype=torch.float).unsqueeze(1)
        rates = torch.exp(torch.arange(0, WIDTH, 2).float() * (-math.log(10000.0) / WIDTH))
        table[:, 0::2] = torch.sin(position * rates)
        table[:, 1::2] = torch.cos(position * rates)
        self.register_buffer("pe", table.unsqueeze(0).transpose(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x + self.pe[: x.size(0), :])


class TransformerModel(nn.Module):
    """It keeps the mask of the last length."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 64, 0.1)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.src_mask: Tensor | None = None
        self.pos_encoder = PositionalEncoding()
        self.input_emb = nn.Embedding(WORDS, WIDTH)
        self.decoder = nn.Linear(WIDTH, WORDS)
        _start(self.input_emb, self.decoder)

    def forward(self, words: Tensor) -> Tensor:
        if self.src_mask is None or self.src_mask.size(0) != len(words):
            mask = torch.log(torch.tril(torch.ones(len(words), len(words))))
            self.src_mask = mask.to(words.device)
        x = self.pos_encoder(self.input_emb(words) * math.sqrt(WIDTH))
        x = self.decoder(self.encoder(x, mask=self.src_mask))
        return F.log_softmax(x, dim=-1)


def lstm() -> list[nn.Module]:
    return [RNNModel()]


def transformer() -> list[nn.Module]:
    return [TransformerModel()]


def first_hidden(models: Models) -> tuple[Any, ...]:
    return (models[0].init_hidden(ROWS),)


def batch() -> tuple[Tensor, ...]:
    """Each column counts on from a word of its own."""
    text = (torch.randint(WORDS, (ROWS,)) + torch.arange(LENGTH + 1)[:, None]) % WORDS
    return text[:-1], text[1:].reshape(-1)


def by_hand(models: Models, rate: float) -> list[Optimizer]:
    """No optimizer: the step adds the gradients itself, at this rate."""
    models[0].rate = 5.0 * rate
    return []


adamw = optimizer(torch.optim.AdamW, 2e-3)


def repackaged(hidden: Any) -> Any:
    if isinstance(hidden, Tensor):
        return hidden.detach()
    return tuple(repackaged(each) for each in hidden)


def lstm_step(models: Models, optimizers: Optimizers, clip: Clip) -> Step:
    (model,) = models
    rate, criterion = model.rate, nn.NLLLoss()

    def step(data: Tensor, targets: Tensor, hidden: Hidden) -> tuple[Any, ...]:
        model.zero_grad()
        hidden = repackaged(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        clip(model.parameters())
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-rate)
        return loss.detach(), hidden

    return step


@usual
def transformer_step(model: nn.Module, data: Tensor, targets: Tensor) -> Tensor:
    return F.nll_loss(model(data).view(-1, WORDS), targets)
