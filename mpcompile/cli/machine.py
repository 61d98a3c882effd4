"""What this machine offers, and how fast it is: `mpcompile info` and `mpcompile profile`."""

from __future__ import annotations

import argparse
import math
import os
import platform

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .._version import __version__
from ..devices.registry import capabilities, default_device
from ..errors import MPCompileError
from ..profile import Profile, Sample, store
from ..profile.measure import measure
from ..profile.model import KINDS, flops
from ..torch_inside.version import NEWEST, OLDEST, RANGE, check_torch_version, is_untested
from .common import Commands, Help, known_device, new_file, show

_LOW = {torch.bfloat16: "BF16", torch.float16: "FP16"}
# What changes a compile from outside of the program.
_VARIABLES = ("MPCOMPILE_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCH_LOGS")


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    _add_info(commands)
    _add_profile(commands)


def _add_info(commands: Commands) -> None:
    info = commands.add_parser("info", help="what this machine offers, and the dtype chosen")
    info.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default: auto)")
    info.set_defaults(run=_info)


def _add_profile(commands: Commands) -> None:
    profile = commands.add_parser(
        "profile",
        help="measure how fast this device is in each dtype, for the planner",
        formatter_class=Help,
    )
    profile.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:1")
    profile.add_argument("--seconds", type=_seconds, default=100.0, help="about how long it takes")
    what = profile.add_mutually_exclusive_group()
    what.add_argument(
        "--out",
        type=new_file,
        metavar="PATH",
        help="write there, not to the user's cache directory",
    )
    what.add_argument(
        "--show", action="store_true", help="print the profile in use; measure nothing"
    )
    profile.set_defaults(run=_profile)


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: a number of seconds above 0 is needed")
    return number


def _info(options: argparse.Namespace, console: Console) -> int:
    one = capabilities(known_device(options.device) or default_device())
    supported = True
    try:
        check_torch_version(torch.__version__)
    except MPCompileError:
        supported = False
    within = f"{'' if supported else 'NOT '}in the range {RANGE}"
    newer = ", newer than any tested" if is_untested(torch.__version__) else ""
    tested = " to ".join(".".join(map(str, release)) for release in (OLDEST, NEWEST))
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
            if store.VARIABLE in os.environ:
                where = f"{store.VARIABLE}={os.environ[store.VARIABLE]} holds none: unset it"
                raise MPCompileError(f"there is no profile for {device}: {where}")
            raise MPCompileError(f"there is no profile for {device}: run mpcompile profile")
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
