"""Benchmarks: a module or a folder each, all with `run(settings) -> Report`.

`python -m benchmarks list` names them.

    registry   the modules of this package, but for tools    __main__.py
      run      what is measured: models, sizes, how often    gpt.py, first_steps/, papers/ ...
        arms   one model or training under each compiler     harness/ways.py, or their own
        turns  rounds of all arms, seconds a step            harness/timing.py
               or counts: bytes, kernels, gradients          saved_bytes.py, zoo/ ...
               a fresh process where something starts        harness/processes.py
      report   tables, verdicts, every number                harness/report.py
    page       benchmarks/results/NAME_DEVICE.md and .json, which the documents cite; figures.py

A benchmark is one file where it fits into one. Else its models, tasks or tools are modules of its
folder, and `run`, tables and verdicts are in the folder's `__init__.py`.
"""
