"""Benchmarks: a module or a folder each, all with `run(settings) -> Report`.

`python -m benchmarks list` names them. A folder measures or counts in some modules and makes tables
and verdicts of what it found in another, `report.py`.
"""
