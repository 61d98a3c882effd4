"""`python -m benchmarks list`, `run [NAME ...]` and `check [NAME ...]`.

A benchmark is a module or a folder of this package with a public
`run(settings: Settings) -> Report`. Its name is the module's, its summary the first line of its
docstring. There is no list of them to keep up, only one of what lies beside them (`_BESIDE`). A
benchmark that makes no sense on every device names those it is for: `DEVICES = ("cpu",)`. One that
needs packages which the project doesn't names them: `NEEDS = ("timm",)`; without them it is
skipped. One that is fast also has `rerun(device: torch.device) -> Report`: the same in fewer
rounds, or of fewer rows, which `check` holds against the committed ratios.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import importlib.util
import os
import pkgutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import torch

import benchmarks
from benchmarks.harness.checking import ALIKE, check, committed, ratios_of
from benchmarks.harness.report import RESULTS, SCRATCH, Report, Settings, Table, environment

_BESIDE = (
    "__main__",
    "cuda_parts",
    "digits",
    "emucuda",
    "fakecuda",
    "figures",
    "gpu",
    "gpu_steps",
    "harness",
    "models",
    "step_times",
)
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


def missing(module: ModuleType) -> str:
    """The packages that the benchmark needs and that aren't installed; "" if there are none."""
    needs: tuple[str, ...] = getattr(module, "NEEDS", ())
    return ", ".join(name for name in needs if importlib.util.find_spec(name) is None)


def report_name(name: str, module: ModuleType, device: torch.device) -> str:
    """The stem of its files: the benchmark's name and the device, or the module's `REPORT`."""
    return getattr(module, "REPORT", f"{name}_{device.type}")


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
    # A report is named after its device, and the name of a report will do: gpt_cpu.
    names = [name.removesuffix(f"_{options.device}") for name in options.names]
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; known: {', '.join(known)}")
    fitting = [name for name, module in known.items() if options.device in devices(module)]
    for name in names:
        if name not in fitting:
            parser.error(f"{name} is for {', '.join(devices(known[name]))} only")
    modules = {name: known[name] for name in names or fitting}
    if options.command == "check":
        fast = [name for name in fitting if hasattr(known[name], "rerun")]
        if slow := [name for name in names if name not in fast]:
            parser.error(f"{slow[0]} is not rerun by check, which knows {', '.join(fast)}")
        reruns = {name: known[name].rerun for name in names or fast}
        return _check(reruns, torch.device(options.device))
    return _run(modules, options)


def _run(modules: dict[str, ModuleType], options: argparse.Namespace) -> int:
    settings = Settings(device=torch.device(options.device), quick=options.quick)
    out = options.out or (SCRATCH if options.quick else RESULTS)
    for name, module in modules.items():
        if lacking := missing(module):
            print(f"{name}: skipped, because {lacking} is not installed\n", flush=True)
            continue
        start, record = time.perf_counter(), environment(settings.device)
        report = module.run(settings)
        if options.quick:
            quick = "**A quick run: the numbers mean nothing, nor do the verdicts.**"
            report = dataclasses.replace(report, notes=[quick, *report.notes])
        print(report.markdown(record))
        paths = report.write(out, report_name(name, module, settings.device), record)
        spent = time.perf_counter() - start
        print(f"{name}: {spent:.0f} s; wrote {', '.join(map(str, paths))}\n", flush=True)
    return 0


def _threads_of_committed(name: str, record: Mapping[str, str]) -> str:
    """What to set where results of this machine with fewer or more threads are committed, or ""."""
    for threads in range(1, (os.cpu_count() or 1) + 1):
        if committed(name, {**record, "threads": str(threads)}) is not None:
            return f"; with OMP_NUM_THREADS={threads} there are some"
    return ""


def _check(reruns: Mapping[str, Callable[[torch.device], Report]], device: torch.device) -> int:
    """0: no ratio fell; 1: one did; 2: there is nothing to compare with."""
    record = environment(device)
    codes = []
    for name, rerun in reruns.items():
        before = committed(f"{name}_{device.type}", record)
        if before is None:
            like = ", ".join(f"{key}: {record.get(key)}" for key in ALIKE)
            hint = _threads_of_committed(f"{name}_{device.type}", record)
            print(f"{name}: no committed results of a machine like this one ({like}){hint}")
            continue
        checked = check(functools.partial(rerun, device), ratios_of(before))
        rows = [
            (pair, str(checked.before[pair]), str(now), "FELL" if pair in checked.fallen else "")
            for pair, now in checked.found.items()
        ]
        print(Table(name, ("ratio", "committed", "here", ""), rows).markdown(), flush=True)
        codes.append(int(bool(checked.fallen)))
    return max(codes, default=2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=benchmarks.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="name every benchmark")
    run = commands.add_parser("run", help="run benchmarks and write their reports")
    run.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    run.add_argument("--device", default="cpu", choices=DEVICES)
    run.add_argument("--out", type=Path, help="directory for the reports")
    run.add_argument("--quick", action="store_true", help="smoke test: the numbers mean nothing")
    again = commands.add_parser("check", help="rerun what is fast, against the committed ratios")
    again.add_argument("names", nargs="*", metavar="NAME", help="default: all that can be")
    again.add_argument("--device", default="cpu", choices=DEVICES)
    return parser


if __name__ == "__main__":
    sys.exit(main())
