"""The commands that need no model of yours: what this machine offers and how fast it is (`info`,
`profile`), whether mpcompile works here (`check`), and a small training (`demo`).
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import platform
from collections.abc import Iterator

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .._version import __version__
from ..api import mpcompile
from ..demo import GPT, GPTConfig
from ..demo.run import DemoSettings
from ..demo.run import run as run_demo
from ..devices.registry import capabilities, default_device, supported
from ..errors import MPCompileError, in_one_line
from ..ir.dtypes import HALF
from ..profile import Profile, Sample, store
from ..profile.cost_model import KINDS, flops
from ..profile.measure import measure
from ..rules.policy import Level
from ..runtime.records import compiled_plans
from ..torch_inside.private_names import GONE, Part, why_off
from ..torch_inside.version import NEWEST, OLDEST, RANGE, is_untested, release
from ..verify.verdicts import toolchain
from .common import Help, add_option, failed, given, known_device, new_file, number, show

_LOW = {torch.bfloat16: "BF16", torch.float16: "FP16"}
_STEPS = 5  # of `check`
# What changes a compile from outside of the program.
_VARIABLES = ("MPCOMPILE_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCH_LOGS")


def _add_info(info: argparse.ArgumentParser) -> None:
    info.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default: auto)")
    info.set_defaults(run=_info)


def _add_profile(profile: argparse.ArgumentParser) -> None:
    profile.formatter_class = Help
    profile.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:1")
    profile.add_argument("--seconds", type=_seconds, default=100.0, help="about how long it takes")
    what = profile.add_mutually_exclusive_group()
    there = "write there, not to the user's cache directory"
    what.add_argument("--out", type=new_file, metavar="PATH", help=there)
    what.add_argument(
        "--show", action="store_true", help="print the profile in use; measure nothing"
    )
    profile.set_defaults(run=_profile)


def _seconds(text: str) -> float:
    return number(text, lambda n: 0 < n < math.inf, "a number of seconds above 0 is needed")


def _info(options: argparse.Namespace, console: Console) -> int:
    one = capabilities(known_device(options.device) or default_device())
    supported = release(torch.__version__) >= OLDEST
    within = f"{'' if supported else 'NOT '}in the range {RANGE}"
    newer = ", newer than any tested" if is_untested(torch.__version__) else ""
    tested = " to ".join(".".join(map(str, version)) for version in (OLDEST, NEWEST))
    rows = {
        "mpcompile": __version__,
        "torch": f"{torch.__version__} ({within}{newer})",
        "tested with torch": tested,
        "python": f"{platform.python_version()} on {platform.platform()}",
        "device": f"{one.device}: {one.name()}",
        "memory": one.memory_text(),
        "low-precision units": one.units(),
        'dtype="auto"': str(one.auto),
        "why": one.why_auto(),
        **one.libraries(),
        **{name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)},
    }
    table = Table(show_header=False, box=None)
    for name, value in rows.items():
        table.add_row(f"[b]{escape(name)}[/b]", escape(value))
    console.print(table)
    return 0 if supported else 1


def _profile(options: argparse.Namespace, console: Console) -> int:
    device = known_device(options.device) or default_device()
    if options.show:
        if (found := store.load(device)) is None:
            file, todo = os.environ.get(store.VARIABLE), "run mpcompile profile"
            if file is not None:
                todo = f"{store.VARIABLE}={file} holds none: unset it"
            raise MPCompileError(f"there is no profile for {device}: {todo}")
        console.print(_profile_table(found))
        return 0
    path = options.out or store.cache_path(device)
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
    show(console, f"written to {path}")
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
    kinds = list(KINDS)
    for kind, dims in sorted(sizes, key=lambda of: (kinds.index(of[0]), flops(*of) or of[1][0])):
        if previous and kind != previous:
            table.add_section()
        previous = kind
        found = sizes[kind, dims]
        full = found.get(torch.float32)
        low = [found.get(dtype) for dtype in _LOW]
        size = ", ".join(f"{n} {d}" for n, d in zip(KINDS[kind].dims, dims, strict=True))
        table.add_row(
            kind,
            size,
            "-" if full is None else f"{full.total * 1e3:.4g}",
            *("-" if not (full and one) else f"{full.total / one.total:.2f}x" for one in low),
        )
    return table


def _add_check(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print the versions, which dtypes the devices have units for, which private names torch "
        "lacks, and how a small GPT trains under Inductor at O1 and O2, with all that is compiled "
        "verified. The exit status is 1 if a name is missing or a training fails."
    )
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:N")
    parser.set_defaults(run=_check)


def _check(options: argparse.Namespace, console: Console) -> int:
    device = known_device(options.device) or default_device()
    for line in (_versions(), *_units(), *_names()):
        show(console, line)
    fails = bool(GONE)
    for level in (Level.O1, Level.O2):
        try:
            with console.status(f"training at {level.value}"):
                said = _trained(level, device)
        except Exception as error:  # whatever a compiler, or another torch, may raise
            fails, said = True, f"FAILED: {in_one_line(error)}"
        show(console, f"{level.value}: {said}")
    return 1 if fails else 0


def _versions() -> str:
    # The C++ compiler is a setting of Inductor's.
    below = f"torch {torch.__version__}" if why_off(Part.INDUCTOR) else toolchain().names
    return f"mpcompile {__version__}, Python {platform.python_version()}, {below}"


def _units() -> Iterator[str]:
    for device in filter(lambda one: one.is_there(), map(capabilities, supported())):
        dtypes = [str(dtype).removeprefix("torch.") for dtype in HALF if device.has_units(dtype)]
        units = device.units() + (f", for {' and '.join(dtypes)}" if dtypes else "")
        yield f"{device.device.type}: {device.name()}; units: {units}"


def _names() -> Iterator[str]:
    yield f"private names of torch that are missing: {len(GONE) or 'none'}"
    for part, why in GONE:
        yield f"  {why}: {part.value}"


def _trained(level: Level, device: torch.device) -> str:
    """Train a small GPT on one batch: its losses, and what is verified.

    Raises:
        MPCompileError: something is compiled wrongly, isn't verified, or doesn't learn.
    """
    torch.manual_seed(0)
    model = GPT(GPTConfig(context=64, layers=1, heads=2)).to(device)
    low = capabilities(device).auto  # also where it doesn't pay
    model = mpcompile(model, dtype=low, level=level, strict=True)
    tokens, targets = torch.randint(256, (2, 4, 64), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(_STEPS):
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    asked = [plan.verification for plan in compiled_plans(model) if plan.verification]
    said = "; ".join(one.text() for one in asked)
    counts = [v.values for one in asked for found in one.found for v in found.known.values()]
    if not counts or 0 in counts:
        raise MPCompileError(f"not all that was compiled is verified: {said or 'nothing'}")
    course = f"loss {losses[0]:.4g} -> {losses[-1]:.4g} in {_STEPS} steps"
    if not losses[-1] < losses[0]:  # also of NaN
        raise MPCompileError(f"it doesn't learn: {course}")
    return f"{course}; {said}"


def _add_demo(demo: argparse.ArgumentParser) -> None:
    demo.formatter_class = Help
    defaults = DemoSettings()
    demo.add_argument("--steps", type=_steps, default=defaults.steps, help="training steps")
    add_option(demo, "dtype", default=defaults.dtype)
    add_option(demo, "level", default=defaults.level, choices=("O1", "O2"))
    add_option(demo, "emit", default=defaults.emit, help="what runs the graphs of both models")
    demo.add_argument("--device", default=defaults.device, help="auto, cpu, cuda or cuda:1")
    demo.add_argument("--seed", type=int, default=defaults.seed, help="of weights and batches")
    add_option(demo, "dump")
    demo.set_defaults(run=_demo)


def _steps(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text}: a whole number from 2 is needed")
    return int(text)


def _demo(options: argparse.Namespace, console: Console) -> int:
    known_device(options.device)
    names = (field.name for field in dataclasses.fields(DemoSettings))
    fault = run_demo(DemoSettings(**given(options, names)), console).fault
    return failed(() if fault is None else (fault,))


FLAGS = {"info": _add_info, "profile": _add_profile, "check": _add_check, "demo": _add_demo}
