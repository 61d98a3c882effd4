"""The passes over AOTAutograd's joint graph and its halves, and how Inductor is told to run them.

Inductor runs the first as its `joint_custom_post_pass`: on the joint graph of forward and backward,
after its own passes on it, so GEMMs are already padded and chains of casts merged. Those for the
halves run after the partitioner, which its `custom_partitioner_fn` calls, or `PartStep` in a whole
step; the last ones as its `post_grad_custom_post_pass`, on a graph that is about to be lowered.
Their source is part of the key of Inductor's caches. No global setting is changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import fx

from ..devices.registry import capabilities
from ..devices.torch_faults import ZEROS_ARE_REUSED
from ..passes.joint.keep_normalized import keep_normalized
from ..passes.joint.kept_for_backward import WEIGHT, keep_sources, store_masks_as_bytes
from ..passes.joint.lay_images import lay_channels_last, lay_low_images
from ..passes.joint.lowered_faults import fill_zeros, read_low_results, scatter_into_sums
from ..passes.joint.together import cast_together, unscale_together
from ..passes.joint.widen_weight_gradients import widen_weight_gradients
from ..rules.policy import Level
from ..torch_inside import inductor
from ..torch_inside.inductor import CHECKPOINTED
from ..torch_inside.names import (
    CustomGraphPass,
    CustomPartitionerFn,
    aot_settings,
    get_hash_for_files,
    min_cut_rematerialization_partition,
)
from .part_step import PartStep

OPTION = "joint_custom_post_pass"
LOWERED = "post_grad_custom_post_pass"
PARTITIONER = "custom_partitioner_fn"
# In an inference's graph, Inductor moves to the end what only its results read: the gradients of
# all weights, with all that they are made of.
_TO_THE_END = "reorder_for_locality"
# The effect of a pass depends on its own file and on the modules it calls in these rooms.
_ASKED = tuple(
    str(file)
    for room in ("devices", "ir", "torch_inside")
    for file in sorted((Path(__file__).parents[1] / room).glob("*.py"))
)


_LAYOUTS = (lay_channels_last, lay_low_images)
_WITH_OPERATORS = (cast_together, unscale_together)

JointPass = Callable[[fx.Graph], bool]
PartingPass = Callable[[fx.Graph, int], bool]
HalvesPass = Callable[[fx.Graph, fx.Graph, int], bool]


@dataclass(frozen=True)
class JointPasses:
    """The passes for one graph.

    Attributes:
        joint: for the joint graph, in their order.
        parting: for the joint graph that is about to be parted, and the number of its results that
            are the forward's.
        halves: for the forward and the backward that become of it.
        lowered: for the graph after Inductor's own passes, as it is lowered.
        keeps_casts: whether the backward gets the low casts of weights that the partitioner keeps
            for it, unless the program has a checkpoint: 2 bytes an element until then. Else it
            casts the weights again, which is 6 bytes of traffic an element, and a launch.
        recomputes: whether the backward makes operands of matrix products again, where one fused
            kernel can make them of stored values: the results of GELU and of a norm, and casts of
            weights. Else torch's partitioner stores what a product reads.
        whole: forward and backward stay one graph.
    """

    joint: tuple[JointPass, ...] = ()
    parting: tuple[PartingPass, ...] = ()
    halves: tuple[HalvesPass, ...] = ()
    lowered: tuple[JointPass, ...] = ()
    keeps_casts: bool = False
    recomputes: bool = False
    whole: bool = False


NO_PASSES = JointPasses()


def joint_passes(
    level: Level,
    device: torch.device,
    *,
    whole: bool = False,
    sharded: bool = False,
    recompute: bool = False,
) -> JointPasses:
    """The passes for a graph compiled at `level`.

    Args:
        level: O1, O2 or O3.
        device: it is compiled for.
        whole: forward and backward stay one graph.
        sharded: FSDP2 frees weights between their uses.
        recompute: the user asks for memory at the cost of time.

    From O2 on weight gradients are not widened: there they are stored in the low dtype.
    """
    there = capabilities(device)
    recomputes = recompute or there.recomputes
    widens = level is Level.O1 and there.products_leave_in_fp32()
    zeros = (fill_zeros,) if whole and ZEROS_ARE_REUSED.is_here() else ()
    images: tuple[JointPass, ...] = ()
    if there.convolves_channels_last:
        images = (lay_channels_last,) if whole else ()
    elif there.convolves_low_channels_last:
        images = (lay_low_images,)
    # A whole step looks at each gradient by itself.
    together = (cast_together,) if whole else (cast_together, unscale_together)
    few = together if there.spares_launches else ()
    return JointPasses(
        joint=(widen_weight_gradients,) if widens else (),
        # Where `y` is made again from `x`, FP32 costs no more memory than both in half; and in a
        # whole step, the user's code may read `x` after the backward.
        parting=() if recomputes or whole else (keep_normalized,),
        halves=(store_masks_as_bytes,) if there.slow_bools and not whole else (),
        lowered=(*zeros, *images, *few, read_low_results, scatter_into_sums),
        keeps_casts=not (sharded or recomputes),
        recomputes=recomputes,
        whole=whole,
    )


def with_joint_passes(
    options: Mapping[str, Any] | None, passes: JointPasses
) -> dict[str, Any] | None:
    """Inductor's options with `passes` added, after the user's own passes if there are any.

    `options` is as torch.compile takes it. No pass for the joint graph is added for code that can't
    call `mm` with an FP32 output: C++ wrappers, and GEMM backends without ATen. Images are not laid
    out where Inductor may lay out none (`layout_optimization`). No operator of ours is put into C++
    wrappers, which call it by way of Python.
    """
    given = {key.replace("-", "_"): value for key, value in (options or {}).items()}

    def setting(name: str) -> Any:
        return given.get(name, inductor.setting(name))

    backends = str(setting("max_autotune_gemm_backends")).upper()
    joint = passes.joint if not setting("cpp_wrapper") and "ATEN" in backends else ()
    if passes.whole:
        kept = replace(passes, halves=(keep_sources, *passes.halves))
        joint = (*joint, PartStep(Partitioner(setting(PARTITIONER), kept)))
        given.setdefault(_TO_THE_END, False)
    elif passes.parting or passes.halves:
        given[PARTITIONER] = Partitioner(setting(PARTITIONER), passes)
    if joint:
        given[OPTION] = appended(setting(OPTION), joint)
    refused = () if setting("layout_optimization") else _LAYOUTS
    refused = (*refused, *_WITH_OPERATORS) if setting("cpp_wrapper") else refused
    if lowered := [one for one in passes.lowered if one not in refused]:
        given[LOWERED] = appended(setting(LOWERED), lowered)
    return given or None


def appended(theirs: Any, passes: Sequence[JointPass]) -> InOrder:
    """The user's pass or passes, if there are any, and then ours."""
    theirs = theirs or ()
    return InOrder(theirs if isinstance(theirs, (list, tuple)) else (theirs,), passes)


class InOrder(CustomGraphPass):
    """Several passes as one (torch 2.12 takes no list): the user's, and then ours."""

    def __init__(
        self, theirs: Sequence[Callable[[fx.Graph], object]], ours: Sequence[JointPass]
    ) -> None:
        self.theirs, self.ours = theirs, ours

    def __call__(self, graph: fx.Graph) -> None:
        """Run each pass."""
        for pass_ in (*self.theirs, *self.ours):
            pass_(graph)

    def uuid(self) -> tuple[Any, ...] | None:
        """The uuids of their passes and the sources of ours; None ("don't cache") if one of theirs
        has none.
        """
        theirs = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.theirs]
        return (*theirs, *map(_source_of, self.ours)) if all(theirs) else None


class Partitioner(CustomPartitionerFn):
    """The partitioner of the user or of Inductor, between passes over what it parts and over what
    it made.

    The latter see which inputs are weights, unless casts of weights are kept: see `JointPasses`.
    """

    def __init__(self, theirs: CustomPartitionerFn | None, passes: JointPasses) -> None:
        self.theirs, self.passes = theirs, passes

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Part the joint graph as without mpcompile; run each pass."""
        for rewrite in self.passes.parting:
            if rewrite(gm.graph, kwargs["num_fwd_outputs"]):
                gm.recompile()
        partition = self.theirs or min_cut_rematerialization_partition
        has_checkpoint = any(CHECKPOINTED in node.meta for node in gm.graph.nodes)
        stored = "ban_recompute_materialized_backward"
        with aot_settings({stored: False} if self.passes.recomputes else {}):
            forward, backward = partition(gm, joint_inputs, **kwargs)
        if has_checkpoint or not self.passes.keeps_casts:
            inputs = forward.graph.find_nodes(op="placeholder")
            for number in kwargs.get("static_lifetime_input_indices") or ():
                inputs[number].meta[WEIGHT] = True
        for pass_ in self.passes.halves:
            if pass_(forward.graph, backward.graph, kwargs["num_fwd_outputs"]):
                forward.recompile()
                backward.recompile()
        return forward, backward

    def uuid(self) -> tuple[Any, ...]:
        """The partitioner's uuid and the sources of the passes. torch takes a partitioner's None
        for Inductor's own, although it means "don't cache": one that no other has is never found.
        """
        theirs = (self.theirs.uuid() or uuid4()) if self.theirs else "Inductor's"
        passes: tuple[Callable[..., bool], ...] = (*self.passes.parting, *self.passes.halves)
        kept = self.passes.keeps_casts, self.passes.recomputes
        return (theirs, *kept, *map(_source_of, passes))


def _source_of(pass_: Callable[..., bool]) -> Any:
    """A hash of the files that the effect of a pass of ours depends on."""
    if isinstance(pass_, PartStep):
        return (get_hash_for_files((inspect.getfile(PartStep),)), pass_.partition.uuid())
    return get_hash_for_files((inspect.getfile(pass_), *_ASKED))
