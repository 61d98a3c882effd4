"""Runs a graph node by node and records its numbers: values, gradients, what was not finite.

`watch.Observer` runs one graph; `record.Record` holds what it saw; `find_fault.find` names the
first node that went wrong. Autograd records the run as that of any other code, so that a graph may
be watched in the place of its compiled form, in the middle of a training step.
"""
