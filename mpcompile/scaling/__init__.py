"""What is known of parameters, optimizers and loss scales between the calls of compiled graphs.

    parameters.py        a `ParamState` for each parameter, an `OptimizerState` for each optimizer
    copies.py            the working copies, in the low dtype, that graphs read
    kept_copies.py       the copies that a model keeps while it evaluates
    low_gradients.py     how the gradients of such copies are stored, and hidden from Dynamo
    loss_scale.py        `LossScale`: what a user configures, reads and saves; it consists of
      live_scale.py        its current values, when they move, and the log of that
      overflows.py         the count of backward passes that overflowed
      scale_search.py      when backward passes search for the start, and what is kept of it
      messages.py          what it says to users; what was not finite before any gradient was
      skipped_steps.py     how many steps were skipped in a row, and what follows
    fit_scale.py         a backward is run again at lower scales, and compared at two
    stays_finite.py      warns of what is no longer finite where no loss scale says so
    uncalled.py          warns of a model that trains without its compiled call
    agreement.py         on what the ranks of DistributedDataParallel and FSDP2 agree
    guard.py             whether an optimizer may take its step
    hooks.py             torch's step hooks, which ask the guard; `register` installs them

A loss scale exists at each level in FP16.
"""
