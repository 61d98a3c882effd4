"""Number formats: the dtypes in which a precision stores values and computes with them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Format:
    """A number format.

    Attributes:
        compute: the dtype that operators compute in, and that their results have.
        operands: the dtype that the operands of products are first rounded to; None: `compute`.
            It is narrower (FP8), and its range is too small for unscaled values: each tensor is
            divided by one scale, so that its largest element just fits.
    """

    compute: torch.dtype
    operands: torch.dtype | None = None

    @property
    def operand_bytes(self) -> int:
        """Bytes of one element of a product's operand."""
        return (self.operands or self.compute).itemsize


FP32 = Format(torch.float32)
