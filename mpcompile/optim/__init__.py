"""The generated optimizer step: a torch.optim step traced, rewritten and compiled.

optimizer.py                  MPOptimizer, what users see; checks.py: what it refuses
trace.py                      the optimizer's own step -> a graph; inputs.py: the graph's inputs,
shadow.py: the object that runs the step, tracing.py: the context it runs in
pipeline.py                   the passes of `passes/step`, in order
pieces.py                     the graph -> pieces; compile_piece.py: a piece -> a function,
program.py: all of them, bound to their tensors
step.py                       one compiled step; key.py: what it is compiled for,
assumptions.py: what must not change, held_settings.py: what
it reads anew each time, results.py: what it reports
first_state.py, eager.py      the state that a first step makes; a step that can't be traced yet
saved_scales.py, watch.py     loss scales in checkpoints; messages about skipped steps
"""

from .optimizer import MPOptimizer

__all__ = ["MPOptimizer"]
