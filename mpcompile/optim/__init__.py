"""The generated optimizer step: a torch.optim step traced, rewritten and compiled.

optimizer.py      MPOptimizer, what users see
checks.py         what it refuses
rests_on.py       whether what a step was made from is still so: its fingerprints
members.py        the parameters of a step, what it is compiled for, and the inputs of its graph
masters.py        FP32 masters of parameters that are stored low
trace.py          the optimizer's own step becomes a graph
shadow.py         the object that runs the step while it is traced
elementwise.py    whether it may run on shards of parameters
kinds.py          which parameters it does the same to, and their graph
rewrite.py        its graph: nothing is read on the host, a skipped step writes nothing new
updates.py        what it does to the parameters: traced, rewritten, for each kind
traced_step.py    a step as graphs, and what it keeps
decide.py         whether to skip, by what to clip, how the loss scales move
compiled.py       a graph becomes a function
fused.py          torch's own kernel as the update
step.py           one compiled step, bound to its tensors
compiled_steps.py all steps: which is the next one, and when one is compiled
reports.py        what they report
first_state.py    the state that a first step makes
eager.py          a step that can't be traced, or not yet
saved.py          state and loss scales in checkpoints
"""

from .optimizer import MPOptimizer

__all__ = ["MPOptimizer"]
