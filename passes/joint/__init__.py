"""Passes over AOTAutograd's joint graph, `pass_(graph: fx.Graph) -> bool`: no marks, no module.

They are listed in `mpcompile/emit/joint.py`.
"""
