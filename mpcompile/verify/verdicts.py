"""What was found about the graphs of one compile: kept on disk, said, and shown in the plan.

A verdict lies beside Inductor's caches, under all that it depends on: the graph, torch, the C++
compiler, the device, the options. Where every graph of a compile is known to be right, nothing is
verified, and Inductor's caches serve as without us.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import platform
import shutil
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx

from .. import ir, logs
from .._version import __version__
from ..devices.cxx import said
from ..devices.registry import capabilities, is_supported
from ..errors import MPCompileError, warn
from ..stored import replace
from ..torch_inside.inductor import setting, write_program
from ..torch_inside.names import cache_dir
from .case import Case, Cure
from .trial import Found


@dataclass
class Verify:
    """What the user asked for, for one plan's graph.

    Attributes:
        when: True, at the first call of what is compiled; "always", at every one; False, at none.
        strict: raise where something was compiled wrongly.
        found: what is found of all that is compiled of the graph, now and later.
    """

    when: bool | str = True
    strict: bool = False
    found: list[Verdicts] = field(default_factory=list)

    @property
    def always(self) -> bool:
        """Whether every call is verified."""
        return self.when == "always"

    def text(self) -> str:
        """What the plan shows: `"verified: 214 values, at most 0.6 of a rounding off"`."""
        if not self.when:
            return "not verified: verify=False"
        return "; ".join(filter(None, (one.text() for one in self.found)))


@dataclass
class Verdict:
    """What is known of one graph.

    Attributes:
        values: how many were compared and right.
        worst: how far the worst of them is off, in units of what rounding does uncompiled.
        unproven: how many were constant, or a gradient of zeros.
        drawn: how many depend on random numbers that can't be drawn again.
        rest: how many weren't compared, since others of their kind were.
        late: how many weren't compared since it would have taken too long.
        of: how many values there are, where memory was there for some only.
        left: why nothing was compared.
        cure: the name of what put it right.
        wrong: what was wrong, in a few words.
    """

    values: int = 0
    worst: float = 0.0
    unproven: int = 0
    drawn: int = 0
    rest: int = 0
    late: int = 0
    of: int | None = None
    left: str | None = None
    cure: str | None = None
    wrong: str | None = None


@dataclass
class Verdicts:
    """What is known of the graphs of one compile.

    Attributes:
        key: what they depend on, as a hash.
        asked: what the user wants.
        known: the verdict of each graph: "forward", "backward", "graph".
        finished: the graphs that needn't be looked at any more.
    """

    key: str
    asked: Verify
    known: dict[str, Verdict] = field(default_factory=dict)
    expected: set[str] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, key: str, asked: Verify) -> Verdicts:
        """What was found before under this key, if something was."""
        verdicts = cls(key, asked)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            data = json.loads(verdicts._file.read_text(encoding="utf-8"))
            verdicts.known = {name: Verdict(**one) for name, one in data["known"].items()}
            verdicts.expected, verdicts.finished = set(data["expected"]), set(data["known"])
        return verdicts

    @property
    def complete(self) -> bool:
        """Whether every graph is known to be right as Inductor compiles it."""
        cured = any(verdict.cure for verdict in self.known.values())
        known = bool(self.expected) and self.expected <= self.finished
        return known and not cured and not self.asked.always

    def expect(self, name: str) -> None:
        """A graph of this name is compiled now."""
        self.expected.add(name)
        if not (self.known.get(name) or Verdict()).cure:
            self.known.pop(name, None)
        self.finished.discard(name)

    def in_order(self, cures: Iterable[Cure]) -> list[Cure]:
        """Cures, those first that have helped in this compile."""
        helped = {verdict.cure for verdict in self.known.values()}
        return sorted(cures, key=lambda cure: cure.name not in helped)

    def right(self, name: str, found: Found, of: int | None) -> None:
        """A call gave what was meant."""
        before = self.known.get(name, Verdict())
        self.known[name] = Verdict(
            before.values + found.verified, max(before.worst, found.worst),
            len(found.vacuous), max(before.drawn, found.left_out), max(before.rest, found.rest),
            len(found.late), of,
        )  # fmt: skip

    def left(self, name: str, why: str) -> None:
        """A graph isn't verified."""
        self.known[name] = Verdict(left=why)
        logs.event("verify", logging.INFO, "left", "%(graph)s isn't verified: %(why)s",
              graph=name, why=why)  # fmt: skip

    def finish(self, name: str) -> None:
        """A graph needn't be looked at any more: remember it."""
        self.finished.add(name)
        kept = {n: vars(verdict) for n, verdict in self.known.items() if n in self.finished}
        data = {"expected": sorted(self.expected), "known": kept}
        with contextlib.suppress(OSError):
            replace(json.dumps(data), self._file)

    def wrong(
        self,
        case: Case,
        nodes: Sequence[fx.Node],
        off: Sequence[str],
        cure: Cure | None,
        right: int,
    ) -> None:
        """A graph was compiled wrongly: say so once.

        Args:
            case: the graph.
            nodes: whose values are wrong.
            off: how far each is off, in a few words.
            cure: what puts it right.
            right: how many other values are right.

        Raises:
            MPCompileError: strict=True.
        """
        more = f" (and {len(nodes) - 1} other values)" if len(nodes) > 1 else ""
        what = f"{_of(case.name)}{_at(_named(nodes[0]))}{more}: {off[0]}"
        self.known[case.name] = Verdict(values=right, cure=cure.name if cure else None, wrong=what)
        program = self._file.with_suffix(f".{case.name}.py")
        with contextlib.suppress(Exception):  # it is for a report alone
            write_program(program, case.gm, case.fakes)
        names = toolchain(case.patches).names
        text = (
            f"{what}. This is a fault of the compiler's ({names}), not of your program. This "
            f"call uses right values; from now on {cure.about if cure else ''} does. "
            f"To report it: python {program}"
        )
        logs.event("verify", logging.INFO, "wrong", "%(what)s", what=what, cure=cure and cure.name,
              program=str(program))  # fmt: skip
        if self.asked.strict:
            raise MPCompileError(f"strict=True: compiled wrongly: {text}")
        if not _said.is_set():
            _said.set()
            warn(f"mpcompile: compiled wrongly: {text}")

    def text(self) -> str:
        """What is known of each graph."""
        parts = [_text(name, self.known.get(name)) for name in sorted(self.expected)]
        return "; ".join(parts)

    @property
    def _file(self) -> Path:
        return Path(cache_dir()) / "mpcompile" / self.key[:2] / f"{self.key}.json"


_said = threading.Event()  # a fault, since the last call of mpcompile()


def say_again() -> None:
    """Let the next fault be said: what is compiled from now on is another program."""
    _said.clear()


def key_of(gm: fx.GraphModule, inputs: Sequence[Any], patches: Mapping[str, Any] | None) -> str:
    """A hash of all that a verdict about a graph depends on."""
    text = [
        torch.__version__, __version__, str(torch.is_grad_enabled()), str(torch.get_num_threads()),
        repr(sorted((k, _plain(v)) for k, v in (patches or {}).items())), *toolchain(patches).facts,
        *(ir.type_text(x) + str(_layout(x)) for x in inputs), *_lines(gm),
    ]  # fmt: skip
    return hashlib.sha256("\n".join(text).encode()).hexdigest()


def _plain(value: Any) -> str:
    uuid = getattr(value, "uuid", None)
    return repr(uuid()) if callable(uuid) else repr(value)


def _layout(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return None
    return value.stride(), value.device.type, value.requires_grad


def _lines(gm: fx.GraphModule) -> list[str]:
    lines = []
    for name, module in gm.named_modules():
        if isinstance(module, fx.GraphModule):
            lines += [f"{name} {n.op} {n.target} {n.args} {n.kwargs}" for n in module.graph.nodes]
    return lines


def _named(node: fx.Node) -> fx.Node:
    """A node that comes from a line of the program: this, or the nearest that it is computed of."""
    return next(filter(ir.source, ir.reached([node], lambda one: one.all_input_nodes)), node)


def _of(name: str) -> str:
    return {"forward": "a forward", "backward": "a backward"}.get(name, "a graph")


def _at(node: fx.Node) -> str:
    module, line = ir.module_path(node), ir.source(node)
    where = ", ".join(filter(None, (f"module {module}" if module else "", line)))
    return f" at {ir.op_name(node)}" + (f" ({where})" if where else "")


def _text(name: str, verdict: Verdict | None) -> str:
    if verdict is None:
        return f"{name}: not called yet"
    if verdict.left is not None:
        return f"{name}: not verified, {verdict.left}"
    if verdict.wrong is not None:
        return f"{name}: compiled wrongly ({verdict.wrong}); cured by {verdict.cure}"
    counts = {
        "more of the same kinds": verdict.rest,
        "not for time": verdict.late,
        "constant so far": verdict.unproven,
        "by random numbers that can't be drawn again": verdict.drawn,
    }
    more = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    some = f" of {verdict.of}, for memory" if verdict.of is not None else ""
    values = f"verified {verdict.values} values{some}"
    return f"{name}: {values}, at most {verdict.worst:.2g} of a rounding off" + (
        f" ({more})" if more else ""
    )


# -- what compiles here ----------------------------------------------------------------------------


class Toolchain(NamedTuple):
    """The compiler that Inductor's code goes through on this machine, and what its code runs on.

    Attributes:
        names: for people: `"torch 2.13.0, g++ 12.2.0"`.
        facts: what a verdict depends on.
    """

    names: str
    facts: tuple[str, ...]


def toolchain(patches: Mapping[str, Any] | None = None) -> Toolchain:
    """This machine's, with the C++ compiler that Inductor is set to; `patches` go over that."""
    cxx = (patches or {}).get("cpp.cxx", setting("cpp.cxx"))
    cxx = cxx if isinstance(cxx, str) else next(filter(None, reversed(cxx)), "")
    return _toolchain(str(cxx))


@functools.lru_cache(maxsize=8)
def _toolchain(cxx: str) -> Toolchain:
    path = shutil.which(cxx) or cxx
    version = said(path, "--version").partition("\n")[0]
    stamp = ""
    if Path(path).is_file():
        facts = Path(path).resolve().stat()
        stamp = f"{Path(path).resolve()} {facts.st_size} {facts.st_mtime_ns}"
    number = version.rsplit(" ", 1)[-1] if version else "?"
    there = torch.accelerator.current_accelerator(check_available=True)
    devices = [torch.device("cpu"), *([there] if there is not None else [])]
    names = [capabilities(device).name() for device in devices if is_supported(device)]
    facts_ = (version, stamp, platform.machine(), *names)
    return Toolchain(f"torch {torch.__version__}, {Path(path).name} {number}", facts_)
