"""What else is done to a compiled model: it is cast, or traced for TorchScript."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from mpcompile import MPCompileError, mpcompile


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_cast_behind_the_first_call_is_refused_as_before_it(
    dtype: torch.dtype, level: str
) -> None:
    model = mpcompile(net(), level=level, dtype=torch.float16, emit="eager", strict=True)
    x = torch.randn(4, 8)
    before = model(x).detach()
    for _ in range(2):
        model.to(dtype)
        with pytest.raises(MPCompileError, match=r"cast after mpcompile.*deepcopy\(model\)\.to"):
            model(x.to(dtype))
    plain = copy.deepcopy(model)  # the way out that the message names
    assert plain(x.to(dtype)).dtype is dtype
    model.float()
    torch.testing.assert_close(model(x), before, rtol=2e-2, atol=2e-2)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
@pytest.mark.filterwarnings("ignore:`torch.jit.trace_method")
def test_torchscript_traces_the_plain_model() -> None:
    """Before the first call and after it, by itself and inside of another module. (torch's own
    check of a trace compares with the compiled model, and would warn of its rounding.)
    """
    plain = net()
    model = mpcompile(copy.deepcopy(plain), dtype=torch.float16, emit="eager", strict=True)
    function = mpcompile(lambda x: x @ x.t(), dtype=torch.float16, emit="eager", strict=True)
    x = torch.randn(4, 8)
    for _ in range(2):
        for module in (model, nn.Sequential(model)):
            traced = torch.jit.trace(module, x, check_trace=False)
            torch.testing.assert_close(traced(x), plain(x), rtol=0, atol=0)
        traced = torch.jit.trace(function, x, check_trace=False)
        torch.testing.assert_close(traced(x), x @ x.t(), rtol=0, atol=0)
        model(x).sum().backward()
        function(x)
