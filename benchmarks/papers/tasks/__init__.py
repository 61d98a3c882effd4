"""The tasks, in the order of the paper's sections, and the rows of the table."""

from __future__ import annotations

from benchmarks.papers.task import Task
from benchmarks.papers.tasks.classification import INCEPTION, RESNET
from benchmarks.papers.tasks.detection import SSD
from benchmarks.papers.tasks.detection_torchvision import FASTER_RCNN, SSD300
from benchmarks.papers.tasks.gan import DCGAN
from benchmarks.papers.tasks.language import (
    BIG_LSTM,
    BIG_LSTM_AS_AVERAGED,
    GPT_AS_AVERAGED,
    GPT_TASK,
)
from benchmarks.papers.tasks.recommendation import DLRM
from benchmarks.papers.tasks.speech import DEEP_SPEECH
from benchmarks.papers.tasks.translation import LSTM_ATTENTION, TRANSFORMER, TRANSFORMER_AS_AVERAGED

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

ROWS: tuple[Task, ...] = (*TASKS, *AS_AVERAGED, SSD300, FASTER_RCNN)
"""The table: all of these, and torchvision's detectors, where it is installed."""
