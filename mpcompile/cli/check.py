"""Does mpcompile work here? `mpcompile check`."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Iterator

import torch
from rich.console import Console

from .._version import __version__
from ..api import mpcompile
from ..demo import GPT, GPTConfig
from ..devices.registry import capabilities, default_device, supported
from ..errors import MPCompileError, in_one_line
from ..ir.dtypes import HALF
from ..records import compiled_plans
from ..torch_inside.private_names import GONE, Part, why_off
from ..verify.verdicts import toolchain
from .common import Commands, known_device, show

__all__ = ["add"]

_STEPS = 5


def add(commands: Commands) -> None:
    """Add the command of this file."""
    parser = commands.add_parser(
        "check",
        help="what works here: versions, units, torch's private names, a verified training",
        description="Print the versions, which dtypes the devices have units for, which private "
        "names torch lacks, and how a small GPT trains under Inductor at O1 and O2, with all that "
        "is compiled verified. The exit status is 1 if a name is missing or a training fails.",
    )
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:N")
    parser.set_defaults(run=_check)


def _check(options: argparse.Namespace, console: Console) -> int:
    device = known_device(options.device) or default_device()
    for line in (_versions(), *_units(), *_names()):
        show(console, line)
    failed = bool(GONE)
    for level in ("O1", "O2"):
        try:
            with console.status(f"training at {level}"):
                said = _trained(level, device)
        except Exception as error:  # whatever a compiler, or another torch, may raise
            failed, said = True, f"FAILED: {in_one_line(error)}"
        show(console, f"{level}: {said}")
    return 1 if failed else 0


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


def _trained(level: str, device: torch.device) -> str:
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
