"""Passes over AOTAutograd's joint graph, and over a graph as Inductor lowers it,
`pass_(graph: fx.Graph) -> bool`; and over the forward and backward that the partitioner makes of a
joint graph, `pass_(forward, backward, own_results) -> bool`. They use no marks.

They are listed in `mpcompile/lower/joint.py`.
"""
