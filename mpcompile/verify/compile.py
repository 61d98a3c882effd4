"""Inductor, with what it compiles verified at its first call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from ..torch_inside import aot
from ..torch_inside.inductor import compile_fx
from .first_call import Verifier
from .verdicts import Verdicts, Verify, key_of

__all__ = ["compile_verified"]


def compile_verified(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    patches: dict[str, Any] | None,
    asked: Verify,
) -> Any:
    """Compile a graph as `compile_fx` does.

    Args:
        gm, inputs: as `compile_fx` takes them.
        patches: settings of Inductor's.
        asked: what is to be verified; takes what is found, now and later.

    Returns:
        What Inductor returns.
    """
    if not asked.first:
        return compile_fx(gm, inputs, config_patches=patches)
    verdicts = Verdicts.of(key_of(gm, inputs, patches), asked)
    asked.found.append(verdicts)
    if verdicts.complete:
        return compile_fx(gm, inputs, config_patches=patches)
    verifier = Verifier(verdicts, patches)
    if not any(verdict.cure for verdict in verdicts.known.values()):
        compiled = compile_fx(gm, inputs, inner_compile=verifier.inner, config_patches=patches)
        if verifier.compiles:
            return compiled
    # AOTAutograd's cache holds code that nobody has looked at, or that is known to be wrong.
    with aot.settings(enable_autograd_cache=False):
        return compile_fx(gm, inputs, inner_compile=verifier.inner, config_patches=patches)
