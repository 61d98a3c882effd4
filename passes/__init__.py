"""The compiler passes: one file, one public function, one job each.

Contract: `pass_(gm: fx.GraphModule, config: Config) -> bool` edits the graph in place and says
honestly whether it changed it. A deciding pass (classify, guard_constants, plan) writes marks and
changes no node; a rewriting pass reads marks and decides nothing. No pass imports another; the
order stands in `mpcompile/pipeline.py`.

A pass on AOTAutograd's joint graph, where there are neither marks nor a module of ours, is
`pass_(graph: fx.Graph) -> bool`, with the same promise; those are listed in `mpcompile/joint.py`.
"""
