"""A trained model -> a program in mixed precision that runs without mpcompile.

    model --torch.export--> FP32 program --passes--> casts in it, low weights --> ExportedProgram

The graph is rewritten as that of an evaluation, by the same rules. What an evaluation reads as kept
copies become the program's own weights. Export then sees plain operators of ATen, and the second
time it checks what the passes made: a program that doesn't fit its inputs is an error here.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from .. import ir
from ..capture.pipeline import Planned
from ..capture.surroundings import Around
from ..compiler.backend import planned_or_why
from ..compiler.plan_graph import Facts
from ..compiler.training import fp32_parameters
from ..errors import MPCompileError, warn
from ..ir import aten
from ..planner.target import place_of, target_of
from ..rules.policy import Level, Policy
from ..runtime.check_module import check_call, check_module, deep_copy, matched_nothing
from ..runtime.records import settings_like, studied
from ..settings import Settings
from ..torch_inside.names import FakeTensor, TracingContext, tracing

# Export's note after each cast of what it found there; the passes may decide otherwise.
_SAYS_DTYPE = aten._assert_tensor_metadata.default
_CHECKS_INPUTS = "call_module"  # torch's check that the inputs are such as were exported
_LOW = "_low"  # after the name of a weight that is read in FP32 as well


def finalize(
    model: nn.Module,
    *inputs: Any,
    dtype: torch.dtype | str | None = None,
    level: Level | str | None = None,
    policy: Policy | str | os.PathLike[str] | None = None,
    dynamic_shapes: Any = None,
    **kwargs: Any,
) -> ExportedProgram:
    """Export what `model(*inputs, **kwargs)` computes in evaluation, in mixed precision.

    The precision of each operator follows the rules that `mpcompile()` follows. Weights that are
    read in the low dtype alone are stored in it; those of norms stay FP32. The program has copies
    of all weights and buffers, and needs no mpcompile: save it by `torch.export.save`, compile it
    by AOTInductor, hand it to `torch.onnx.export`, or call its `module()`.

    Args:
        model: an nn.Module, compiled by `mpcompile()` or not. It stays as it is.
        inputs: arguments of its call, as for `torch.export.export`.
        dtype, level, policy: as for `mpcompile()`. None: what the model was compiled with.
        dynamic_shapes: the sizes that may differ from call to call, as `torch.export.export` takes
            them; the others are fixed.
        **kwargs: the other arguments of the model's call.

    Returns:
        The program. Its results have the dtypes that the model's have.

    Raises:
        MPCompileError: a bad option, or a model that can't be rewritten or copied.
        torch's own errors: a model that `torch.export` can't export.
    """
    model = studied(model, "finalize")
    check_call(model, inputs, kwargs, options_of=finalize)
    given = {"dtype": dtype, "level": level, "policy": policy, "pad": "never"}
    settings = settings_like(model, given)
    if settings.level is Level.O0:
        raise MPCompileError("finalize: level='O0' is FP32, as torch.export.export(model) has it")
    plain = _plain(model)
    check_module(plain, settings)

    def export(module: nn.Module) -> ExportedProgram:
        return torch.export.export(module, inputs, kwargs, dynamic_shapes=dynamic_shapes)

    with torch.no_grad():
        module: Any = export(plain).module()
        _rewrite(module, settings)
        return export(module)


def _plain(model: nn.Module) -> nn.Module:
    """The module in evaluation, as it would be without mpcompile; it shares the weights' memory."""
    memo: dict[int, Any] = {id(b): b for b in model.buffers()}
    memo |= {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters()}
    return deep_copy(model, memo, model, "what is exported is a copy in evaluation").eval()


def _rewrite(module: fx.GraphModule, settings: Settings) -> None:
    """Put the casts into an exported module, and give it weights of its own."""
    lifted, read, inputs = _lifted(module)
    mode = next(x.fake_mode for x in inputs if isinstance(x, FakeTensor))
    target = target_of(place_of(inputs), settings.dtype)
    context = TracingContext(mode)

    def facts() -> Facts:
        around = Around(context, grad=False, devices=frozenset({target.device.type}))
        return Facts(target, around, copied=dict.fromkeys(fp32_parameters(inputs)))

    with tracing(context):
        planned = planned_or_why(lifted, inputs, settings, facts)
    if isinstance(planned, str):
        raise MPCompileError(f"finalize: {type(module).__name__} can't be rewritten: {planned}")
    for complaint in matched_nothing(settings, [planned.plan]):
        warn(f"mpcompile: {complaint}")
    _use_torchs_own(planned.graph)
    _put_back(module, planned, read, target.low)


def _lifted(module: fx.GraphModule) -> tuple[fx.GraphModule, list[str], list[Any]]:
    """The graph of an exported module in the form of Dynamo's, where weights and buffers are the
    first inputs.

    Returns:
        The graph, the names of these weights and buffers, and fakes of all inputs.
    """
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    tensors = {
        node: value
        for node in module.graph.find_nodes(op="get_attr")
        if isinstance(value := ir.attribute(module, node), torch.Tensor)
    }
    inputs: list[Any] = []
    for node in (*tensors, *module.graph.find_nodes(op="placeholder")):
        new[node] = graph.placeholder(node.name)
        new[node].meta = dict(node.meta)
        fake = node.meta["val"]
        is_weight = isinstance(tensors.get(node), nn.Parameter)
        inputs.append(nn.Parameter(fake, fake.requires_grad) if is_weight else fake)
    for node in module.graph.nodes:
        if node not in new and node.op != _CHECKS_INPUTS and node.target is not _SAYS_DTYPE:
            new[node] = graph.node_copy(node, new.__getitem__)
            new[node].meta["example_value"] = node.meta.get("val")
    return fx.GraphModule(module, graph), [str(node.target) for node in tensors], inputs


def _use_torchs_own(gm: fx.GraphModule) -> None:
    """Copy by torch's operator what `keep_compared` puts into memory. Run operator by operator that
    is the same; a compiler may compute across such a copy, as across any.

    Raises:
        MPCompileError: another operator is mpcompile's own.
    """
    for part in gm.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            if ir.role(node) is ir.Role.KEPT:
                node.target = aten.clone.default
            elif ir.is_op(node) and ir.op_name(node).startswith("mpcompile::"):
                raise MPCompileError(
                    f"finalize: {ir.op_name(node)} is an operator of mpcompile's, and the program "
                    "is to run without it"
                )


def _put_back(
    module: fx.GraphModule, planned: Planned, read: Sequence[str], low: torch.dtype
) -> None:
    """Make the rewritten graph that of the exported module, whose arguments and checks stay."""
    graph, rewritten = module.graph, planned.graph.graph
    output, arguments = graph.output_node(), graph.find_nodes(op="placeholder")
    before = [n for n in graph.nodes if n not in (*arguments, output) and n.op != _CHECKS_INPUTS]
    weights = _own_weights(module, planned, read, low)
    new: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(output):
        for k, node in enumerate(rewritten.find_nodes(op="placeholder")):
            is_argument = k not in weights
            new[node] = arguments[k - len(read)] if is_argument else graph.get_attr(weights[k])
        for node in rewritten.find_nodes(op="get_attr"):  # the body of a `cond`, say
            setattr(module, str(node.target), ir.attribute(planned.graph, node))
        output.args = (graph.graph_copy(rewritten, new),)
    for node in reversed(before):
        graph.erase_node(node)
    module.recompile()


def _own_weights(
    module: fx.GraphModule, planned: Planned, read: Sequence[str], low: torch.dtype
) -> dict[int, str]:
    """Give the exported module weights and buffers that are nobody else's, in the dtypes that the
    rewritten graph reads.

    Returns:
        Number of an input of that graph -> the name of the weight or buffer.
    """
    copies, given = planned.inputs.copies, planned.inputs.given
    names = dict(enumerate(read)) | {k: read[of] + _LOW for k, of in copies.items() if k >= given}
    made: dict[tuple[int, torch.dtype], torch.Tensor] = {}  # a tied weight is one tensor

    def own(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if (known := made.get((id(value), dtype))) is None:
            known = value.detach().to(dtype, copy=True)
            if isinstance(value, nn.Parameter):
                known = nn.Parameter(known, requires_grad=False)
            made[id(value), dtype] = known
        return known

    others = [
        (name, value)
        for name, value in module.state_dict(keep_vars=True).items()
        if name not in read
    ]
    values = {k: operator.attrgetter(read[copies.get(k, k)])(module) for k in names}
    for k, name in names.items():
        _set(module, name, own(values[k], low if k in copies else values[k].dtype))
    for name, value in others:  # another name of a tied weight, or what nothing reads
        _set(module, name, own(value, low if (id(value), low) in made else value.dtype))
    return names


def _set(module: nn.Module, name: str, value: torch.Tensor) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(parent), leaf, value)
