"""Keep the order of reads and writes in Inductor's scheduler, which some releases of torch forget.

A buffer that is written in place (a scatter, as in the backward of a pool) has a new name in the
scheduler after each write, so that a reader depends on the write before it. Inductor's C++ works
out a node's reads anew when it aligns the loops of two nodes to fuse them, and then finds the
buffer under its first name: the write may be put behind the read (`SCHEDULER_FORGETS_WRITES`). Here
every node of one compilation puts back what it knew, as torch does from 2.14 on. The code is the
same where nothing was forgotten, so this costs nothing.

The scheduler's nodes are those of one compilation and end with it: nothing of torch is changed.

Torch internals used here were read in torch 2.13 and exist in 2.11.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._inductor import config as inductor
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from ..devices.torch_faults import SCHEDULER_FORGETS_WRITES

PRE_FUSION = "_pre_fusion_custom_pass"
# From 2.13 on, the caches want passes over the scheduler's nodes to be of a class of their own.
_PassBase: Any = getattr(custom_graph_pass, "CustomSchedulerPass", CustomGraphPass)


def inductor_for(mode: str | None, options: Mapping[str, Any] | None) -> Any:
    """Inductor as torch.compile itself calls it for `mode` and `options` (options beat mode), with
    the order of writes kept. Its attribute `config` holds the settings.
    """
    return torch._TorchCompileInductorWrapper(mode, _kept(options), None)


def _kept(options: Mapping[str, Any] | None) -> dict[str, Any] | None:
    given = {key.replace("-", "_"): value for key, value in (options or {}).items()}
    if SCHEDULER_FORGETS_WRITES.is_here():
        theirs = given.get(PRE_FUSION, getattr(inductor, PRE_FUSION))
        given[PRE_FUSION] = KeepOrder(theirs)
    return given or None


class KeepOrder(_PassBase):  # type: ignore[misc]
    """Make each node keep its dependencies; `theirs`: the user's pass, which runs before."""

    def __init__(self, theirs: Any = None) -> None:
        self.theirs = theirs

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """The nodes, in their order."""
        if self.theirs is not None:
            nodes = self.theirs(nodes)
        for node in nodes:
            for part in node.get_nodes():
                if hasattr(part, "_compute_attrs"):  # not a call of a kernel
                    _keep(part)
        return nodes

    def uuid(self) -> Any:
        """This file's hash, and what the user's pass says; None ("don't cache") if that is None."""
        if self.theirs is None:
            return get_hash_for_files((__file__,))
        theirs = self.theirs.uuid() if hasattr(self.theirs, "uuid") else None
        return theirs and (theirs, get_hash_for_files((__file__,)))


def _keep(node: Any) -> None:
    """Let the node put back its dependencies after it has worked out its reads anew."""
    from torch._inductor.dependencies import StarDep, WeakDep
    from torch.utils._ordered_set import OrderedSet

    compute = node._compute_attrs

    def compute_and_keep(*args: Sequence[Any], **kwargs: Any) -> None:
        added = [dep for dep in node.read_writes.reads if isinstance(dep, (StarDep, WeakDep))]
        compute(*args, **kwargs)
        reads = node.read_writes.with_read(OrderedSet(added)).rename(node.mutation_renames)
        node.set_read_writes(reads)

    node._compute_attrs = compute_and_keep
