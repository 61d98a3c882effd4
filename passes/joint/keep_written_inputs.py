"""Keep a copy of an input that the forward writes, where the backward reads the input as it was.

    forward   cos = cos(x)                   forward   kept = clone(x)
              _ = copy_(x, relu)                       _ = copy_(x, relu)
              return (..., x)          ->              return (..., kept)

    backward  cos = cos(x)                   (as it was: x is what it is handed)

AOTAutograd writes an input that needs no gradient at the end of the forward. Its partitioner
doesn't heed that where it recomputes: it keeps the input itself, and the backward recomputes from
what was written (torch 2.12 and 2.13). A checkpoint that reads a value computed before the write
then gives wrong gradients. The copy costs the memory of the input, only where one would be wrong.

Contract. The two graphs come from AOTAutograd's partitioner; what the forward keeps stands behind
its own results, in the order of the backward's inputs.
"""

from __future__ import annotations

from torch import fx

from mpcompile import ir
from mpcompile.ir import aten


def keep_written_inputs(forward: fx.Graph, backward: fx.Graph, own_results: int) -> bool:
    """Rewrite the forward; the first `own_results` of its results are not for the backward.

    Returns whether anything changed.
    """
    writes: dict[int | None, fx.Node] = {}
    for write in forward.find_nodes(op="call_function", target=aten.copy_.default):
        if (memory := ir.storage_now(write.args[0])) is not None:
            writes.setdefault(memory, write)
    output = forward.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    changed = False
    for index, node in enumerate(results[own_results:], own_results):
        if (write := writes.get(ir.storage_now(node))) is not None:
            with forward.inserting_before(write):
                results[index] = ir.new_call(forward, aten.clone.default, node)
            changed = True
    output.args = (tuple(results),)
    return changed
