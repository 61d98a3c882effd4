"""The one room that reaches into torch: every private name that mpcompile uses is taken here.

A private name may be gone in the next release, or be there and no longer do what it did. One that
is gone fails no import: what needs it is off, and says so (`private_names.py`). What one does
otherwise is seen where compiled code is verified (`mpcompile/verify`), and by
`tests/torch_inside/test_attributes.py`.

Read in torch 2.14; what differs down to 2.12 is said where it differs.
"""
