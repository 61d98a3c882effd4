"""The options of `mpcompile()` and of `torch.compile(backend="mpcompile", options=...)`.

Each option is declared once, as a field of `Settings`: its default, its check, its help text. The
accepted keywords, the docstrings of `mpcompile()` and `explain()`, and the flags of the command
line are derived from that. The two functions repeat names and defaults in their signatures, for
editors and type checkers; a test compares these with the declarations.

To add an option: declare it here, with `plans=True` if `explain()` is to take it; add its keyword
to `Options` and to the signature of `mpcompile()` (and of `explain()`), at the same position; read
`settings.<name>` where it matters.
"""

# ruff: noqa: RUF009 (what declares an option returns a dataclass field)

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, get_args

import torch

from . import rules
from .capture import pipeline
from .errors import MPCompileError, did_you_mean
from .lower.emitter import check_inductor
from .ranks.fsdp import check_ranks
from .rules.op_names import op_exists
from .rules.other_words import unknown_option
from .rules.policy import LOW_DTYPES, Level, Policy, parse_dtype, parse_level
from .scaling.loss_scale import LossScale
from .torch_inside.modules import Names
from .torch_inside.private_names import Part, refuse
from .torch_inside.version import NEWEST, check_torch_version, warn_if_untested
from .verify.verdicts import Verify

F = TypeVar("F", bound=Callable[..., Any])

LevelWord = Literal["O0", "O1", "O2", "O3"]
Emits = Literal["inductor", "aot_eager", "eager"]
Pads = Literal["auto", "always", "never"]
Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
EMITS, PADS = get_args(Emits), get_args(Pads)
_OTHER_TORCH = f"install torch {'.'.join(map(str, NEWEST))}, or an mpcompile made for this one"


@dataclass(frozen=True)
class Option:
    """One option of `mpcompile()`.

    Attributes:
        name: its keyword, and the field of `Settings` that holds its parsed value.
        default: as a user would write it.
        parse: (name, what the user wrote) -> the parsed value; raises `MPCompileError`.
        help: what it means, for docstrings and for the command line.
        words: the strings that the command line accepts; empty for flags, paths and objects.
        plans: whether `explain()` takes it as well.
    """

    name: str
    default: Any
    parse: Callable[[str, Any], Any]
    help: str
    words: tuple[str, ...] = ()
    plans: bool = False


def _option(default: Any, parse: Callable[[str, Any], Any], help: str, **more: Any) -> Any:
    """Declare the option that a field of `Settings` holds: see `Option`."""
    return field(metadata={"default": default, "parse": parse, "help": help, **more})


def _choice(default: str, words: tuple[str, ...], help: str, **more: Any) -> Any:
    """Declare an option whose value is one of a few words."""

    def parse(name: str, value: Any) -> str:
        if value not in words:
            hint = did_you_mean(str(value), words)
            raise MPCompileError(f"{name}={value!r}: use one of {', '.join(words)}{hint}")
        return str(value)

    return _option(default, parse, help, words=words, **more)


def _switch(help: str, **more: Any) -> Any:
    """Declare an option that is True or False, by default False."""

    def parse(name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise MPCompileError(f"{name}={value!r}: use True or False")
        return value

    return _option(False, parse, help, **more)


def _policy(name: str, value: Any) -> Policy:
    file = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    policy = value if file is None else Policy.load(file)
    if policy is None:
        return Policy()
    if not isinstance(policy, Policy):
        raise MPCompileError(
            f"{name}={policy!r}: give an mpcompile.Policy(...), or the path of a file with one"
        )
    for key in policy.low | policy.full | policy.keep:
        if not op_exists(key):
            known = [name.removeprefix("aten::") for name in rules.known_ops()]
            hint = did_you_mean(key.removeprefix("aten::"), known)
            raise MPCompileError(f"{file or 'Policy'}: no operator {key!r}{hint}")
    return policy


def _loss_scale(name: str, value: Any) -> LossScale | None:
    """`"dynamic"` -> None (one is made per model), `"none"` or None -> off, a number -> static."""
    if isinstance(value, LossScale):
        return value
    if value is None or value == "none":
        return LossScale.none()
    if value == "dynamic":
        return None
    made = LossScale.grad_scaler() if value == "grad_scaler" else None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        made = LossScale.static(float(value))
    if made is not None:
        made.fp16_only = True
        return made
    hint = ". The graph scales the loss: leave the GradScaler out of the loop, too"
    if not isinstance(value, torch.amp.GradScaler):
        hint = did_you_mean(str(value), ("dynamic", "grad_scaler", "none"))
    raise MPCompileError(
        f"{name}={value!r}: use 'dynamic', 'grad_scaler', 'none', a number, or a LossScale{hint}"
    )


def _verify(name: str, value: Any) -> Verify:
    if value not in (True, False, "always") or not isinstance(value, (bool, str)):
        raise MPCompileError(f"{name}={value!r}: use True, False or 'always'")
    return Verify(value)


def _directory(name: str, value: Any) -> Path | None:
    """The directory of dumps, made if need be, so that a bad path fails now, not at a graph."""
    path = value or os.environ.get("MPCOMPILE_DUMP")
    if not path:
        return None
    if not isinstance(path, (str, os.PathLike)):
        raise MPCompileError(f"{name}={path!r}: give the path of a directory")
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MPCompileError(f"{name}={str(path)!r}: can't be made a directory ({error})") from None
    return Path(path)


def _passes(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Collection):
        raise MPCompileError(f"{name}={value!r}: give a list of names of passes")
    for one in value:
        if one in pipeline.MUST_RUN:
            raise MPCompileError(f"{name}: {one!r} can't be disabled: {pipeline.MUST_RUN[one]}")
        if one not in pipeline.MAY_BE_DISABLED:
            hint = did_you_mean(str(one), [*pipeline.MAY_BE_DISABLED, *pipeline.MUST_RUN])
            known = ", ".join(pipeline.MAY_BE_DISABLED)
            raise MPCompileError(f"{name}: no pass {one!r}{hint}; these can be disabled: {known}")
    return tuple(value)


def _inductor_options(name: str, value: Any) -> Mapping[str, Any] | None:
    if value is not None and not isinstance(value, Mapping):
        raise MPCompileError(f"{name}={value!r}: give a dict of Inductor's options")
    for key in value or {}:
        if key in OPTIONS:
            raise MPCompileError(f"{name}={value!r} are Inductor's; {key}= is an option beside it")
    return value


@dataclass(frozen=True)
class Settings:
    """A checked request: every option, parsed. Made by `Settings.parse`.

    Attributes:
        dtype: torch.float16, torch.bfloat16, or None: the device decides.
        loss_scale: the model's own scale, or None: the backend finds or makes one.
        scale_any_dtype: the user passed a LossScale, so BF16 is scaled too. Not an option.
        names: the names of parameters in the model that is compiled. Not an option.

    The other fields are explained by the help of their options.
    """

    dtype: torch.dtype | None = _option(
        "auto", lambda _, value: parse_dtype(value),
        'torch.float16, torch.bfloat16, or "auto" (half weights\' own; FP16 on CUDA, BF16 on CPU).',
        words=("auto", *LOW_DTYPES), plans=True,
    )  # fmt: skip
    level: Level = _option(
        "O1", lambda _, value: parse_level(value),
        '"O0" FP32; "O1" products and convolutions low, norms, softmax, sums and losses in FP32; '
        '"O2" everything stored low; "O3" all low.',
        words=tuple(level.value for level in Level), plans=True,
    )  # fmt: skip
    policy: Policy = _option(
        None, _policy,
        "your overrides, by operator, module or node: a `Policy`, or the path of a `.toml` or "
        "`.json` file that holds one.",
        plans=True,
    )  # fmt: skip
    loss_scale: LossScale | None = _option(
        "dynamic", _loss_scale,
        '"dynamic", "grad_scaler" (starts as GradScaler does, and skips the steps that don\'t '
        'fit), "none", a number, or a `LossScale`. BF16 needs none and gets none unless you give '
        "a `LossScale`.",
    )  # fmt: skip
    pad: str = _choice(
        "auto", PADS,
        '"auto" pads odd dims of matrix products where that pays on the device, "always" '
        'everywhere, "never" nowhere. Results are the same.',
        plans=True,
    )  # fmt: skip
    emit: str = _choice(
        "inductor", EMITS,
        '"inductor"; "aot_eager" or "eager" run the rewritten graph for debugging.',
    )  # fmt: skip
    dump: Path | None = _option(
        None, _directory,
        "directory for the graph after every pass and the plan; also `MPCOMPILE_DUMP`.",
        plans=True,
    )  # fmt: skip
    fuse_head: bool = _switch(
        "make one operator of a linear layer and the `cross_entropy` that is its only reader; it "
        "never stores the logits: less memory, for one more matrix product.",
        plans=True,
    )
    recompute: bool = _switch(
        "let the backward compute again, rather than store, what one kernel can make of values "
        "stored anyway: the results of norms and activations. Less memory, little time. On a CPU "
        "it is always so in graphs that aren't left in FP32.",
        plans=True,
    )
    regional: bool = _switch(
        "compile equal modules, such as the blocks of a transformer, once for all of them, and the "
        "rest of the model module by module: a short first step. For `mpcompile(module)` alone."
    )
    disable_passes: tuple[str, ...] = _option(
        (), _passes,
        "names of passes over the graph that are not to run, to find out which one breaks a model; "
        f"one of {', '.join(pipeline.MAY_BE_DISABLED)}.",
        words=tuple(pipeline.MAY_BE_DISABLED), plans=True,
    )  # fmt: skip
    repair: bool = _switch(
        "once several steps of a training in a row were skipped, keep the operator that overflows "
        "in FP32, and compile again; 8 times at most. It acts where gradients are scaled, so not "
        "in BF16."
    )
    strict: bool = _switch(
        "raise where a graph can't be rewritten, instead of compiling it in FP32, and where "
        "products run outside of all graphs."
    )
    verify: Verify = _option(
        True, _verify,
        "compare what Inductor compiles, at its first call, with the same graph run operator by "
        'operator; what is wrong is put right and said. False: don\'t; "always": at every call.',
    )  # fmt: skip
    mode: str | None = _option(None, lambda _, value: value, "Inductor's, as in `torch.compile`.")
    options: Mapping[str, Any] | None = _option(
        None, _inductor_options, "Inductor's, as in `torch.compile`; they go over `mode`."
    )
    scale_any_dtype: bool = False
    names: Names = dict

    def verifying(self) -> Verify:
        """How one graph is verified: takes what is found of it."""
        return replace(self.verify, strict=self.strict, found=[])

    @classmethod
    def parse(cls, request: Mapping[str, Any]) -> Settings:
        """Check a request; absent keys take their defaults.

        Raises:
            MPCompileError: an unknown key, level, dtype, operator or choice; options that
                contradict each other; a torch outside the supported range, or one that
                lacks what mpcompile needs.
        """
        check_here()
        for key in request:
            if key not in OPTIONS:
                raise unknown_option(key, OPTIONS)
        written = {name: request.get(name, one.default) for name, one in OPTIONS.items()}
        scale = written["loss_scale"]
        settings = cls(
            **{name: one.parse(name, written[name]) for name, one in OPTIONS.items()},
            scale_any_dtype=isinstance(scale, LossScale) and not scale.fp16_only,
        )
        settings._check_together()
        return settings

    def _check_together(self) -> None:
        """Refuse options that are wrong only in combination."""
        # FP16 parts without a loss scale (a BF16 compile): small gradients would be zero.
        unscaled = self.dtype is not torch.float16 and not self.scale_any_dtype
        for (where, key), dtype in self.policy.low_dtypes.items() if unscaled else ():
            if dtype is torch.float16:
                raise MPCompileError(
                    f"Policy({where}={{{key!r}: 'fp16'}}): FP16 gradients need a loss scale, and "
                    "BF16 has none: compile with dtype=torch.float16, hand over a LossScale, or "
                    "write 'low'"
                )
        asked = {f"mode={self.mode!r}": self.mode is not None, "recompute=True": self.recompute}
        for name, given in asked.items():
            if given and self.emit != "inductor":
                raise MPCompileError(
                    f"{name} is Inductor's; it means nothing to emit={self.emit!r}"
                )
        if self.mode is not None or self.options:
            check_inductor(self.mode, self.options)


def check_here() -> None:
    """Refuse to compile in this process, as it is now.

    Raises:
        MPCompileError: torch is outside the supported range, or lacks what mpcompile needs.
    """
    check_torch_version(torch.__version__)
    warn_if_untested(torch.__version__)
    refuse(Part.COMPILE, "mpcompile", _OTHER_TORCH)
    check_ranks()


# Every option by its name, in the order of `mpcompile()`'s signature.
OPTIONS: Mapping[str, Option] = {
    f.name: Option(f.name, **f.metadata) for f in fields(Settings) if f.metadata
}


class Options(TypedDict, total=False):
    """The options as type checkers see them where a signature has `**options`: first those of
    `mpcompile()`, then those of `torch.compile` that it hands on.
    """

    dtype: torch.dtype | str
    level: Level | LevelWord
    policy: Policy | str | os.PathLike[str] | None
    loss_scale: LossScale | str | float | None
    pad: Pads
    emit: Emits
    dump: str | Path | None
    fuse_head: bool
    recompute: bool
    regional: bool
    disable_passes: Collection[str]
    repair: bool
    strict: bool
    verify: bool | Literal["always"]
    mode: Mode | None
    options: dict[str, Any] | None
    dynamic: bool | None
    fullgraph: bool
    disable: bool


def documented(function: F) -> F:
    """Replace `{options}` in the docstring by the options' help, and `{plans}` by the names of the
    options that `explain()` takes.
    """
    if function.__doc__:  # `python -OO` drops docstrings
        wrapper = textwrap.TextWrapper(100, initial_indent=" " * 8, subsequent_indent=" " * 12)
        entries = "\n".join(wrapper.fill(f"{one.name}: {one.help}") for one in OPTIONS.values())
        names = ", ".join(one.name for one in OPTIONS.values() if one.plans)
        text = function.__doc__.replace("{options}", entries.strip())
        function.__doc__ = text.replace("{plans}", names)
    return function
