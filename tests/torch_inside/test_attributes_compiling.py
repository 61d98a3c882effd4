"""What mpcompile reads of Dynamo, AOTAutograd, Inductor and optimizers is as it was read."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch.optim import Optimizer

from mpcompile.torch_inside import dynamo_names
from mpcompile.torch_inside.aot import aot_autograd, boxed_nop, is_compiled, settings
from mpcompile.torch_inside.autograd import function_of
from mpcompile.torch_inside.dynamo import compile_session, torch_function
from mpcompile.torch_inside.dynamo_names import config, no_recompile_limit, recompile_limit
from mpcompile.torch_inside.graphs import STATIC_INPUT, source_of
from mpcompile.torch_inside.inductor import PRE_FUSION, computes_reads, has_setting
from mpcompile.torch_inside.ops import overload_name, packet_name, schema
from mpcompile.torch_inside.optimizers import (
    has_hooks,
    init_group,
    is_hooked,
    note_step,
    without_wrappers,
)
from mpcompile.torch_inside.private_names import GONE, NAMES, take_all

pytestmark = pytest.mark.inside


def test_nothing_is_gone() -> None:
    take_all()
    assert [name.path for name in GONE] == []


def test_each_attribute_has_a_test() -> None:
    take_all()
    text = "".join(file.read_text() for file in Path(__file__).parent.glob("test_attributes*.py"))
    noted = [path for path, name in NAMES.items() if not name.taken]
    assert noted
    assert [path for path in noted if f'"""{path}"""' not in text] == []


# -- aot.py ----------------------------------------------------------------------------------------


def test_makes_classes() -> None:
    """torch._functorch:_aot_id"""
    saved: list[Any] = []

    def backend(gm: Any, inputs: Any) -> Any:
        return aot_autograd(fw_compiler=boxed_nop, bw_compiler=boxed_nop)(gm, inputs)

    x = torch.ones((), requires_grad=True)
    with torch.enable_grad():
        result = torch.compile(lambda x: x.sin(), backend=backend, dynamic=False)(x)
    function: Any = function_of(result.grad_fn)
    assert is_compiled(function)
    assert not is_compiled(torch.autograd.Function)
    saved.append(result.grad_fn._tensors_no_vc_check)
    facts = function.metadata
    saved.append((function.compiled_bw, facts.bw_donated_idxs, facts.num_symints_saved_for_bw))
    result.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(()).cos())


def test_knows_settings() -> None:
    """torch._functorch.config:enable_autograd_cache"""
    with settings(
        enable_autograd_cache=False,
        force_non_lazy_backward_lowering=True,
        ban_recompute_materialized_backward=False,
    ):
        pass


# -- dynamo.py -------------------------------------------------------------------------------------


def test_hides() -> None:
    """torch._dynamo.variables.torch_function:banned_attrs"""
    assert "grad" in torch_function.banned_attrs


def test_is_said() -> None:
    """torch.compiler:_is_compiling_flag"""
    with compile_session():
        pass


# -- dynamo_names.py -------------------------------------------------------------------------------


def test_limits() -> None:
    """torch._dynamo.config:recompile_limit"""
    before = recompile_limit()
    with no_recompile_limit():
        inside = recompile_limit()
    assert inside == 1000
    assert recompile_limit() == before


def test_may_skip() -> None:
    """torch._dynamo.config:skip_tensor_guards_with_matching_dict_tags"""
    assert config.skip_tensor_guards_with_matching_dict_tags


def test_reads_grad() -> None:
    """torch._dynamo.variables.builder:safe_grad"""
    assert dynamo_names._builder.safe_grad
    assert dynamo_names._meta_utils.safe_grad


# -- graphs.py -------------------------------------------------------------------------------------


def test_notes() -> None:
    """torch._dynamo:_dynamo_source"""
    found: list[tuple[Any, Any]] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        (placeholder,) = gm.graph.find_nodes(op="placeholder")
        found.append((source_of(placeholder), gm._param_name_to_source))
        found.append((placeholder.meta["tensor_dict"][STATIC_INPUT], None))
        return gm.forward

    x = torch.ones(())
    torch._dynamo.mark_static_address(x)
    torch.compile(lambda x: x + 1, backend=backend)(x)
    assert found[0][0] is not None
    assert found[1][0] is not None


# -- inductor.py -----------------------------------------------------------------------------------


def test_computes() -> None:
    """torch._inductor.scheduler:SchedulerNode._compute_attrs"""
    from torch._inductor.scheduler import SchedulerNode

    assert computes_reads(SchedulerNode)


def test_knows_settings_inductor() -> None:
    """torch._inductor.config:joint_custom_post_pass"""
    names = ("joint_custom_post_pass", "post_grad_custom_post_pass", "custom_partitioner_fn",
             "max_autotune_gemm_backends", "cpp_wrapper", PRE_FUSION)  # fmt: skip
    assert all(map(has_setting, names))


def test_tells_results() -> None:
    """torch._inductor.output_code:CompiledFxGraph.output_strides"""
    from torch._inductor.output_code import CompiledFxGraph

    assert {"output_strides", "current_callable"} <= CompiledFxGraph.__annotations__.keys()


# -- ops.py ----------------------------------------------------------------------------------------


def test_declares() -> None:
    """torch._ops:OpOverload._schema"""
    declared = schema(torch.ops.aten.add_.Tensor)
    written = [a.name for a in declared.arguments if a.alias_info is not None]
    assert (declared.name, written, declared.is_mutable) == ("aten::add_", ["self"], True)


def test_names() -> None:
    """torch._ops:OpOverload._overloadname"""
    packet = torch.ops.aten.add
    names = [overload_name(getattr(packet, overload)) for overload in ("Tensor", "out")]
    assert [*names, packet_name(packet)] == ["Tensor", "out", "aten::add"]
    assert overload_name(torch.ops.aten.relu.default) == "default"


# -- optimizers.py ---------------------------------------------------------------------------------


def one() -> Optimizer:
    return torch.optim.SGD([torch.zeros((), requires_grad=True)])


def test_knows_hooks() -> None:
    """torch.optim:Optimizer._optimizer_step_pre_hooks"""
    plain, before, after = one(), one(), one()
    before.register_step_pre_hook(lambda *_: None)
    after.register_step_post_hook(lambda *_: None)
    assert [*map(has_hooks, (plain, before, after))] == [False, True, True]


def test_makes_state() -> None:
    """torch.optim:SGD._init_group"""
    init = init_group(one())
    assert init is not None
    assert init.__module__.startswith("torch.optim.")


def test_is_asked() -> None:
    """torch.optim:Optimizer._opt_called"""

    def warned(stepped: bool) -> bool:
        optimizer = one()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            if stepped:
                note_step(optimizer)
            scheduler.step()
        return any("before `optimizer.step()`" in str(warning.message) for warning in heard)

    assert (warned(False), warned(True)) == (True, False)


def test_is_unwrapped() -> None:
    """torch.optim:Optimizer.step.hooked"""
    step = type(one()).step
    assert is_hooked(step)
    assert not is_hooked(without_wrappers(step))
    assert without_wrappers(step).__code__.co_name == "step"
