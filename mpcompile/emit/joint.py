"""The passes over AOTAutograd's joint graph, and how Inductor is told to run them.

Inductor runs them as its `joint_custom_post_pass`: on the joint graph of forward and backward,
after its own passes on it, so GEMMs are already padded and chains of casts merged. Their source is
part of the key of Inductor's caches. No global setting is changed.

Torch internals used here were read in torch 2.13 and exist in 2.11.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import fx
from torch._inductor import config as inductor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from ..devices.registry import capabilities
from ..passes.joint.widen_weight_gradients import widen_weight_gradients
from ..rules.policy import Config, Level

JointPass = Callable[[fx.Graph], bool]

OPTION = "joint_custom_post_pass"
# The effect of a pass depends on its own file and on the modules it calls in these rooms.
_ASKED = tuple(
    str(file)
    for room in ("devices", "ir")
    for file in sorted((Path(__file__).parents[1] / room).glob("*.py"))
)


def joint_passes(config: Config) -> tuple[JointPass, ...]:
    """The passes for the joint graph of a graph compiled under `config`, in their order.

    There are none from O2 on: there gradients are stored in the low dtype.
    """
    possible = config.level is Level.O1 and capabilities(config.device).products_leave_in_fp32()
    return (widen_weight_gradients,) if possible else ()


def with_joint_passes(
    options: Mapping[str, Any] | None, passes: Sequence[JointPass]
) -> dict[str, Any] | None:
    """Inductor's options with `passes` added, behind the user's own passes if there are any.

    `options` is as torch.compile takes it. Nothing is added for code that can't call `mm` with an
    FP32 output: C++ wrappers, and GEMM backends without ATen.
    """
    given = {key.replace("-", "_"): value for key, value in (options or {}).items()}

    def setting(name: str) -> Any:
        return given.get(name, getattr(inductor, name))

    backends = str(setting("max_autotune_gemm_backends")).upper()
    if passes and not setting("cpp_wrapper") and "ATEN" in backends:
        theirs = setting(OPTION) or ()
        theirs = theirs if isinstance(theirs, (list, tuple)) else (theirs,)
        given[OPTION] = InOrder((*theirs, *map(Ours, passes)))
    return given or None


class Ours(CustomGraphPass):
    """One of mpcompile's passes; caches identify it by its source."""

    def __init__(self, pass_: JointPass) -> None:
        self.pass_ = pass_

    def __call__(self, graph: fx.Graph) -> None:
        """Run the pass."""
        self.pass_(graph)

    def uuid(self) -> bytes:
        """A hash of the files that the effect of the pass depends on."""
        return get_hash_for_files((inspect.getfile(self.pass_), *_ASKED))


class InOrder(CustomGraphPass):
    """Several passes as one (torch 2.11 takes no list)."""

    def __init__(self, passes: Sequence[Callable[[fx.Graph], object]]) -> None:
        self.passes = passes

    def __call__(self, graph: fx.Graph) -> None:
        """Run each pass."""
        for pass_ in self.passes:
            pass_(graph)

    def uuid(self) -> tuple[Any, ...] | None:
        """The uuids of all passes; None ("don't cache") if one of them has none."""
        uuids = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.passes]
        return tuple(uuids) if all(uuids) else None
