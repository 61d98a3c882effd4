"""The ``mpcompile`` command: ``mpcompile info``, ``demo``, ``profile``, ``plan`` and ``bisect``.

Exit status: 0 done, 1 torch is outside the supported range, 2 a request that cannot be met.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ._version import __version__
from .debug.bisect import TOLERANCE, bisect, within
from .demo.run import DemoSettings
from .demo.run import run as run_demo
from .devices.gpus import GPUS, gpu
from .devices.info import device_facts
from .devices.registry import capabilities, default_device
from .errors import MPCompileError
from .preview.explain import plan_call
from .preview.factory import CONTRACT, made_by
from .profile import Profile, Sample, store
from .profile.measure import measure
from .profile.model import KINDS, flops
from .settings import NEWEST, OLDEST, OPTIONS, check_torch_version

__all__ = ["main"]

_LOW = {torch.bfloat16: "BF16", torch.float16: "FP16"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (default: `sys.argv`) and return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options, Console())
    except MPCompileError as error:
        Console(stderr=True).print(f"[red]mpcompile:[/red] {escape(str(error))}")
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mpcompile", description="A mixed-precision training compiler for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"mpcompile {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (_add_info, _add_demo, _add_profile, _add_plan, _add_bisect):
        add(commands)
    return parser


if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def _add_option(parser: argparse.ArgumentParser, name: str, **own: Any) -> None:
    """Add the flag of one of `mpcompile()`'s options; `own` replaces parts of its declaration."""
    option = OPTIONS[name]
    how: dict[str, Any] = {"help": option.help, "default": option.default}
    if isinstance(option.default, bool):
        how["action"] = "store_true"
    elif isinstance(option.default, tuple):
        how |= {"nargs": "+", "choices": option.words, "metavar": "NAME"}
    elif option.words:
        how["choices"] = option.words
    else:
        how |= {"type": Path, "metavar": "DIR"}
    parser.add_argument(f"--{name.replace('_', '-')}", **{**how, **own})


def _add_info(commands: Commands) -> None:
    info = commands.add_parser("info", help="what this machine offers, and the dtype chosen")
    info.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default: auto)")
    info.set_defaults(run=_info)


def _add_demo(commands: Commands) -> None:
    demo = commands.add_parser(
        "demo",
        help="train a small GPT in FP32 and in mixed precision, side by side",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    defaults = DemoSettings()
    demo.add_argument("--steps", type=_steps, default=defaults.steps, help="training steps")
    _add_option(demo, "dtype", default=defaults.dtype)
    _add_option(demo, "level", default=defaults.level, choices=("O1", "O2"))
    _add_option(demo, "emit", default=defaults.emit, help="what runs the graphs of both models")
    demo.add_argument("--device", default=defaults.device, help="auto, cpu, cuda or cuda:1")
    demo.add_argument("--seed", type=int, default=defaults.seed, help="of weights and batches")
    _add_option(demo, "dump", default=defaults.dump)
    demo.set_defaults(run=_demo)


def _add_profile(commands: Commands) -> None:
    profile = commands.add_parser(
        "profile",
        help="measure how fast this device is in each dtype, for the planner",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    profile.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:1")
    profile.add_argument("--seconds", type=_seconds, default=100.0, help="about how long it takes")
    what = profile.add_mutually_exclusive_group()
    what.add_argument(
        "--out", type=Path, metavar="PATH", help="write there, not to the user's cache directory"
    )
    what.add_argument(
        "--show", action="store_true", help="print the profile in use; measure nothing"
    )
    profile.set_defaults(run=_profile)


_PLAN_OPTIONS = tuple(one.name for one in OPTIONS.values() if one.plans)
_POLICY = {
    "metavar": "FILE",
    "help": "your overrides, by operator, module or node: a .toml or .json file",
}


def _add_plan(commands: Commands) -> None:
    plan = commands.add_parser(
        "plan",
        help="what would be done with your model on a GPU, without one",
        description="Print what mpcompile would do with a model on a GPU that this machine need "
        "not have: the precision of each operator, the Tensor Core share of the FLOPs, sizes worth "
        f"changing, and the bytes saved for the backward. Nothing is trained. {CONTRACT}.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    plan.add_argument("factory", metavar="pkg.module:factory", help="makes the model")
    plan.add_argument("--device", default="h100", help=f"one of {', '.join(GPUS)}")
    # at O0 there is nothing to plan
    own: dict[str, Any] = {"level": {"choices": ("O1", "O2", "O3")}, "policy": _POLICY}
    for name in _PLAN_OPTIONS:
        _add_option(plan, name, **own.get(name, {}))
    plan.add_argument(
        "--mp-optimizer", action="store_true", help="an MPOptimizer holds the parameters"
    )
    plan.add_argument("--json", action="store_true", help="print JSON")
    plan.set_defaults(run=_plan)


_BISECT_OPTIONS = ("dtype", "level", "policy", "pad", "emit", "fuse_head", "recompute")


def _add_bisect(commands: Commands) -> None:
    search = commands.add_parser(
        "bisect",
        help="find the decision that breaks your model",
        description="Run a model in FP32 and compiled, here; where the loss or a gradient is not "
        "finite, or far from FP32's, find the pass or the operator in low precision that makes it "
        f"so, by compiling again and again without one. {CONTRACT}.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    search.add_argument("factory", metavar="pkg.module:factory", help="makes the model")
    own = {"emit": {"default": "eager"}, "policy": _POLICY}
    for name in _BISECT_OPTIONS:
        _add_option(search, name, **own.get(name, {}))
    search.add_argument(
        "--tolerance", type=float, default=TOLERANCE, help="relative error that is no breakage"
    )
    search.set_defaults(run=_bisect)


def _bisect(options: argparse.Namespace, console: Console) -> int:
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    model, args, kwargs = made_by(options.factory)
    found = bisect(
        model,
        args,
        kwargs,
        options={name: getattr(options, name) for name in _BISECT_OPTIONS},
        agrees=within(options.tolerance),
    )
    text = "nothing breaks: loss and gradients are near FP32's" if found is None else str(found)
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    return 0


def _steps(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text}: a whole number from 2 is needed")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: a number of seconds above 0 is needed")
    return seconds


def _demo(options: argparse.Namespace, console: Console) -> int:
    _known_device(options.device)
    settings = DemoSettings(
        steps=options.steps,
        dtype=options.dtype,
        level=options.level,
        emit=options.emit,
        device=options.device,
        seed=options.seed,
        dump=options.dump,
    )
    run_demo(settings, console)
    return 0


def _info(options: argparse.Namespace, console: Console) -> int:
    facts = device_facts(_known_device(options.device))
    wanted = f">={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1]}"
    supported = True
    try:
        check_torch_version(torch.__version__)
    except MPCompileError:
        supported = False
    rows = {
        "mpcompile": __version__,
        "torch": f"{torch.__version__} ({'' if supported else 'NOT '}in the range {wanted})",
        "device": f"{facts.device}: {facts.name}",
        "memory": facts.memory,
        "low-precision units": facts.matrix_units,
        'dtype="auto"': str(facts.dtype),
        "why": facts.reason,
        **facts.libraries,
    }
    table = Table(show_header=False, box=None)
    for name, value in rows.items():
        table.add_row(f"[b]{escape(name)}[/b]", escape(value))
    console.print(table)
    return 0 if supported else 1


def _profile(options: argparse.Namespace, console: Console) -> int:
    device = _known_device(options.device) or default_device()
    if options.show:
        if (found := store.load(device)) is None:
            if store.VARIABLE in os.environ:
                where = f"{store.VARIABLE}={os.environ[store.VARIABLE]} holds none: unset it"
                raise MPCompileError(f"there is no profile for {device}: {where}")
            raise MPCompileError(f"there is no profile for {device}: run mpcompile profile")
        console.print(_profile_table(found))
        return 0
    path = options.out or store.cache_path(device)
    if path.is_dir():  # check before the minutes of measuring
        raise MPCompileError(f"--out {path} is a directory: name a file")
    with console.status("measuring") as status:
        profile = measure(
            device,
            seconds=options.seconds,
            progress=lambda point, done, of: status.update(
                f"{done} of {of}: {point.kind} {' x '.join(map(str, point.dims))}"
            ),
        )
    store.write(profile, path)
    console.print(_profile_table(profile))
    console.print(f"written to {path}", markup=False, soft_wrap=True)
    return 0


def _plan(options: argparse.Namespace, console: Console) -> int:
    gpu(options.device)  # check before the factory runs
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    model, args, kwargs = made_by(options.factory)
    found = plan_call(
        model,
        args,
        kwargs,
        device=options.device,
        mp_optimizer=options.mp_optimizer,
        options={name: getattr(options, name) for name in _PLAN_OPTIONS},
    )
    text = json.dumps(found.to_dict(), indent=1) if options.json else str(found)
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    return 0


def _profile_table(profile: Profile) -> Table:
    """One row for each size, small ones first; "1.50x" is FP32's time over the low dtype's."""
    threads = f", threads: {profile.threads}" if profile.threads else ""
    about = f"{profile.device}{threads}, torch {profile.torch_version or 'any'}, {profile.origin}"
    table = Table(title=escape(about), caption="forward and backward; ratios: FP32 is 1x")
    table.add_column("kind")
    for name in ("size", "FP32 ms", *_LOW.values()):
        table.add_column(name, justify="right")
    sizes: dict[tuple[str, tuple[int, ...]], dict[torch.dtype, Sample]] = {}
    for sample in profile.samples:
        sizes.setdefault((sample.kind, sample.dims), {})[sample.dtype] = sample
    previous = ""
    for kind, dims in sorted(sizes, key=_order):
        if previous and kind != previous:
            table.add_section()
        previous = kind
        found = sizes[kind, dims]
        full = found.get(torch.float32)
        size = ", ".join(f"{n} {d}" for n, d in zip(KINDS[kind].dims, dims, strict=True))
        table.add_row(
            kind,
            size,
            "-" if full is None else f"{full.total * 1e3:.4g}",
            *(_gain(full, found.get(dtype)) for dtype in _LOW),
        )
    return table


def _order(size: tuple[str, tuple[int, ...]]) -> tuple[int, float]:
    kind, dims = size
    return list(KINDS).index(kind), flops(kind, dims) or dims[0]


def _gain(full: Sample | None, low: Sample | None) -> str:
    if full is None or low is None:
        return "-"
    return f"{full.total / low.total:.2f}x"


def _known_device(name: str) -> torch.device | None:
    """Return the device asked for; None for ``"auto"``."""
    if name == "auto":
        return None
    try:
        device = torch.device(name)
    except RuntimeError:
        raise MPCompileError(f"unknown device {name!r}: use auto, cpu, cuda or cuda:N") from None
    if not (asked := capabilities(device)).is_there():
        raise MPCompileError(
            f"device {name!r} is not there: torch sees {asked.count()} {device.type.upper()} "
            f"devices; use --device cpu, or install a {device.type.upper()} build of torch"
        )
    return device
