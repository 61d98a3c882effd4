"""The pipeline: each pass by name, in the order it runs.

The runner knows nothing of what a pass does. It runs the passes, verifies what each promised, times
them, and records the graph for the dump.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import fx

from .. import logs
from ..ir import copied, spec
from ..ir.inputs import GraphInputs
from ..passes.graph.canonical_forms import functionalize, name_squares
from ..passes.graph.classify import classify
from ..passes.graph.guard_aliases import guard_aliases
from ..passes.graph.guard_constants import guard_constants
from ..passes.graph.guard_kernels import guard_kernels, leave_unpromised
from ..passes.graph.guard_steep import guard_factorisations, guard_steep
from ..passes.graph.higher_order import gather_hooks, outline
from ..passes.graph.noop_casts import clean, drop_noop_casts
from ..passes.graph.own_memory import copy_overlaps, keep_buffers_finite, keep_compared
from ..passes.graph.place_casts import place_casts
from ..passes.graph.place_pads import place_pads
from ..passes.graph.plan import plan
from ..passes.graph.plan_pads import plan_pads
from ..passes.graph.read_copies import read_copies
from ..passes.graph.replace_operators import expand_attention, fuse_head, narrow_softmax
from ..passes.graph.scale_gradients import scale_gradients
from ..planner.graph_plan import GraphPlan, lines_of, plan_of
from ..rules.policy import Config
from .compile_log import Dump, trace_graph

Pass = Callable[[fx.GraphModule, Config], bool]

# Passes that move nodes into bodies: the plan is read before them. They only fold back the bodies
# that capture inlined, so the program stays the same.
FOLDING: tuple[Pass, ...] = (outline,)

PASSES: tuple[Pass, ...] = (
    drop_noop_casts,  # casts that the FP32 capture left would end every chain of low operators
    functionalize,  # before anything is decided: operators that stay in place keep their dtypes
    name_squares,  # before classify: a square has another rule than a product
    gather_hooks,  # before any cast comes between a value and its hook
    classify,  # LOW | FULL | FOLLOW | KEEP for every node
    guard_kernels,  # after classify, whose decisions it overrules, the user's as well
    guard_aliases,  # after classify; like the guards below, it may only make classes wider
    guard_steep,  # likewise; before guard_constants, which ends where something is pinned
    guard_constants,  # likewise
    guard_factorisations,  # likewise; before plan, while FOLLOW shows what may still be pinned
    leave_unpromised,  # before plan, which decides the products whose times are known
    plan,  # FOLLOW becomes LOW or FULL
    expand_attention,  # after plan has decided; before place_casts, which casts for its products
    fuse_head,  # likewise: one operator whose operands place_casts casts
    place_casts,  # marks are final from here on
    narrow_softmax,  # after place_casts: it looks for a cast that rounds a softmax's result
    keep_compared,  # after narrow_softmax, which looks for the cast that this one would read
    keep_buffers_finite,  # after plan: it asks what is low
    plan_pads,  # decides the padded sizes; after place_casts, so that pads stand after casts
    place_pads,  # before read_copies: a copy may be stored padded
    read_copies,  # replaces casts of parameters by copies, whose gradients leave the graph scaled
    copy_overlaps,  # before scale_gradients: the copies that it makes are results like any other
    scale_gradients,  # on the FP32 side of the casts at the graph's edges
    clean,  # after the last pass that inserts nodes
    *FOLDING,  # last: no pass looks into bodies
)


# What `disable_passes=` takes: passes whose absence leaves the graph legal and its gradients right.
# A pass that is in neither table can't be disabled: someone must first find out what that means.
MAY_BE_DISABLED: Mapping[str, str] = {
    "drop_noop_casts": "a cast to FP32 that the capture left stays, and ends a chain in low",
    "functionalize": "what is written in place keeps its FP32, and so does all that shares its "
    "memory: classify sees to that",
    "name_squares": "`x * x` runs low like other products of two values, and may overflow",
    "leave_unpromised": "products run low where nothing says that this is faster",
    "expand_attention": "attention stays one operator, in the same precision",
    "fuse_head": "the head and its loss stay two operators, as without fuse_head=True",
    "narrow_softmax": "the backward of a softmax keeps the FP32 result",
    "plan_pads": "products keep their dims, as with pad='never'",
    "keep_buffers_finite": "an overflow stays in running statistics, though its step is skipped",
    "read_copies": "an O2 graph casts the parameters itself, as it does for any other optimizer",
}
MUST_RUN: Mapping[str, str] = {
    "gather_hooks": "a hook would see a part of the gradient",
    "classify": "without classes there is nothing to plan",
    "guard_kernels": "torch's kernels would return wrong gradients",
    "guard_aliases": "tensors that share memory would no longer do so",
    "guard_constants": "constants beyond FP16's range would become infinite",
    "guard_factorisations": "a factorisation of a rounded matrix may fail, or be far off",
    "guard_steep": "logarithms of differences of rounded values may be infinite",
    "plan": "operators would stay undecided",
    "place_casts": "operators would read operands in another dtype than planned",
    "keep_compared": "where a rounding is left out, comparisons would miss equal values, and "
    "gradients of maxima be NaN",
    "place_pads": "it carries out what `plan_pads` decided: disable that",
    "copy_overlaps": "a result that overlaps itself could not be scaled",
    "scale_gradients": "it is turned off by loss_scale='none', which the optimizer hears of, too",
    "clean": "the checks of the whole graph come after it",
    "outline": "a checkpoint would be computed once, and all of its values kept",
}


@dataclass(frozen=True, eq=False)  # each is one graph
class Planned:
    """A rewritten graph, and all that is known of it.

    Attributes:
        graph: it, to be emitted.
        plan: what was decided for each node and why.
        inputs: which input of it is what.
        captured, rewritten: copies of the graph that can be run node by node: as captured, and as
            rewritten, before checkpoints are folded back.
    """

    graph: fx.GraphModule
    plan: GraphPlan
    inputs: GraphInputs
    captured: fx.GraphModule
    rewritten: fx.GraphModule


def verify(gm: fx.GraphModule, stage: str) -> None:
    """Raise `SpecError`, naming the pass `stage`, if the graph breaks a promise that holds now."""
    spec.verify(gm, stage, [pass_.__name__ for pass_ in PASSES])


def run(
    gm: fx.GraphModule,
    config: Config,
    *,
    captured_in: float,
    dump: Path | None,
    disabled: Collection[str] = (),
) -> Planned:
    """Run every pass over a captured graph, in place.

    Args:
        gm: from `capture`.
        config: the compilation's settings.
        captured_in: seconds capture took, for the record.
        dump: directory for the dump of this graph, or None.
        disabled: names, from `MAY_BE_DISABLED`, of passes that don't run.

    Raises:
        CannotRewrite: a pass found the graph unsafe to rewrite.
        SpecError: a pass broke its contract.
    """
    seconds = {"capture": captured_in}
    changed: list[str] = []
    record = Dump(dump) if dump is not None else None
    if record:
        record.stage("captured", gm, captured_in)
    before, as_captured = lines_of(gm.graph), copied(gm)
    for pass_ in PASSES:
        if (name := pass_.__name__) in disabled:
            continue
        if pass_ is FOLDING[0]:
            decided, rewritten = plan_of(gm.graph, config, before), copied(gm)
        start = time.perf_counter()
        has_changed = pass_(gm, config)
        seconds[name] = time.perf_counter() - start
        verify(gm, name)
        if has_changed:
            changed.append(name)
            logs.event(
                "passes", logging.DEBUG, "pass", "%(name)s changed the graph, in %(seconds).3f s",
                name=name, seconds=seconds[name], nodes=len(gm.graph.nodes),
            )  # fmt: skip
        if record:
            record.stage(name, gm, seconds[name])
    plan = replace(
        decided,
        seconds=seconds,
        changed=tuple(changed),
        dump_dir=record.directory if record else None,
    )
    if record:
        record.plan(plan)
    trace_graph(plan, as_captured.graph, rewritten.graph)
    gm.recompile()
    return Planned(gm, plan, GraphInputs.of(gm.graph), as_captured, rewritten)
