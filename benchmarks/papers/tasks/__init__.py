"""The tasks, in the order of the paper's sections, and the rows of the table."""

from __future__ import annotations

from ..task import Task
from .classification import INCEPTION, RESNET
from .detection import SSD
from .detection_torchvision import RETINANET, SSDLITE
from .gan import DCGAN
from .language import BIG_LSTM, BIG_LSTM_AS_AVERAGED, GPT_AS_AVERAGED, GPT_TASK
from .recommendation import DLRM
from .speech import DEEP_SPEECH
from .translation import LSTM_ATTENTION, TRANSFORMER, TRANSFORMER_AS_AVERAGED

__all__ = ["AS_AVERAGED", "BIG_LSTM", "ROWS", "SSD", "TASKS"]

TASKS: tuple[Task, ...] = (
    RESNET,
    INCEPTION,
    SSD,
    DEEP_SPEECH,
    LSTM_ATTENTION,
    TRANSFORMER,
    BIG_LSTM,
    GPT_TASK,
    DCGAN,
    DLRM,
)

AS_AVERAGED: tuple[Task, ...] = (BIG_LSTM_AS_AVERAGED, GPT_AS_AVERAGED, TRANSFORMER_AS_AVERAGED)
"""Tasks with gradients as small as in the papers' large batches."""

ROWS: tuple[Task, ...] = (*TASKS, *AS_AVERAGED, RETINANET, SSDLITE)
"""The table: all of these, and torchvision's detectors, where it is installed."""
