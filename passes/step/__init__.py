"""Passes over a traced optimizer step, `pass_(gm: fx.GraphModule, config: StepConfig) -> bool`.

A pass rewrites the graph in place and returns whether it changed anything. The graph has no
outputs: its inputs are named by a `Slot` each (`mpcompile/ir/step_config.py`), and its effect is
its `copy_` nodes. A pass that the step doesn't need returns False.

`mpcompile/optim/updates.py` lists the passes in order and runs them.
"""
