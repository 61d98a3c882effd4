"""Passes over a traced optimizer step, `pass_(gm: fx.GraphModule, config: StepConfig) -> bool`.

A pass rewrites the graph in place and returns whether it changed anything. The graph has no
outputs: its inputs are named by a `Slot` each, and its effect is its `copy_` nodes. Passes leave
values for later passes in the `StepNotes` of the graph module (`ir.step_notes`). Both types are
described in `mpcompile/ir/step.py`. A pass that the step doesn't need returns False.

`mpcompile/optim/pipeline.py` lists the passes in order and runs them.
"""
