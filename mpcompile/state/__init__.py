"""What is true of parameters, optimizers and loss scales between the calls of compiled graphs.

parameters.py        one `ParamState` for each parameter, and the count of changes
optimizers.py        one `OptimizerState` for each optimizer of the process
copies.py            the low-precision copies that O2's graphs read
low_gradients.py     how the gradients of such copies are stored
loss_scale.py        `LossScale`: what a user configures, reads and saves; it consists of
live_scale.py        its live numbers, and when they move
overflows.py         the count of backward passes that overflowed
search.py, fit.py    the search for its start
guard.py             who may take a step
hooks.py             torch's step hooks, which ask the guard; `register` says from when on
"""
