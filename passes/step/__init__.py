"""Passes over a traced optimizer step, `pass_(gm: fx.GraphModule, config: StepConfig) -> bool`.

Their order stands in `mpcompile/optim/pipeline.py`.
"""
