"""mpcompile's own operators, registered with torch.library when this room is imported."""

from . import cast_all, fused_head, kept, library, rnn_layer, take_step, unscale_all

__all__ = ["cast_all", "fused_head", "kept", "library", "rnn_layer", "take_step", "unscale_all"]
