"""The names in a loss scale that version 0.1 pickled."""

from ..ir.scale import ScaleState as ScaleState
from ..scaling.loss_scale import LossScale as LossScale
