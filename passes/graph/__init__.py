"""Passes over a captured graph, `pass_(gm: fx.GraphModule, config: Config) -> bool`.

Their order stands in `mpcompile/pipeline.py`.
"""
