"""Faults of torch itself that our users would meet, and how mpcompile goes round each.

A row says in which releases a fault stands; the way round acts in these alone.
`tests/torch_inside/test_torch_faults.py` has a small program for each that shows whether the
installed torch has it, and says which row a release no longer needs, or needs again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..torch_inside.version import release
from .cxx import GCC_FLAG as GCC_FLAG


@dataclass(frozen=True)
class TorchFault:
    """One fault.

    Attributes:
        name: a few words.
        wrong: what comes out wrong, and when.
        until: the first release that doesn't have it; None: none is known. All supported ones
            before do.
        way_round: what mpcompile does about it, where, and what that costs.
    """

    name: str
    wrong: str
    until: str | None
    way_round: str

    def is_here(self, version: str = torch.__version__) -> bool:
        """Whether a release of torch has it."""
        return self.until is None or release(version) < release(self.until)


SCHEDULER_FORGETS_WRITES = TorchFault(
    name="Inductor's C++ forgets an order of writes",
    wrong="A value that was written in place (a scatter: the backward of max_pool2d) may be read "
    "before it is written, where Inductor aligns the loops of its reader with another node's. "
    "After max_pool2d, the gradients of all convolutions are exactly 0.",
    until="2.14",
    way_round="`mpcompile/lower/write_order.py` puts the forgotten order back, in our compilations "
    "alone. It costs nothing: a right program compiles to the same code.",
)

SHALLOW_VOLUMES = TorchFault(
    name="BF16 convolutions over shallow volumes",
    wrong="oneDNN leaves parts of the weight gradient of conv3d and conv_transpose3d unwritten "
    "where the kernel is larger than the padded volume is without its padding, such as a kernel of "
    "3 with padding 1 over a depth of 2; some sizes write out of bounds.",
    until=None,
    way_round="`passes/graph/guard_kernels.py` computes these convolutions in FP32, whatever the "
    "policy. In BF16 they would be faster.",
)

ZEROS_ARE_REUSED = TorchFault(
    name="Inductor reuses the memory of zeros that have none",
    wrong="The backward of forward mode (torch.func.jvp, jacfwd, hessian) raises under Inductor: "
    "'ZeroTensors are immutable'.",
    until="2.14",
    way_round="`fill_zeros` (`passes/joint/lowered_faults.py`) fills tensors with zeros in graphs "
    "with a transform of functorch. It costs these tensors' memory.",
)

WRITTEN_INPUT_KEPT = TorchFault(
    name="the backward recomputes from a written input",
    wrong="Where the forward writes an input that needs no gradient, AOTAutograd's partitioner may "
    "keep the input itself and recompute, in the backward, what was computed before the write. A "
    "checkpoint that reads such values gives wrong gradients.",
    until=None,
    way_round="`keep_written_inputs` (`passes/joint/kept_for_backward.py`) keeps a copy of the "
    "input as it was: its memory once more, only where the gradient would be wrong.",
)

MAXIMA_DECLARED_TWICE = TorchFault(
    name="Inductor's C++ declares maxima twice",
    wrong="Two equal maxima of BF16 or FP16 values in one loop, such as x.amax(1) and "
    "x.mT.amax(2), do not compile: 'conflicting declaration'.",
    until=None,
    way_round="`widen_maxima` (`passes/joint/lowered_faults.py`) takes them in FP32, which gives "
    "the same values and costs nothing.",
)

POOLS_COUNT_OTHERWISE = TorchFault(
    name="Inductor counts places in a large pool otherwise",
    wrong="Indices of max_pool2d and max_pool3d with a window of more than 25 elements, and "
    "gradients, are those of other elements, in any dtype, where depth, height and width don't lie "
    "in this order in memory.",
    until=None,
    way_round="`order_pools` (`passes/joint/lowered_faults.py`) lays out in order what such a pool "
    "reads: a copy.",
)

GCC_MISCOPIES_TILES = TorchFault(
    name="g++ miscopies Inductor's tiles",
    wrong="g++ 11 and 12, on a CPU with AVX512 that they don't know and so tune for none: a tile "
    "of 32x32 BF16 or FP16 elements that is transposed twice in a loop holds what was on the "
    "stack.",
    until=None,
    way_round=f"`mpcompile/lower/write_order.py` hands g++ {GCC_FLAG} where it tunes for no CPU. "
    "It costs no time.",
)

FAULTS = (
    SCHEDULER_FORGETS_WRITES, SHALLOW_VOLUMES, ZEROS_ARE_REUSED, WRITTEN_INPUT_KEPT,
    MAXIMA_DECLARED_TWICE, POOLS_COUNT_OTHERWISE, GCC_MISCOPIES_TILES,
)  # fmt: skip
