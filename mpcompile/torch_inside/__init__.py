"""The one room that reaches into torch: every private name that mpcompile uses is taken here.

A private name may be gone in the next release, or be there and no longer do what it did. So each
one is taken by `private`, with what it is for and the part of mpcompile that can't do without it.
A name that is gone costs nothing until it is used: then it raises, by its name, what that part
answers by doing without (`private_names.py`).

Read in torch 2.14; what differs down to 2.12 is said where it differs.
"""
