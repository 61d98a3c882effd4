"""A run in which a value has another dtype than the graph says."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from mpcompile.errors import CannotRewrite
from mpcompile.ir.as_planned import AsPlanned


def test_autocast_around_a_run_is_found() -> None:
    x, weight = torch.ones(2, 3), torch.ones(3, 4)
    graph = make_fx(lambda x, weight: (x @ weight).exp(), tracing_mode="fake")(x, weight)
    torch.testing.assert_close(AsPlanned(graph).run(x, weight), torch.full((2, 4), 3.0).exp())
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(CannotRewrite, match=r"mm is torch.bfloat16, was planned as torch.float32"),
    ):
        AsPlanned(graph).run(x, weight)
