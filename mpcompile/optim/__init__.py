"""The generated optimizer step: a torch.optim step traced, rewritten and compiled.

optimizer.py      MPOptimizer, what users see
checks.py         what it refuses
members.py        the parameters of a step
inputs.py         the inputs of a step's graph
trace.py          the optimizer's own step becomes a graph
shadow.py         the object that runs the step while it is traced
trace_context.py  the context meanwhile
elementwise.py    whether it may run on shards of parameters
pipeline.py       the passes of `passes/step`, in order
pieces.py         the graph is parted into pieces
join_pieces.py    small pieces become one
gathered.py       small gradients are copied to memory that is kept
compile_piece.py  a piece becomes a function
program.py        the functions of all pieces, bound to their tensors
traced_step.py    a step, traced and rewritten, and what it keeps
step.py           one compiled step
compiled_steps.py all of them: which is the next one, and when one is compiled
key.py            what a step is compiled for
absent.py         parameters that have no gradient in some steps
apart.py          whether a step may leave out some parameters
fingerprint.py    whether what something was made from is still so
rests_on.py       what a step rests on
held_settings.py  which settings it reads anew each time
results.py        what it reports
first_state.py    the state that a first step makes
eager.py          a step that can't be traced yet
saved_state.py    the optimizer's state in checkpoints
saved_scales.py   loss scales in checkpoints
watch.py          says that a step was skipped
"""

from .optimizer import MPOptimizer

__all__ = ["MPOptimizer"]
