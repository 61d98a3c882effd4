"""What mpcompile reads inside torch is as it was read: each release is tried by these first."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from mpcompile.torch_inside.graphs import overload_name, packet_name, schema
from mpcompile.torch_inside.inductor import PRE_FUSION, computes_reads, has_setting
from mpcompile.torch_inside.modules import (
    COMPILED_CALL,
    buffers_of,
    compiled_call,
    hooks_around,
    plain_call,
    set_compiled_call,
)
from mpcompile.torch_inside.names import (
    autocast_is_on,
    autocast_off,
    builder,
    current_node,
    dynamo_config,
    keeps_graph,
    meta_utils,
    running_backward,
)
from mpcompile.torch_inside.optimizers import has_hooks, init_group, is_hooked, without_wrappers
from mpcompile.torch_inside.private_names import GONE
from mpcompile.torch_inside.tensors import (
    base_of,
    call_after_backward,
    function_of,
    holders,
    hooks_on,
    is_enabled,
    sparse_values,
    storage_of,
    version,
)

pytestmark = pytest.mark.inside


def test_nothing_is_gone() -> None:
    assert GONE == []


def parameter() -> torch.Tensor:
    return torch.ones((), requires_grad=True)


def sgd() -> Optimizer:
    return torch.optim.SGD([parameter()])


# -- what is read of one thing ---------------------------------------------------------------------

X, META = torch.zeros(2), torch.empty(2, device="meta")
ADD = torch.ops.aten.add
INDUCTORS = ("joint_custom_post_pass", "post_grad_custom_post_pass", "custom_partitioner_fn",
             "max_autotune_gemm_backends", "cpp_wrapper", PRE_FUSION)  # fmt: skip

READ: dict[str, tuple[Callable[[], Any], Any]] = {
    "autocast": (
        lambda: [is_enabled(torch.autocast("cpu", enabled=e)) for e in (True, False)],
        [True, False],
    ),
    "views": (lambda: [base_of(X[:1]) is X, base_of(X)], [True, None]),
    "memory": (
        lambda: [storage_of(META) == storage_of(y) for y in (META[1:], torch.empty_like(META))],
        [True, False],
    ),
    "buffers": (
        lambda: list(buffers_of(nn.BatchNorm1d(1))),
        ["running_mean", "running_var", "num_batches_tracked"],
    ),
    # Dynamo
    "guards may be skipped": (
        lambda: bool(dynamo_config.skip_tensor_guards_with_matching_dict_tags), True,
    ),
    "gradients are read": (
        lambda: [bool(module.safe_grad) for module in (builder, meta_utils)], [True, True],
    ),
    # Inductor
    "settings": (lambda: [name for name in INDUCTORS if not has_setting(name)], []),
    # operators
    "overloads": (
        lambda: [overload_name(op) for op in (ADD.Tensor, ADD.out, torch.ops.aten.relu.default)],
        ["Tensor", "out", "default"],
    ),
    "packets": (lambda: packet_name(ADD), "aten::add"),
    # optimizers
    "state": (lambda: init_group(sgd()).__module__.partition(".optim.")[0], "torch"),  # type: ignore[union-attr]
    "steps": (
        lambda: [is_hooked(s) for s in (type(sgd()).step, without_wrappers(type(sgd()).step))],
        [True, False],
    ),
    "a step's code": (lambda: without_wrappers(type(sgd()).step).__code__.co_name, "step"),
}  # fmt: skip


@pytest.mark.parametrize("what", READ)
def test_it_is_read(what: str) -> None:
    read, wanted = READ[what]
    assert read() == wanted


# -- what changes, or is made ----------------------------------------------------------------------


def test_turns_off() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        inside = autocast_is_on()
        with autocast_off():
            seen = autocast_is_on()
        after = autocast_is_on()
    assert (inside, seen, after) == (True, False, True)


class Twice(torch.autograd.Function):
    """2 * x, which asks in its backward what the engine tells."""

    told: list[Any]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        call_after_backward(lambda: Twice.told.append("after"))
        Twice.told.append((running_backward() >= 0, current_node() is not None, keeps_graph()))
        return gradients[0] * 2


def test_tells_of_backwards() -> None:
    x = torch.ones((), requires_grad=True)
    with torch.enable_grad():
        y: torch.Tensor = Twice.apply(x)  # type: ignore[no-untyped-call]
    Twice.told = []
    y.backward(retain_graph=True)
    assert function_of(y.grad_fn) is Twice
    assert running_backward() == -1
    assert Twice.told == [(True, True, True), "after"]


def test_counts_writes() -> None:
    x = torch.zeros(2)
    before = version(x)
    x[0].add_(1)
    assert version(x) == before + 1


def test_knows_hooks() -> None:
    x, y, z = (parameter() for _ in range(3))
    x.register_hook(lambda g: g)
    y.register_post_accumulate_grad_hook(lambda p: None)
    hooks = [tuple(map(bool, hooks_on(t))) for t in (x, y, z)]
    assert hooks == [(True, False), (False, True), (False, False)]


def test_runs() -> None:
    module = nn.Identity()
    before = compiled_call(module)
    set_compiled_call(module, lambda x: x + 1)
    assert (before, module(1), plain_call(module)(1)) == (None, 2, 1)
    assert plain_call(nn.Identity)(module, 3) == 3
    assert COMPILED_CALL in vars(module)
    assert COMPILED_CALL not in module.__getstate__()


def test_knows_hooks_modules() -> None:
    module = nn.Identity()
    module.register_forward_pre_hook(lambda *_: None)
    module.register_forward_hook(lambda *_: None)
    module.register_full_backward_pre_hook(lambda *_: None)
    module.register_full_backward_hook(lambda *_: None)
    assert [*map(len, hooks_around(module))] == [1, 1, 1, 1]


def test_counts_holders() -> None:
    x = torch.ones(())
    memory = x.untyped_storage()
    alone = holders(memory)
    view = x.detach()
    product = torch.ones((), requires_grad=True) * view.detach()  # saves what it reads
    assert holders(memory) == alone + 2
    del view, product
    assert holders(memory) == alone


def test_reads_values() -> None:
    places = torch.tensor([[0, 0]])
    with torch.sparse.check_sparse_tensor_invariants():  # else it warns
        twice = torch.sparse_coo_tensor(places, torch.ones(2), (2,))
    assert sparse_values(twice).tolist() == [1.0, 1.0]


def test_computes() -> None:
    from torch._inductor.scheduler import SchedulerNode

    assert computes_reads(SchedulerNode)


def test_tells_results() -> None:
    from torch._inductor.output_code import CompiledFxGraph

    assert {"output_strides", "current_callable"} <= CompiledFxGraph.__annotations__.keys()


def test_declares() -> None:
    declared = schema(torch.ops.aten.add_.Tensor)
    written = [a.name for a in declared.arguments if a.alias_info is not None]
    assert (declared.name, written, declared.is_mutable) == ("aten::add_", ["self"], True)


def test_knows_hooks_of_optimizers() -> None:
    plain, before, after = sgd(), sgd(), sgd()
    before.register_step_pre_hook(lambda *_: None)
    after.register_step_post_hook(lambda *_: None)
    assert [*map(has_hooks, (plain, before, after))] == [False, True, True]
