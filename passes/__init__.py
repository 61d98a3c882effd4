"""The compiler passes: one file, one public function, one job each.

A pass edits its graph in place and says honestly whether it changed it. A deciding pass (classify,
the guards, plan, plan_pads) writes marks and changes no node; a rewriting pass reads marks. No pass
imports another. What a room of passes works on, and who runs them, says its `__init__`.
"""
