"""Does mpcompile compute on this machine what was meant? Behind `mpcompile check`.

models.py       small models at sizes that real kernels have, and how each is trained
run.py          trains them with all that is compiled verified: a `Result` of each
"""
