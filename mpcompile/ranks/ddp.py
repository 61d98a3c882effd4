"""DistributedDataParallel (DDP), as far as mpcompile looks into it.

Its reducer copies each gradient that autograd has stored into a bucket of FP32 numbers, averages
full buckets over the ranks, and writes the averages back. It hooks into autograd from C++, so from
Python only two things show: which DDP's forward is running, and whether its next backward is to
reduce.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..errors import MPCompileError
from ..torch_inside.distributed import is_joined, reduces_in_python
from ..torch_inside.tensors import call_after_backward

# A callback at the end of a backward may queue another. DDP's own finalizer is queued during the
# backward, or by a callback (static_graph, in its first backward): so ours comes after it.
_HOPS = 3

# The groups of modules: see `hold_group`.
_held: list[tuple[weakref.ref[DistributedDataParallel], dist.ProcessGroup]] = []
atexit.register(_held.clear)


def check(module: DistributedDataParallel) -> None:
    """Refuse what mpcompile can't train under.

    Raises:
        MPCompileError: the DDP casts to a narrow dtype itself, or reduces in Python.
    """
    if module.mixed_precision is not None:
        raise MPCompileError(
            "DistributedDataParallel(mixed_precision=...) casts parameters and gradients itself: "
            "leave it out, mpcompile chooses the dtypes"
        )
    if reduces_in_python(module):
        raise MPCompileError(
            "mpcompile can't see what DistributedDataParallel's Python reducer averages: leave "
            "torch._dynamo.config.optimize_ddp at True, or set it to False, before DDP is made"
        )


def check_forward(module: DistributedDataParallel) -> None:
    """Refuse a forward in which ranks can't decide alike.

    Raises:
        MPCompileError: it runs in `module.join()`.
    """
    if is_joined(module):
        raise MPCompileError(
            "a compiled model can't train in DistributedDataParallel.join(): a rank that has no "
            "batch takes no step, so its loss scale would not move with the others'. Give all "
            "ranks the same number of batches: DistributedSampler(..., drop_last=True)"
        )


def hold_group(module: DistributedDataParallel) -> None:
    """Keep the module's process group until some time after the module has gone.

    A thread of gloo's needs the GIL shortly after each reduction, to let go of a hook's callback,
    or of Python objects that torch.compile has put into thread-local state. If the reducer, in C++,
    has the last reference to the group, the group waits for its threads with the GIL held: a
    deadlock. References from Python give the GIL up before they let a group go.
    """
    _held[:] = [(alive, group) for alive, group in _held if alive() is not None]
    _held.append((weakref.ref(module), module.process_group))


def after_reduction(function: Callable[[], None]) -> None:
    """Call `function` at the end of the backward that is running, after DDP's own callbacks."""

    def hop(left: int) -> None:
        if left:
            call_after_backward(lambda: hop(left - 1))
        else:
            function()

    hop(_HOPS)
