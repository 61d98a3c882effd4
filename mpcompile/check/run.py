"""Try all private names of torch's that mpcompile takes, and all programs: `check()`."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator

import torch

from ..errors import MPCompileWarning, in_one_line
from ..torch_inside.failures import Failure, Health
from ..torch_inside.health import assumed, missing
from ..torch_inside.private_names import GONE, NAMES, Name, take_all
from .programs import PROGRAMS, Program
from .sides import Side, error_between

__all__ = ["check", "tried"]


def check(progress: Callable[[str], None] = lambda about: None) -> Health:
    """Try everything, whatever an earlier check has found.

    Args:
        progress: called with what is tried next.
    """
    failures: list[Failure] = []
    with assumed(Health()), _quiet():
        progress("private names of torch")
        take_all()
        failures += filter(None, map(_tried_name, NAMES.values()))
        for program in PROGRAMS:
            progress(program.about)
            failures += filter(None, [tried(program)])
    return Health(tuple(failures), tried=len(NAMES) + len(PROGRAMS))


def tried(program: Program) -> Failure | None:
    """What is wrong with a program on this torch."""
    with warnings.catch_warnings(record=True) as caught, torch.random.fork_rng(devices=[]):
        warnings.simplefilter("always")
        try:
            why = _wrong(program)
        except Exception as error:  # whatever another torch may raise
            why = in_one_line(error)
    if why is not None:
        return Failure(program.about, program.part, why)
    said = [str(w.message) for w in caught if issubclass(w.category, MPCompileWarning)]
    said = [text for text in said if not text.startswith(program.may_warn or "\n")]
    return Failure(program.about, None, said[0]) if said else None


def _wrong(program: Program) -> str | None:
    """Run both sides; how their results differ, if they do."""
    sides = Side(None, **program.options), Side(program.dtype, **program.options)
    results = []
    for side in sides:
        torch.compiler.reset()
        torch.manual_seed(0)
        results.append(program.run(side))
    exact, low = results
    error = error_between(low, exact)
    if not error <= program.tolerance:
        return f"differs from FP64 by {error:.2g}; {program.tolerance:g} is what rounding may do"
    return None if sides[1].ran_low() else "nothing ran in the low dtype"


def _tried_name(name: Name) -> Failure | None:
    if name in GONE:
        return missing(name)
    try:
        name.probe()
    except Exception as error:  # it is there, but it isn't what it was
        return Failure(name.path.replace(":", "."), name.part, in_one_line(error))
    return None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch and mpcompile log of programs that overflow on purpose."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
