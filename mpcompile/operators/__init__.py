"""mpcompile's own operators, registered with torch.library when this room is imported."""

from . import fused_head, library, rnn_layer

__all__ = ["fused_head", "library", "rnn_layer"]
