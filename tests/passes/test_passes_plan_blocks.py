"""plan on blocks of real models: of a GPT, of a ResNet, of an LSTM tagger."""

import pytest
import torch
import torch.nn.functional as F
from compare import LEVELS, leaf
from expecttest import assert_expected_inline
from graphs import Stage
from torch import nn

from mpcompile import ir
from mpcompile.demo import GPT, GPTConfig
from mpcompile.passes.graph.plan import plan


def decisions(stage: Stage) -> str:
    """`marks`, with a word on what is stored low although it is computed in FP32."""
    return "".join(
        f"{line}, stored low\n" if ir.is_stored_low(stage.node(line.split(":")[0])) else f"{line}\n"
        for line in stage.marks.splitlines()
    )


@pytest.mark.parametrize(
    ("level", "stream", "tables"), [("O1", "FULL", "plan"), ("O2", "LOW", "guard")]
)
def test_a_gpt_block(level: str, stream: str, tables: str) -> None:
    """A layer of the demo's GPT, and the norm behind it. FP32 is what reads the FP32 tables of
    rotary positions. So is the residual stream at O1; at O2 it is low, as the norms keep it for
    the backward.
    """
    block = GPT(GPTConfig(vocab=16, context=8, width=16, layers=1, heads=2)).blocks[0]
    stage = Stage(plan, nn.Sequential(block, nn.LayerNorm(16)), leaf(2, 8, 16), level=level)
    stage.run_twice()
    expected = f"""\
layer_norm: FULL [table]
linear: LOW [table]
unflatten: LOW [plan]
permute: LOW [plan]
unbind: LOW [plan]
getitem: LOW [plan]
getitem_1: LOW [plan]
getitem_2: LOW [plan]
slice_1: FULL [{tables}]
slice_2: FULL [{tables}]
chunk: LOW [plan]
getitem_3: LOW [plan]
getitem_4: LOW [plan]
mul: FULL [{tables}]
mul_1: FULL [{tables}]
sub: FULL [{tables}]
mul_2: FULL [{tables}]
mul_3: FULL [{tables}]
add: FULL [{tables}]
cat: FULL [{tables}]
slice_3: FULL [{tables}]
slice_4: FULL [{tables}]
chunk_1: LOW [plan]
getitem_5: LOW [plan]
getitem_6: LOW [plan]
mul_4: FULL [{tables}]
mul_5: FULL [{tables}]
sub_1: FULL [{tables}]
mul_6: FULL [{tables}]
mul_7: FULL [{tables}]
add_1: FULL [{tables}]
cat_1: FULL [{tables}]
scaled_dot_product_attention: LOW [table]
transpose: LOW [plan]
flatten: LOW [plan]
linear_1: LOW [table]
add_2: {stream} [plan]
layer_norm_1: FULL [table]
linear_2: LOW [table]
gelu: LOW [plan]
linear_3: LOW [table]
add_3: {stream} [plan]
layer_norm_2: FULL [table]
"""
    assert decisions(stage) == expected


class Basic(nn.Module):
    """ResNet's basic block, with a projected shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4, 8, 3, stride=2, padding=1, bias=False)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(4, 8, 1, stride=2, bias=False)
        self.norm1, self.norm2, self.norm3 = (nn.BatchNorm2d(8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + self.norm3(self.shortcut(x))).mean((2, 3))


@pytest.mark.parametrize(("level", "stream"), [("O1", "FULL"), ("O2", "LOW")])
def test_a_resnet_block(level: str, stream: str) -> None:
    stage = Stage(plan, Basic(), leaf(2, 4, 8, 8), level=level)
    stage.run_twice()
    expected = f"""\
conv2d: LOW [table]
add_: KEEP [captured]
batch_norm: LOW [plan]
relu: LOW [plan]
conv2d_1: LOW [table]
add__1: KEEP [captured]
batch_norm_1: {stream} [plan]
conv2d_2: LOW [table]
add__2: KEEP [captured]
batch_norm_2: LOW [plan]
add: {stream} [plan]
relu_1: {stream} [plan]
mean: FULL [table]
"""
    assert decisions(stage) == expected


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.lstm = nn.Embedding(10, 16), nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, 10)

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        x, _ = self.lstm(self.tokens(idx))
        return F.cross_entropy(self.head(F.dropout(x)).flatten(0, 1), idx.flatten())


@LEVELS
def test_an_lstm_head(level: str) -> None:
    """The same at both: nothing in it is stored that isn't low."""
    with torch._dynamo.config.patch(allow_rnn=True):
        stage = Stage(plan, Tagger(), torch.zeros(2, 4, dtype=torch.int64), level=level)
    stage.run_twice()
    assert_expected_inline(
        decisions(stage),
        """\
embedding: FULL [plan]
zeros: KEEP [table]
zeros_1: KEEP [table]
lstm: LOW [table]
getitem: LOW [plan]
getitem_1: LOW [plan]
getitem_2: LOW [plan]
dropout: LOW [plan]
linear: LOW [table]
flatten: LOW [plan]
flatten_1: KEEP [captured]
cross_entropy_loss: FULL [table]
""",
    )
