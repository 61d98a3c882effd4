"""scikit-learn's digits for `papers` and `ablations`: a part to train on, a part to judge by."""

from __future__ import annotations

import functools

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

Split = tuple[Tensor, Tensor]
"""Images (N, 64), FP32 from 0 to 1; labels (N,), int64."""


@functools.cache
def digits(device: torch.device) -> tuple[Split, Split]:
    """What to train on (1257 images), and what to judge by (540); always the same ones."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images, labels, test_size=0.3, stratify=labels, random_state=0)
    train_x, test_x, train_y, test_y = (torch.tensor(part).to(device) for part in split)
    return (train_x.float() / 16, train_y), (test_x.float() / 16, test_y)
