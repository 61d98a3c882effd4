"""What is known of parameters, optimizers and loss scales between the calls of compiled graphs.

    parameters.py        one `ParamState` for each parameter, and the count of changes
    optimizers.py        one `OptimizerState` for each optimizer of the process
    copies.py            the working copies, in the low dtype, that O2's graphs read
    low_gradients.py     how the gradients of such copies are stored
    traced_gradients.py  hides these from what Dynamo traces
    foreign.py           notices somebody else's loss scale or autocast
    loss_scale.py        `LossScale`: what a user configures, reads and saves; it consists of
      live_scale.py        its current values, when they move, and the log of that
      scale_copies.py      copies of a scale on a device, one for each forward
      overflows.py         the count of backward passes that overflowed
      scale_search.py      when backward passes search for the start, and what is kept of it
      messages.py          what it has said to users
      skips_in_a_row.py    how many steps were skipped in a row, and what follows
      repairs.py           what `repair=True` has pinned to FP32
    fit_scale.py         a backward is run again at lower scales, and compared at two
    not_finite.py        what was not finite before any gradient was
    second_backward.py   a compiled backward may run again, and refuses to be differentiated
    agreement.py         on what ranks agree, once
    reductions.py        what DistributedDataParallel averages over ranks
    shardings.py         which groups of FSDP2 its ranks agree for
    async_read.py        numbers on the device that the host reads later
    guard.py             whether an optimizer may take its step
    hooks.py             torch's step hooks, which ask the guard; `register` installs them

The copies are used at O2 only; a loss scale exists at each level in FP16.
"""
