"""The compiler passes: a public function, a job each. A file has those of one subject.

A pass edits its graph in place and returns whether it changed it. A deciding pass (classify, the
guards, leave_unpromised, plan, plan_pads) writes marks and changes no node; a rewriting pass reads
marks. No pass imports another. The `__init__` of each room says what its passes work on, and who
runs them.
"""
