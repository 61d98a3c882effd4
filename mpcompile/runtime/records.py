"""What is kept of each compiled model and function, and who asks about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import MPCompileError, kind_of
from ..planner.graph_plan import GraphPlan
from ..planner.target import Repairs
from ..scaling import parameters
from ..scaling.loss_scale import LossScale
from ..settings import OPTIONS, Settings
from ..torch_inside.modules import unwrapped
from ..torch_inside.private_names import Part, refuse
from .check_module import called_modules, for_weights


class ModelRecord:
    """What is known about one compiled model or function: `request` are its options as given."""

    def __init__(self, loss_scale: LossScale, request: Mapping[str, Any]) -> None:
        self.loss_scale, self.request = loss_scale, request
        self.plans: list[GraphPlan] = []  # one for each graph compiled so far


records = WeakIdKeyDictionary()


def loss_scale_of(model: Any) -> LossScale:
    """The loss scale of a compiled model or function: `.value`, `.skipped_steps`.

    Raises:
        MPCompileError: it was not compiled with `mpcompile()`.
    """
    return _scale_of(model, _record_of(model))


def _scale_of(model: Any, record: ModelRecord) -> LossScale:
    own = record.loss_scale
    if own.yields and isinstance(model, nn.Module):
        return parameters.given_scale(model.parameters()) or own
    return own


def compiled_plans(model: Any) -> list[GraphPlan]:
    """The plan of each graph compiled so far for this model or function, in order. `left` of a
    graph that was left in FP32 says why.

    Raises:
        MPCompileError: it was not compiled with `mpcompile()`.
    """
    return list(_record_of(model).plans)


def pinned_in(model: Any) -> Repairs:
    """What `repair=True` has pinned in a model while it trained; nothing if it isn't compiled."""
    record = recorded(model)
    return _scale_of(model, record).repairs if record else Repairs()


def recorded(model: Any) -> ModelRecord | None:
    """What is known about a model, or else about the one compiled module inside of it; None if
    `mpcompile()` has compiled none.

    Raises:
        MPCompileError: several modules inside were compiled, each by itself.
    """
    if model in records or not isinstance(model, nn.Module):
        own: ModelRecord | None = records.get(model)
        return own
    if (by_backend := _by_backend(model)) is not None:
        return by_backend
    inside = [(path, records[m]) for path, m in model.named_modules() if m in records]
    if len(inside) > 1:
        names = ", ".join(path for path, _ in inside)
        raise MPCompileError(
            f"{type(model).__name__} holds several modules that mpcompile() compiled ({names}): "
            "ask about one of them"
        )
    return inside[0][1] if inside else None


def _by_backend(module: nn.Module) -> ModelRecord | None:
    """What is known of a module that `torch.compile(backend="mpcompile")` has compiled."""
    found = parameters.plans_of(module.parameters())
    if not found:
        return None
    request = found[-1][0]
    scale = parameters.scale_of(module.parameters()) or Settings.parse(request).loss_scale
    record = ModelRecord(scale or LossScale.default(), request)
    record.plans += [plan for _, plan in found]
    return record


def settings_like(model: Any, options: Mapping[str, Any]) -> Settings:
    """The options that were given, over those that the model was compiled with."""
    record = recorded(model)
    compiled = {
        name: value
        for name, value in (record.request if record else {}).items()
        if name == "loss_scale" or (OPTIONS[name].plans and name != "dump")
    }
    given = {name: value for name, value in options.items() if value is not None}
    return for_weights(Settings.parse({**compiled, **given}), model)


def compiled_in(model: nn.Module) -> list[nn.Module]:
    """The modules in a model that `mpcompile()` has compiled, each by itself."""
    return [module for module in model.modules() if module in records]


def studied(model: Any, who: str) -> nn.Module:
    """The module that `who` ("explain") is asked about: of what torch.compile returned, the module
    in it.

    Raises:
        MPCompileError: it is no module; or on this torch such studies are known to be wrong.
    """
    refuse(Part.EXPLAIN, who, "TORCH_LOGS=mpcompile tells what a training compiles")
    if not isinstance(model, nn.Module):
        raise MPCompileError(
            f"{who}({kind_of(model)}): give an nn.Module. Of a compiled function, "
            "compiled_plans(function) has the plans after its first call"
        )
    inner = unwrapped(model)
    return inner if isinstance(inner, nn.Module) else model


def _record_of(model: Any) -> ModelRecord:
    model = getattr(model, "__func__", model)  # of a method, its function
    if model not in records:
        model = unwrapped(model)  # of what torch.compile() returned, the module in it
    record: ModelRecord | None = None
    if model in records:
        record = records[model]
    elif isinstance(model, nn.Module):
        record = _by_backend(model) or records.get(called_modules(model)[0])
    if record is None:
        hint = ""
        if isinstance(model, nn.Module):
            hint = ". (Of a training step, ask the step: train_step() and mpcompile() return it)"
        elif callable(model):
            hint = ". (mpcompile(function) returns the compiled one: ask that)"
        raise MPCompileError(
            f"this {type(model).__name__} was not compiled by mpcompile(...), or is a copy of one "
            f"that was{hint}"
        )
    return record
