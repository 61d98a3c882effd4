"""A training step compiled as one graph: forward, loss, backward, optimizer steps, zero_grad.

train_step.py     what `mpcompile(function)` returns; falls back to pieces
tracing.py        what Dynamo sees of optimizers
whole_backend.py  torch.compile's backend for it
parts.py          Dynamo's graph is cut into forwards, backwards, steps and what is between
forward.py        a forward, rewritten by the passes
gradients.py      a backward, and the form in which its gradients arrive
update.py         an optimizer's step
program.py        the parts, one after the other
one_graph.py      the program becomes one graph, on a CPU several, and a function
call.py           each call: is it still right, what does it take, what has it done
"""
