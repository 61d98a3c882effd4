"""What can't be rewritten is compiled unchanged, with one warning that says why."""

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from mpcompile import mpcompile


def test_tensor_subclass_is_left_in_fp32() -> None:

    def program(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    pair = TwoTensor(torch.randn(4, 4), torch.randn(4, 4))
    fast = mpcompile(program, dtype=torch.float16, emit="eager")
    with pytest.warns(match="left a graph in FP32: an input is a tensor subclass") as caught:
        out = fast(pair)
    assert len(caught) == 1
    assert torch.equal(out.a, pair.a @ pair.a)
    strict = mpcompile(program, dtype=torch.float16, emit="eager", strict=True)
    with pytest.raises(Exception, match=r"tensor subclass \(TwoTensor\).*Without strict=True"):
        strict(pair)


def test_fallback_keeps_an_ambient_autocast() -> None:
    """Compiled unchanged, as torch.compile would have, where mpcompile is only its backend."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    options = {"dtype": torch.float16, "emit": "aot_eager"}
    fast = torch.compile(program, backend="mpcompile", options=options)
    pair = TwoTensor(torch.randn(4, 4), torch.randn(4, 4))
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(match="a tensor subclass"):
        out = fast(pair)
    assert out.a.dtype is torch.bfloat16
