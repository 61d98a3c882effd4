"""Dynamo's graph becomes the graph that passes rewrite.

`capture.capture` is the entry. `replay` is the interpreter that runs Dynamo's graph again under a
tracer, and says what is kept by hand; `opaque` the calls that stay as Dynamo wrote them, `history`
what autograd knows of a value. `place` records the grad mode, autocast region and checkpoints of
each node, `provenance` carries over what Dynamo noted about inputs.
"""
