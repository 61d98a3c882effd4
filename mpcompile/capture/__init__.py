"""Turns Dynamo's graph into the graph that passes rewrite, and runs the passes (`pipeline`).

`capture.capture` is the entry. `replay` is the interpreter that runs Dynamo's graph again under a
tracer, lists what it handles itself, and records the calls that stay as Dynamo wrote them;
`history` keeps what autograd knows of a value. `place` records the grad mode, autocast region and
checkpoints of each node; `provenance` carries over Dynamo's notes about inputs. `rebound` mends
what Dynamo makes of a gradient. `compile_log` writes the dump, torch's trace and the log.
"""
