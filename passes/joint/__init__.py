"""Passes over AOTAutograd's joint graph, `pass_(graph: fx.Graph) -> bool`. They use no marks.

They are listed in `mpcompile/emit/joint.py`.
"""
