"""What a step writes besides the new weights, and when it writes nothing. Rewriting passes.

**`predicate_writes`** makes a step that must be skipped change nothing.

    copy_(param0, new)      ->      kept = where(skip, param0, new); copy_(param0, kept)

All writes of parameters and of the optimizer's state (moments and step counters) are selected this
way. `skip` is a value on the device, so the host doesn't wait for it. In the fused update this
costs no memory traffic: the old value is read in any case.

**`write_copies`** writes the low-precision working copy next to its FP32 master.

    copy_(param0, kept)      ->      copy_(param0, kept)
                                     to = to(kept, f16); copy_(copy0, to)

O2's models read these copies ("FP32 master weights", Micikevicius et al., ICLR 2018, section 3.1).
The new weight is in registers here, so its copy costs a write of two bytes, and the next forward
reads two bytes for each weight instead of casting four. A skipped step rewrites the copy's values.
If a copy is stored padded, the graph gets only the part without padding: the zeros stay zeros.

Where the copy is the parameter itself (`CopyLayout.leads`), it may hold what someone has written
to it since the last step. Its master then follows, element by element, before all else reads it:

    update(param0)      ->      now = where(eq(to(param0, bf16), copy0), param0, to(copy0, f32))
                                update(now)
"""

from __future__ import annotations

import torch
from torch import fx

from mpcompile import ir
from mpcompile.ir import aten
from mpcompile.ir.fakes import like
from mpcompile.ir.step_config import SKIPPED, Slot, StepConfig


def predicate_writes(gm: fx.GraphModule, config: StepConfig) -> bool:
    if not config.checked:
        return False
    graph = gm.graph
    writes = [w for w in ir.writes(graph) if ir.slot_of(w[1]).kind in ("param", "state")]
    skip = ir.scalar_slot(graph, SKIPPED, torch.bool)
    for write, target, value in writes:
        with graph.inserting_before(write):
            if ir.dtype(value) is not ir.dtype(target):
                dtype, why = ir.dtype(target), "as it is stored"
                value = ir.call(graph, aten._to_copy.default, value, why=why, dtype=dtype)
            why = "unchanged where the step is skipped"
            kept = ir.call(graph, aten.where.self, skip, target, value, why=why)
        write.args = (target, kept)
    return bool(writes)


def write_copies(gm: fx.GraphModule, config: StepConfig) -> bool:
    graph = gm.graph
    changed = False
    for write, target, value in ir.writes(graph):
        slot = ir.slot_of(target)
        layout = config.copies[slot.index] if slot.kind == "param" else None
        if layout is None:
            continue
        changed = True
        with ir.fake_mode(graph):
            fake = like(ir.value(target), dtype=layout.dtype, strides=layout.strides)
        copy = ir.add_slot(graph, Slot("copy", slot.index), fake)
        with graph.inserting_before(write.next):
            to, why = aten._to_copy.default, "what O2 reads"
            low = ir.call(graph, to, value, why=why, dtype=layout.dtype)
            ir.call(graph, aten.copy_.default, copy, low, why="the working copy")
        if layout.leads:
            _follow(graph, target, copy, keeps=write)
    return changed


def _follow(graph: fx.Graph, master: fx.Node, copy: fx.Node, *, keeps: fx.Node) -> None:
    """Let all readers of a master but the node `keeps`, which writes it, read it as it is now."""
    readers = [user for user in master.users if user is not keeps]
    why = "what others wrote to the parameter holds"
    with graph.inserting_before(ir.first_call(graph)):
        rounded = ir.call(graph, aten._to_copy.default, master, why=why, dtype=ir.dtype(copy))
        untouched = ir.call(graph, aten.eq.Tensor, rounded, copy, why=why)
        wide = ir.call(graph, aten._to_copy.default, copy, why=why, dtype=ir.dtype(master))
        now = ir.call(graph, aten.where.self, untouched, master, wide, why=why)
    master.replace_all_uses_with(now, readers.__contains__)
    if keeps.args[1] is master:
        keeps.args = (master, now)
