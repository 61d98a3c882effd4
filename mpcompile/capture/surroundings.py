"""What stands around a graph when Dynamo hands it over. All of the thread's state that a capture
depends on is read here, once.

A region of autocast that a graph enters and leaves is read off the graph (`replay.py`). But where
the graph breaks below the function that opened the region, Python enters it, and what runs in it is
compiled function by function: none of these graphs names the region (`devices/autocast.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..devices.autocast import region_around, say_autocast
from ..errors import CannotRewrite
from ..torch_inside.names import FakeTensorMode, TracingContext
from .provenance import source
from .rebound import check_reached


@dataclass(frozen=True)
class Around:
    """What a captured graph depends on besides Dynamo's graph and its inputs.

    Attributes:
        fakes: Dynamo's context: its fake mode, and how it made each input fake.
        grad: whether grad mode is on.
        devices: device types of the graph's inputs, and the one it is planned for; autocast regions
            of others don't matter.
        autocasts: (device type, dtype) of the caller's autocasts.
        region: (enabled, dtype) of the model's own innermost autocast region around it, or None.
        names: id of a parameter -> its dotted name in the model; empty where the model isn't known.
    """

    fakes: TracingContext
    grad: bool
    devices: frozenset[str]
    autocasts: tuple[tuple[str, torch.dtype], ...] = ()
    region: tuple[bool, torch.dtype | None] | None = None
    names: Mapping[int, str] = field(default_factory=dict)

    @property
    def mode(self) -> FakeTensorMode:
        """The mode of the graph's FakeTensors."""
        assert self.fakes.fake_mode is not None
        return self.fakes.fake_mode


def around_now(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    planned_for: str | None = None,
    names: Mapping[int, str] | None = None,
) -> Around:
    """What stands around a graph in this thread now. A caller's autocast around it is said, once.

    Args:
        gm: the graph that Dynamo passed to the backend.
        inputs: its inputs: tensors and SymInts, one for each placeholder.
        planned_for: the device type that the graph is planned for: its autocast regions count even
            if the inputs lie elsewhere; None: the device type of the inputs.
        names: see `Around`.

    Raises:
        CannotRewrite: the graph does not come from Dynamo, or not as we had it traced.
    """
    context = TracingContext.try_get()
    if context is None or context.fake_mode is None:
        raise CannotRewrite("there is no tracing context: the graph does not come from Dynamo")
    sources = map(source, gm.graph.find_nodes(op="placeholder"))
    check_reached(reads_gradients=any(one.endswith(".grad") for one in sources))
    types = {x.device.type for x in inputs if isinstance(x, torch.Tensor)}
    devices = frozenset(types | ({planned_for} if planned_for else set()))
    autocasts = tuple(
        (device, torch.get_autocast_dtype(device))
        for device in sorted(devices)
        if torch.is_autocast_enabled(device)
    )
    region = region_around(devices)
    for _, dtype in autocasts if region is None else ():
        say_autocast(dtype)
    return Around(context, torch.is_grad_enabled(), devices, autocasts, region, names or {})
