"""Everything that needs a CUDA device, in pieces: `make gpu OUT=dir`.

A machine with a GPU may be there for half an hour, without a network, in calls of ten minutes. So
each piece is a process with a limit, what it found is on disk as soon as it ends, a second call
goes on where the first one stopped, and the most telling pieces (`PIECES`) come first.

Without the Makefile: `python3 -m benchmarks.gpu --out dir`. Only the standard library is needed to
start: the packages are those that Python has, and what is missing can come from a folder of wheels
(`packages.py`).
"""
