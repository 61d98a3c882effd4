"""Passes over a traced optimizer step, `pass_(gm: fx.GraphModule, config: StepConfig) -> bool`.

A pass rewrites the graph in place and returns whether it changed anything. The graph has no
outputs: its inputs are named by a `Slot` each, and what it does are its `copy_` nodes. What a pass
finds for later ones it leaves in the `StepNotes` of the graph module (`ir.step_notes`); both are
described in `mpcompile/ir/step.py`. A pass that the step doesn't need returns False.

The order of the passes stands in `mpcompile/optim/pipeline.py`.
"""
