"""Passes over AOTAutograd's joint graph, `pass_(graph: fx.Graph) -> bool`, and over the forward and
backward that its partitioner makes of it, `pass_(forward, backward, own_results) -> bool`. They use
no marks.

They are listed in `mpcompile/emit/joint.py`.
"""
