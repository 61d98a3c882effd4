"""The rows of the table, in the order of the paper's sections."""

from __future__ import annotations

from ..task import Task
from .classification import INCEPTION, RESNET
from .detection import SSD
from .gan import DCGAN
from .language import BIG_LSTM, GPT_TASK
from .recommendation import DLRM
from .speech import DEEP_SPEECH
from .translation import LSTM_ATTENTION, TRANSFORMER

__all__ = ["BIG_LSTM", "SSD", "TASKS"]

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
