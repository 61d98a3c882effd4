"""Passes over a captured graph, `pass_(gm: fx.GraphModule, config: Config) -> bool`.

`mpcompile/capture/pipeline.py` lists them in order and runs them.
"""
