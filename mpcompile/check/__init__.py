"""Does mpcompile work with this torch? Behind `mpcompile check`.

programs.py     tiny trainings, as data: what each is about, and what is off if it is wrong
sides.py        one program run twice: compiled in a low dtype, and as plain torch in FP64
models.py       what is trained
steps.py        how it is trained
studies.py      what is said about a model, or repaired in it
run.py          tries all private names of torch's and all programs: a `Health`
"""
