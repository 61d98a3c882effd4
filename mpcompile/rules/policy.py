"""What a user may request: levels, dtypes and overrides, as frozen data checked at the call.

Nothing here looks at a graph. `Policy` is the user's choice of precision and beats every built-in
rule; `Config` holds all settings of one compilation, made once and passed to every pass.
"""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..devices.capabilities import TensorCores as TensorCores
from ..errors import MPCompileError, did_you_mean
from ..profile.cost_model import Profile
from . import policy_file
from .op_names import op_key
from .other_words import unknown_dtype


class Precision(enum.Enum):
    """The precision class of an operator (elsewhere: the allow, deny and infer lists).

    LOW     runs in the low dtype: a Tensor Core op ("allow", "white").
    FULL    runs in FP32 ("deny", "black").
    FOLLOW  safe in either; its neighbours decide ("infer", "gray").
    KEEP    keeps the dtypes it was captured with; nothing is known about it.
    """

    LOW = "LOW"
    FULL = "FULL"
    FOLLOW = "FOLLOW"
    KEEP = "KEEP"


class Level(enum.Enum):
    """How far the rewrite goes, named as Apex and Paddle name it.

    O0  FP32, untouched.
    O1  Tensor Core ops in the low dtype; the ops of the FP32 list and accumulating paths in FP32.
    O2  all results in the low dtype; norms, softmax, reductions and losses compute in FP32.
    O3  everything in the low dtype, no rules: shows the highest speed, not meant to train well.
    """

    O0 = "O0"
    O1 = "O1"
    O2 = "O2"
    O3 = "O3"


LOW_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
# Other words for them: those of torch, of Lightning and of Hugging Face's command lines.
_DTYPE_WORDS = {
    **LOW_DTYPES,
    **dict.fromkeys(("fp16", "half", "16", "16-mixed"), torch.float16),
    **dict.fromkeys(("bf16", "bf16-mixed"), torch.bfloat16),
}

# The words for a precision in `Policy(modules=..., nodes=...)`. One of a dtype also names that,
# whatever dtype the rest of the graph runs in.
_WORDS = {
    **dict.fromkeys(("fp32", "float32", "full"), Precision.FULL),
    **dict.fromkeys(("low", "fp16", "float16", "bf16", "bfloat16"), Precision.LOW),
    "keep": Precision.KEEP,
}


def parse_level(level: Level | str) -> Level:
    """`"O1"` -> `Level.O1`. Raises `MPCompileError` for anything else than O0..O3."""
    if isinstance(level, Level):
        return level
    names = [member.value for member in Level]
    if str(level).upper() not in names:
        raise MPCompileError(
            f"unknown level {level!r}: use one of {', '.join(names)} (the letter O, then a digit)"
        )
    return Level(level.upper())


def parse_dtype(dtype: torch.dtype | str) -> torch.dtype | None:
    """`"float16"`, `"fp16"` or `torch.float16` -> the dtype; `"auto"` -> None (decided by the
    device).
    """
    word = str(dtype).removeprefix("torch.").lower()
    if word == "auto":
        return None
    if word not in _DTYPE_WORDS:
        raise unknown_dtype(dtype, [*_DTYPE_WORDS, "auto"])
    return _DTYPE_WORDS[word]


# The words that a policy is printed and saved in.
_SPELLED = {
    Precision.FULL: "fp32",
    Precision.LOW: "low",
    Precision.KEEP: "keep",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}


def _precision(word: Precision | str, where: str) -> Precision:
    if isinstance(word, Precision) and word is not Precision.FOLLOW:
        return word
    if isinstance(word, str) and word.lower() in _WORDS:
        return _WORDS[word.lower()]
    raise MPCompileError(
        f"{where}: unknown precision {word!r}; use 'low', 'fp32' or 'keep'"
        f"{did_you_mean(str(word), _WORDS)}"
    )


def _is_table(value: Any) -> bool:
    return value is None or (isinstance(value, Mapping) and all(isinstance(k, str) for k in value))


@dataclass(frozen=True)
class Policy:
    """The user's precision overrides; they beat every built-in rule.

    Precedence: `nodes`, then `modules` (the last matching regex wins), then the op sets.

    Args:
        low, full, keep: operators, as `"softmax"`, `"aten.softmax"`, `"mylib::op"` or the
            `torch.ops` object itself.
        modules: regex -> `"low" | "fp32" | "keep"`, searched in the module's dotted path
            (`"layers.0.mlp.fc1"`), and in those of the modules that it is in: `"^encoder$"` is all
            of the encoder. In `mpcompile(module)`, a regex that matches no module is an error.
            `"bf16"` and `"fp16"` mean low in that dtype, whatever the rest runs in.
        nodes: node name as the dump shows it -> precision.

    Raises:
        MPCompileError: an unknown precision word, a malformed regex, an op in two sets.
    """

    low: frozenset[str] = frozenset()
    full: frozenset[str] = frozenset()
    keep: frozenset[str] = frozenset()
    modules: Mapping[str, Precision] = field(default_factory=dict)
    nodes: Mapping[str, Precision] = field(default_factory=dict)
    # node -> why it is there, where someone else than the user put it there; not compared
    reasons: Mapping[str, str] = field(default_factory=dict, compare=False)
    # ("modules" or "nodes", key) -> the low dtype that the user named
    low_dtypes: Mapping[tuple[str, str], torch.dtype] = field(default_factory=dict)

    def __init__(
        self,
        low: Any = (),
        full: Any = (),
        keep: Any = (),
        modules: Mapping[str, Precision | str] | None = None,
        nodes: Mapping[str, Precision | str] | None = None,
    ) -> None:
        sets = {"low": low, "full": full, "keep": keep}
        for name, ops in sets.items():
            if isinstance(ops, str):
                raise MPCompileError(f"Policy({name}={ops!r}): give a collection, [{ops!r}]")
            object.__setattr__(self, name, frozenset(op_key(op) for op in ops))
        for a, b in (("low", "full"), ("low", "keep"), ("full", "keep")):
            if both := getattr(self, a) & getattr(self, b):
                raise MPCompileError(f"Policy: {sorted(both)} in both {a}= and {b}=")
        for name, table in (("modules", modules), ("nodes", nodes)):
            if not _is_table(table):
                raise MPCompileError(f"Policy({name}={table!r}): give a dict, name -> precision")
        for pattern in modules or {}:
            try:
                re.compile(pattern)
            except (re.error, OverflowError) as error:
                glob = "; it is no glob: '.*' is any text" if pattern.startswith("*") else ""
                raise MPCompileError(
                    f"Policy(modules=...): bad regex {pattern!r}: {error}{glob}"
                ) from None
        for name, table in (("modules", modules), ("nodes", nodes)):
            parsed = {
                key: _precision(word, f"Policy({name}={{{key!r}: ...}})")
                for key, word in (table or {}).items()
            }
            object.__setattr__(self, name, parsed)
        dtypes = {
            (name, key): _DTYPE_WORDS[str(word).lower()]
            for name, table in (("modules", modules), ("nodes", nodes))
            for key, word in (table or {}).items()
            if str(word).lower() in _DTYPE_WORDS
        }
        object.__setattr__(self, "low_dtypes", dtypes)
        object.__setattr__(self, "reasons", {})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Policy:
        """Read a `.toml` or `.json` file, as `save` writes it; every key may be absent.

        Raises:
            MPCompileError: no such file, not TOML or JSON, an unknown key, a wrong type, or what
                `Policy(...)` refuses; the message names the file and the key or line.
        """
        return policy_file.read(path, cls)

    def save(self, path: str | os.PathLike[str], comments: Mapping[str, str] | None = None) -> None:
        """Write a file that `Policy.load` and `mpcompile(model, policy=path)` read.

        Args:
            path: ends in `.toml` or `.json`; a file that is there is replaced.
            comments: key of `modules` or `nodes` -> why it is there: a comment after that line in
                TOML; left out of JSON, which has none. The reasons of pins are comments anyway.

        Raises:
            MPCompileError: another ending, a comment on what is no entry, a file that can't be
                written.
        """
        policy_file.write(path, self._written(), {**self.reasons, **(comments or {})})

    def with_pins(
        self, nodes: Iterable[str] | Mapping[str, str], precision: Precision | str = "fp32"
    ) -> Policy:
        """This policy, with these nodes in `precision`, whatever it said of them before. A dict
        gives the reason of each, which plans show.

        Raises:
            MPCompileError: an unknown precision, or one name instead of a collection.
        """
        if isinstance(nodes, str):
            raise MPCompileError(f"with_pins({nodes!r}): give a collection, [{nodes!r}]")
        written = self._written()
        pinned = Policy(**{**written, "nodes": written["nodes"] | dict.fromkeys(nodes, precision)})
        reasons = {name: why for name, why in self.reasons.items() if name not in set(nodes)}
        given = nodes if isinstance(nodes, Mapping) else {}
        object.__setattr__(pinned, "reasons", {**reasons, **given})
        return pinned

    def _written(self) -> dict[str, Any]:
        """Arguments that make this policy, in the words that a user writes; the sets sorted."""
        tables = {
            name: {
                key: _SPELLED[self.low_dtypes.get((name, key), precision)]
                for key, precision in table.items()
            }
            for name, table in (("modules", self.modules), ("nodes", self.nodes))
        }
        return {name: sorted(getattr(self, name)) for name in ("low", "full", "keep")} | tables

    def __repr__(self) -> str:
        given = [f"{name}={value!r}" for name, value in self._written().items() if value]
        return f"Policy({', '.join(given)})"

    def _compared(self) -> tuple[Any, ...]:
        """The order of `modules` counts, since the last match wins; that of `nodes` does not."""
        unordered = (frozenset(table.items()) for table in (self.nodes, self.low_dtypes))
        return (self.low, self.full, self.keep, tuple(self.modules.items()), *unordered)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Policy) and self._compared() == other._compared()

    def __hash__(self) -> int:
        return hash(self._compared())

    def for_op(self, op: str) -> Precision | None:
        """The user's precision for an operator key such as `"aten::softmax"`, or None."""
        for precision in (Precision.LOW, Precision.FULL, Precision.KEEP):
            if op in getattr(self, precision.name.lower()):
                return precision
        return None

    def for_module(self, path: str) -> tuple[str, Precision] | None:
        """The last regex that matches the path of the module, or of one that it is in, and its
        precision. A regex that says what must not be there (`(?!...)`) is about the module's own
        path: that of the modules around it mostly doesn't have it either.
        """
        paths = (path, *around(path))
        hits = [
            (p, word)
            for p, word in self.modules.items()
            if any(re.search(p, one) for one in (paths[:1] if _NOT.search(p) else paths))
        ]
        return hits[-1] if hits else None


_NOT = re.compile(r"\(\?<?!")


def around(path: str) -> list[str]:
    """The paths of the modules that a module is in: of "blocks.0.fc", "blocks.0" and "blocks"."""
    words = path.split(".")
    return [".".join(words[:count]) for count in range(len(words) - 1, 0, -1)]


@dataclass(frozen=True, kw_only=True)
class Target:
    """One device with one low dtype: all that a plan depends on of a device.

    Attributes:
        device: where the graph's parameters live; plans name it.
        low: the low number format, torch.float16 or torch.bfloat16.
        profile: the times of products there, in the low dtype and in FP32; None: the user has named
            `low`, or none is known.
        promised: whether products that the profile doesn't cover are assumed faster in `low`.
        cores: the sizes that its matrix units require of dimensions.
        has_kernel: `(node) -> bool`: whether the node's operator has a kernel in `low` there.
    """

    device: torch.device
    low: torch.dtype
    profile: Profile | None = None
    promised: bool = True
    cores: TensorCores = TensorCores()
    has_kernel: Callable[[torch.fx.Node], bool] = lambda node: True


@dataclass(frozen=True, kw_only=True)
class Config(Target):
    """The settings of one compilation, as every pass sees them, with the target's facts.

    Attributes:
        level: O1, O2 or O3 (O0 never reaches the passes).
        policy: the user's overrides.
        repaired: nodes that `repair=True` has pinned to FP32 -> the reason.
        scaled: whether gradients are scaled inside the graph.
        pad: "never", "auto" (where it pays) or "always".
        copied: the inputs (by number) whose working copy in `low` may be read instead -> the shape
            that the copy is stored in, or None: not stored yet.
        fuse_head: whether a linear layer and its cross entropy become one operator.
    """

    level: Level
    policy: Policy = Policy()
    repaired: Mapping[str, str] = field(default_factory=dict)
    scaled: bool = False
    pad: str = "never"
    copied: Mapping[int, tuple[int, ...] | None] = field(default_factory=dict)
    fuse_head: bool = False
