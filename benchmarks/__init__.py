"""Benchmarks: one file each, all with `run(settings) -> Report`. `python -m benchmarks list`."""
