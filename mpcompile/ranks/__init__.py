"""Several processes that train one model: who they are, and how they decide alike.

Everything here reads torch's own engines (DistributedDataParallel, FSDP2, DTensor); nothing
replaces them.
"""
