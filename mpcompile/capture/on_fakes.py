"""Runs operators on fakes, while a graph is captured and rewritten, unseen by the caller."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from ..torch_inside.names import FakeTensorMode, top_saved_hooks


@contextlib.contextmanager
def unseen(mode: FakeTensorMode) -> Iterator[None]:
    """Hide the operators that passes run on fakes, and that `rules/kernels.py` runs on samples.

    From the caller's hooks on saved tensors: such a hook may count tensors, as a checkpoint's does.
    From AOTAutograd: it would ask where the symbols have gone that stand for sizes which depend on
    values (`x[mask]`), and makes its own.

    Args:
        mode: of the fakes.
    """
    with contextlib.ExitStack() as hidden:
        if top_saved_hooks(True) is not None:
            same = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
            hidden.enter_context(same)
        if mode.shape_env is not None:
            hidden.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
        yield
