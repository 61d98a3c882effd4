"""AOTAutograd: a graph's forward and backward, apart; and the classes it makes of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from torch import Tensor

UNCHECKED = "saved_tensor_with_no_vc_check"
"""AOTAutograd's note on a node that a function of the user's has put on `ctx`: it is kept behind
all others, and may be written before the backward."""

CHECKPOINTED = "recompute"
"""AOTAutograd's note on a node of a joint graph that stands in a checkpoint of the program's."""

Call = TypeVar("Call", bound=Callable[..., Any])


def boxed(call: Call) -> Call:
    """Tell AOTAutograd that this takes all inputs as one list, which it empties."""
    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def donated_inputs(context: Any) -> Collection[int]:
    """The inputs of a backward whose memory it may use for others, by number.

    Args:
        context: the `TracingContext` in which it is compiled; None: there is none.
    """
    facts = getattr(context, "fw_metadata", None)
    return tuple(getattr(facts, "bw_donated_idxs", None) or ())


def is_compiled(function: Any) -> bool:
    """Whether an autograd.Function is one that AOTAutograd made of a graph."""
    return hasattr(function, "_aot_id")


class CopiedContext:
    """The context of a backward of AOTAutograd's, with copies of the saved tensors of these
    numbers.
    """

    def __init__(
        self, ctx: Any, numbers: Collection[int], copy: Callable[[Tensor], Tensor]
    ) -> None:
        self._ctx, self._numbers, self._copy = ctx, numbers, copy
        self.saved_tensors = self._copied(ctx.saved_tensors)

    @property
    def _tensors_no_vc_check(self) -> tuple[Tensor, ...]:
        """Those whose version isn't checked: they count on from the others."""
        return self._copied(self._ctx._tensors_no_vc_check, len(self.saved_tensors))

    def _copied(self, tensors: Sequence[Tensor], first: int = 0) -> tuple[Tensor, ...]:
        return tuple(
            self._copy(tensor) if number in self._numbers else tensor
            for number, tensor in enumerate(tensors, first)
        )

    def maybe_clear_saved_tensors(self) -> None:
        """Keep what is saved: the backward runs once more."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)
