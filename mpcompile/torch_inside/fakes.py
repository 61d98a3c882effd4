"""Fake tensors, and the context of a compile in which Dynamo keeps those of its inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .private_names import Part, private

if TYPE_CHECKING:
    from torch._dispatch.python import enable_python_dispatcher
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
    )
else:
    _FAKES = "torch._subclasses.fake_tensor"
    FakeTensor = private(f"{_FAKES}:FakeTensor", "has a shape and no memory", Part.COMPILE)
    FakeTensorMode = private(f"{_FAKES}:FakeTensorMode", "makes tensors fake", Part.COMPILE)
    DataDependentOutputException = private(
        f"{_FAKES}:DataDependentOutputException", "says that a value was asked for", Part.SAY
    )
    DynamicOutputShapeException = private(
        f"{_FAKES}:DynamicOutputShapeException", "says that a size is a value", Part.SAY
    )
    enable_python_dispatcher = private(
        "torch._dispatch.python:enable_python_dispatcher", "keeps sizes symbolic", Part.COMPILE
    )
    TracingContext = private(
        "torch._guards:TracingContext", "holds Dynamo's fakes and its sources", Part.COMPILE
    )
    tracing = private("torch._guards:tracing", "compiles a piece in its own context", Part.COMPILE)

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "TracingContext",
    "enable_python_dispatcher",
    "tracing",
]
