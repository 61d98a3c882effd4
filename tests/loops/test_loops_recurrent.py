"""Recurrent models: packed sequences with CTC, attention with teacher forcing, truncated BPTT."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops import MOSTLY_O1, WAYS, Way, agreeing
from module_of import module_of
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from versions import since

pytestmark = pytest.mark.slow("a loop in each way of training, against FP64")


class Speech(nn.Module):
    """Convolutions over the spectrogram, a packed bidirectional GRU, log-probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(12, 24, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm1d(24)
        self.gru = nn.GRU(24, 16, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, 6)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> Any:
        x = F.relu(self.norm(self.conv(x))).transpose(1, 2)
        lengths = (lengths + 1) // 2
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        return self.head(out).log_softmax(-1), lengths


@since("2.13", "Dynamo itself can't trace these RNNs")
@pytest.mark.filterwarnings("ignore:mpcompile. .* gru ran as torch runs them")  # a packed sequence
@agreeing(WAYS, tolerance=0.05, bf16=0.25)
def test_convolution_packed_gru_and_ctc(way: Way) -> None:
    model = way.model(Speech(), strict=False)
    optimizer = way.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm=5.0)
    criterion = nn.CTCLoss(zero_infinity=True)
    data, targets = torch.randn(4, 4, 12, 40), torch.randint(1, 6, (4, 4, 5))
    lengths, target_lengths = torch.tensor([40, 31, 36, 22]), torch.tensor([5, 3, 4, 2])
    for step, update in way.updates(4, model, optimizer, planted=2):
        log_probs, out_lengths = model(data[step], lengths)
        update(criterion(log_probs.transpose(0, 1), targets[step], out_lengths, target_lengths))


def new_encoder() -> nn.Module:
    return nn.Sequential(nn.Embedding(20, 16), nn.LSTM(16, 16, batch_first=True))


class Decoder(nn.Module):
    """One token at a time, with dot attention over what the encoder said."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(20, 16), nn.LSTMCell(32, 16)
        self.head = nn.Linear(32, 20)

    def forward(self, token: torch.Tensor, state: Any, memory: torch.Tensor) -> Any:
        hidden, cell = state
        weights = torch.bmm(memory, hidden.unsqueeze(2)).softmax(1)
        context = (weights * memory).sum(1)
        hidden, cell = self.cell(torch.cat([self.embed(token), context], -1), (hidden, cell))
        return self.head(torch.cat([hidden, context], -1)), (hidden, cell)


def seq2_seq(
    self: Any, source: torch.Tensor, target: torch.Tensor, forced: list[bool]
) -> torch.Tensor:
    memory, (h, c) = self.encoder(source)
    state, token, outputs = (h[0], c[0]), target[:, 0], []
    for t, force in enumerate(forced):
        logits, state = self.decoder(token, state, memory)
        outputs.append(logits)
        token = target[:, t + 1] if force else logits.argmax(1)
    return torch.stack(outputs, 1)


@since("2.13", "Dynamo itself can't trace these RNNs")
@agreeing(MOSTLY_O1)
def test_seq2seq_with_attention_and_teacher_forcing(way: Way) -> None:
    """The program differs from step to step, by which tokens are forced."""
    model = way.model(module_of(seq2_seq, encoder=new_encoder(), decoder=Decoder()))
    optimizer = way.optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    source, target = torch.randint(20, (4, 4, 6)), torch.randint(20, (4, 4, 5))
    forced = [[True] * 4, [True, True, False, True], [True] * 4, [True] * 4]
    # What the model itself would say next is taken once only: where rounding makes it say
    # another word, FP32 is no reference.
    for step, update in way.updates(4, model, optimizer, planted=2):
        logits = model(source[step], target[step], forced[step])
        update(F.cross_entropy(logits.flatten(0, 1), target[step, :, 1:].flatten()))


@agreeing(WAYS)
def test_encoder_and_decoder_compiled_apart(way: Way) -> None:
    """The official tutorial's shape: two models, two optimizers, the loop over tokens outside."""
    encoder, decoder = way.model(new_encoder()), way.model(Decoder())
    optimizers = [way.optimizer(torch.optim.SGD(m.parameters(), lr=0.5))
                  for m in (encoder, decoder)]  # fmt: skip
    source, target = torch.randint(20, (4, 4, 6)), torch.randint(20, (4, 4, 5))
    for step, update in way.updates(4, encoder, decoder, *optimizers, planted=2):
        memory, (h, c) = encoder(source[step])
        state, loss = (h[0], c[0]), torch.zeros(())
        for t in range(4):
            logits, state = decoder(target[step, :, t], state, memory)
            loss = loss + F.cross_entropy(logits, target[step, :, t + 1])
        update(loss)


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(20, 16), nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, 20)

    def forward(self, tokens: torch.Tensor, state: Any = None) -> Any:
        out, state = self.lstm(self.embed(tokens), state)
        return self.head(out), state


def detached(state: Any) -> Any:
    return tuple(s.detach() for s in state)


@agreeing(WAYS)
def test_truncated_bptt(way: Way) -> None:
    """The state of one chunk, detached, begins the next; a long way back nothing is forgotten."""
    model = way.model(LanguageModel())
    optimizer = way.optimizer(torch.optim.SGD(model.parameters(), lr=0.5), max_grad_norm=1.0)
    text = torch.randint(20, (4, 41))
    state = None
    for step, update in way.updates(5, model, optimizer, planted=2):
        chunk = text[:, step * 8 : step * 8 + 9]
        if state is not None:
            state = detached(state)
        logits, state = model(chunk[:, :-1], state)
        update(F.cross_entropy(logits.flatten(0, 1), chunk[:, 1:].flatten()))


@agreeing(WAYS)
def test_gradients_through_a_state_that_is_not_detached(way: Way) -> None:
    """Two chunks, one backward: gradients go from graph to graph through the state."""
    model = way.model(LanguageModel())
    optimizer = way.optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    text = torch.randint(20, (3, 4, 17))
    for step, update in way.updates(3, model, optimizer, planted=1):
        state, total = None, torch.zeros(())
        for start in (0, 8):
            chunk = text[step, :, start : start + 9]
            logits, state = model(chunk[:, :-1], state)
            total = total + F.cross_entropy(logits.flatten(0, 1), chunk[:, 1:].flatten())
        update(total)
