"""Make Dynamo trace a function anew.

Torch internals used here were read in torch 2.13 and exist in 2.11.
"""

from __future__ import annotations

from types import CodeType

from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo.symbolic_convert import tls

__all__ = ["reset_code", "traced_code"]


def traced_code() -> CodeType | None:
    """The code that Dynamo is tracing, inside of a backend; None outside of it.

    `reset_code` of it drops all that was compiled of it, so that its next call is traced anew. The
    compiled code may be running while this happens.
    """
    translator = getattr(tls, "current_tx", None)  # a thread that has traced nothing has none
    return None if translator is None else translator.f_code
