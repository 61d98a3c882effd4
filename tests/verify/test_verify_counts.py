"""A buffer that the forward writes and the program reads back, such as a count of its calls."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from mpcompile import MPCompileWarning, mpcompile


class Counts(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("count", torch.zeros((), dtype=dtype))

    def forward(self, x: torch.Tensor) -> Any:
        self.count += 1
        return self.layer(x)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32], ids=["whole", "floating"])
def test_no_false_alarm(dtype: torch.dtype) -> None:
    model = mpcompile(Counts(dtype), dtype=torch.bfloat16, emit="inductor")
    with warnings.catch_warnings():
        warnings.simplefilter("error", MPCompileWarning)
        for _ in range(2):
            model(torch.randn(8, 16)).sum().backward()
    assert model.count.item() == 2
