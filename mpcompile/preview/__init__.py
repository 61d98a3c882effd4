"""Explains what the compiler does with a model, also for a GPU that this machine does not have."""
