"""Write the low-precision working copy next to its FP32 master. A rewriting pass.

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

from torch import fx

from mpcompile import ir
from mpcompile.ir import aten
from mpcompile.ir.fakes import like
from mpcompile.ir.step_config import Slot, StepConfig


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
