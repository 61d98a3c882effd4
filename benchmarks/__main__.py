"""`python -m benchmarks list` and `python -m benchmarks run [NAME ...]`.

A benchmark is a module or a folder of this package with a public
`run(settings: Settings) -> Report`. Its name is the module's, its summary the first line of its
docstring. There is no list of them to keep up, only one of what lies beside them (`_BESIDE`). A
benchmark that makes no sense on every device names those it is for: `DEVICES = ("cpu",)`.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import pkgutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

import benchmarks

from .harness.report import RESULTS, SCRATCH, Settings

_BESIDE = ("__main__", "digits", "fakecuda", "gpu", "gpu_steps", "harness", "models", "step_times")
"""What lies beside the benchmarks: tools that they share, and the run of everything on a GPU."""
DEVICES = ("cpu", "cuda")


def registry() -> dict[str, ModuleType]:
    """Every benchmark: name -> module."""
    names = sorted(module.name for module in pkgutil.iter_modules(benchmarks.__path__))
    return {n: importlib.import_module(f"benchmarks.{n}") for n in names if n not in _BESIDE}


def summary(module: ModuleType) -> str:
    return (module.__doc__ or "").strip().splitlines()[0]


def devices(module: ModuleType) -> tuple[str, ...]:
    """The types of device that the benchmark is for."""
    return getattr(module, "DEVICES", DEVICES)


def main(arguments: Sequence[str] | None = None) -> int:
    known = registry()
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command == "list":
        width = max(map(len, known))
        for name, module in known.items():
            only = "" if devices(module) == DEVICES else f" ({', '.join(devices(module))} only)"
            print(f"{name:<{width}}  {summary(module)}{only}")
        return 0
    settings = Settings(device=torch.device(options.device), quick=options.quick)
    # A report is named after its device, and the name of a report will do: gpt_cpu.
    names = [name.removesuffix(f"_{options.device}") for name in options.names]
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; known: {', '.join(known)}")
    fitting = [name for name, module in known.items() if options.device in devices(module)]
    for name in names:
        if name not in fitting:
            parser.error(f"{name} is for {', '.join(devices(known[name]))} only")
    out = options.out or (SCRATCH if options.quick else RESULTS)
    for name in names or fitting:
        start = time.perf_counter()
        report = known[name].run(settings)
        if options.quick:
            quick = "**A quick run: the numbers mean nothing, nor do the verdicts.**"
            report = dataclasses.replace(report, notes=[quick, *report.notes])
        print(report.markdown())
        paths = report.write(out)
        spent = time.perf_counter() - start
        print(f"{name}: {spent:.0f} s; wrote {', '.join(map(str, paths))}\n", flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=benchmarks.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="name every benchmark")
    run = commands.add_parser("run", help="run benchmarks and write their reports")
    run.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    run.add_argument("--device", default="cpu", choices=DEVICES)
    run.add_argument("--out", type=Path, help="directory for the reports")
    run.add_argument("--quick", action="store_true", help="smoke test: the numbers mean nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())
