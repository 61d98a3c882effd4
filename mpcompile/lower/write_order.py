"""Keep the order of reads and writes in Inductor's scheduler, which some releases of torch forget,
and go round other faults below the graph (`mpcompile/devices/torch_faults.py`), in any graph that
we compile: also in one that was left in FP32.

Two passes run on a graph as it is lowered. Where the C++ compiler makes wrong code without a flag
(`GCC_MISCOPIES_TILES`), it gets it: Inductor has one setting whose text it hands on as it stands,
that of `-ffp-contract`.

A buffer that is written in place (a scatter, as in the backward of a pool) has a new name in the
scheduler after each write, so that a reader depends on the write before it. Inductor's C++ works
out a node's reads again when it aligns the loops of two nodes to fuse them, and then finds the
buffer under its first name: the write may be put after the read (`SCHEDULER_FORGETS_WRITES`). Here
every node of one compilation puts back what it knew, as torch does from 2.14 on. The code is the
same where nothing was forgotten, so this costs nothing.

The scheduler's nodes are those of one compilation and end with it: nothing of torch is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..devices.cxx import GCC_FLAG, miscopies_tiles
from ..devices.torch_faults import (
    GCC_MISCOPIES_TILES,
    MAXIMA_DECLARED_TWICE,
    POOLS_COUNT_OTHERWISE,
    SCHEDULER_FORGETS_WRITES,
)
from ..passes.joint.lowered_faults import order_pools, widen_maxima
from ..torch_inside import inductor, names
from .joint import LOWERED, appended


def inductor_for(mode: str | None, options: Mapping[str, Any] | None) -> Any:
    """Inductor as torch.compile itself calls it for `mode` and `options` (options beat mode), with
    faults below the graph gone round. Its attribute `config` holds the settings.
    """
    return names.InductorBackend(mode, _kept(options), None)


def _kept(options: Mapping[str, Any] | None) -> dict[str, Any] | None:
    given = {key.replace("-", "_"): value for key, value in (options or {}).items()}
    if SCHEDULER_FORGETS_WRITES.is_here():
        theirs = given.get(inductor.PRE_FUSION, inductor.setting(inductor.PRE_FUSION))
        given[inductor.PRE_FUSION] = KeepOrder(theirs)
    faults = {order_pools: POOLS_COUNT_OTHERWISE, widen_maxima: MAXIMA_DECLARED_TWICE}
    if passes := [pass_ for pass_, fault in faults.items() if fault.is_here()]:
        given[LOWERED] = appended(given.get(LOWERED, inductor.setting(LOWERED)), passes)
    if GCC_MISCOPIES_TILES.is_here() and miscopies_tiles():
        contract = str(given.get(_CONTRACT, inductor.setting(_CONTRACT)))
        if GCC_FLAG not in contract:
            given[_CONTRACT] = f"{contract} {GCC_FLAG}"
    return given or None


_CONTRACT = "cpp.enable_floating_point_contract_flag"


class KeepOrder(names.CustomSchedulerPass):
    """Make each node keep its dependencies; `theirs`: the user's pass, which runs before."""

    def __init__(self, theirs: Any = None) -> None:
        self.theirs = theirs

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """The nodes, in their order."""
        if self.theirs is not None:
            nodes = self.theirs(nodes)
        for node in nodes:
            for part in node.get_nodes():
                if inductor.computes_reads(part):
                    _keep(part)
        return nodes

    def uuid(self) -> Any:
        """This file's hash, and what the user's pass says; None ("don't cache") if that is None."""
        if self.theirs is None:
            return names.get_hash_for_files((__file__,))
        theirs = self.theirs.uuid() if hasattr(self.theirs, "uuid") else None
        return theirs and (theirs, names.get_hash_for_files((__file__,)))


def _keep(node: Any) -> None:
    """Let the node put back its dependencies after it has worked out its reads again."""
    kinds = (names.StarDep, names.WeakDep)

    def keeping(compute: Callable[..., None]) -> Callable[..., None]:
        def compute_and_keep(*args: Any, **kwargs: Any) -> None:
            added = [dep for dep in node.read_writes.reads if isinstance(dep, kinds)]
            compute(*args, **kwargs)
            known = node.read_writes.with_read(names.OrderedSet(added))
            node.set_read_writes(known.rename(node.mutation_renames))

        return compute_and_keep

    inductor.wrap_reads(node, keeping)
