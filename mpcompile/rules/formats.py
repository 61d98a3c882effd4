"""Number formats: how a precision stores values and computes with them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Format:
    """A number format.

    Attributes:
        compute: the dtype that operators compute in, and that their results have.
        operands: the dtype that the operands of products are rounded to first; None: `compute`.
            It is narrower, and its range too small for values as they come (FP8): they are divided
            by a scale, one number a tensor, so that the largest of them just fits.
    """

    compute: torch.dtype
    operands: torch.dtype | None = None

    @property
    def operand_bytes(self) -> int:
        """Bytes of an element of a product's operand."""
        return (self.operands or self.compute).itemsize


FP32 = Format(torch.float32)
