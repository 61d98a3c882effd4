"""Private attributes of torch's tensors, modules and engines do what mpcompile reads them for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mpcompile.torch_inside.amp import autocast_is_on, autocast_off, is_enabled
from mpcompile.torch_inside.autograd import (
    base_of,
    call_after_backward,
    current_node,
    function_of,
    hooks_on,
    keeps_graph,
    running_backward,
    version,
)
from mpcompile.torch_inside.distributed import (
    FSDP_MARK,
    LOCAL,
    FSDPState,
    active_ddp,
    engine_of,
    engine_states,
    groups_of,
    is_joined,
    is_reducing,
    modules_of,
    overlaps_backward,
    parameters_of,
    reduces_in_python,
    whole_of,
)
from mpcompile.torch_inside.modules import (
    COMPILED_CALL,
    buffers_of,
    compiled_call,
    hooks_around,
    plain_call,
    set_compiled_call,
)
from mpcompile.torch_inside.tensors import holders, sparse_values, storage_of

pytestmark = pytest.mark.inside


# -- amp.py ----------------------------------------------------------------------------------------


def test_tells() -> None:
    """torch:autocast._enabled"""
    kinds = [torch.autocast("cpu", torch.bfloat16, enabled=enabled) for enabled in (True, False)]
    assert [*map(is_enabled, kinds)] == [True, False]


def test_turns_off() -> None:
    """torch._C:_DisableAutocast()"""
    with torch.autocast("cpu", torch.bfloat16):
        inside = autocast_is_on()
        with autocast_off():
            seen = autocast_is_on()
        after = autocast_is_on()
    assert (inside, seen, after) == (True, False, True)


# -- autograd.py -----------------------------------------------------------------------------------


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
    """torch.autograd:Variable._execution_engine"""
    x = torch.ones((), requires_grad=True)
    with torch.enable_grad():
        y: torch.Tensor = Twice.apply(x)  # type: ignore[no-untyped-call]
    Twice.told = []
    y.backward(retain_graph=True)
    assert function_of(y.grad_fn) is Twice
    assert running_backward() == -1
    assert Twice.told == [(True, True, True), "after"]


def test_counts_writes() -> None:
    """torch:Tensor._version"""
    x = torch.zeros(2)
    before = version(x)
    x[0].add_(1)
    assert version(x) == before + 1


def test_knows_hooks() -> None:
    """torch:Tensor._post_accumulate_grad_hooks"""
    x, y, z = (torch.ones((), requires_grad=True) for _ in range(3))
    x.register_hook(lambda g: g)
    y.register_post_accumulate_grad_hook(lambda p: None)
    assert [[*map(bool, hooks_on(t))] for t in (x, y, z)] == [
        [True, False],
        [False, True],
        [False, False],
    ]


def test_knows_views() -> None:
    """torch:Tensor._base"""
    x = torch.zeros(2)
    assert base_of(x[:1]) is x
    assert base_of(x) is None


# -- distributed.py --------------------------------------------------------------------------------


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of one process."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_ddp() -> None:
    """torch.nn.parallel:DistributedDataParallel._module_parameters"""
    seen: list[Any] = []

    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(active_ddp())
            return super().forward(x)

    ddp = nn.parallel.DistributedDataParallel(Layer(1, 1))
    assert [*map(id, parameters_of(ddp))] == [*map(id, ddp.parameters())]
    assert (reduces_in_python(ddp), is_joined(ddp)) == (False, False)
    loss = ddp(torch.ones(1, 1)).sum()
    assert seen == [ddp]
    reducing: list[bool] = []
    for parameter in ddp.parameters():
        parameter.register_hook(lambda _: reducing.append(is_reducing(ddp)))
    loss.backward()
    assert (reducing, is_reducing(ddp), active_ddp()) == ([False, True], False, None)


@pytest.mark.usefixtures("alone")
def test_fsdp() -> None:
    """torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam._unsharded_param"""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    module: Any = fully_shard(nn.Linear(2, 1, bias=False), mesh=mesh)
    state: Any = engine_of(module)
    assert isinstance(state, FSDPState)
    assert modules_of(state) == (module,)
    assert engine_states[module]() is state
    assert getattr(module, FSDP_MARK)
    (group,) = groups_of(state)
    (holder,) = group.fsdp_params
    assert torch.equal(getattr(module.weight, LOCAL), module.weight.to_local())
    module.unshard()
    assert whole_of(holder) is module.weight


@pytest.mark.usefixtures("alone")
def test_zero() -> None:
    """torch.distributed.optim:ZeroRedundancyOptimizer._overlap_with_ddp"""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    weights = [nn.Parameter(torch.zeros(1))]
    optimizer = ZeroRedundancyOptimizer(weights, torch.optim.SGD, lr=0.1)
    assert not overlaps_backward(optimizer)
    assert isinstance(optimizer.optim, torch.optim.SGD)


# -- modules.py ------------------------------------------------------------------------------------


def test_runs() -> None:
    """torch.nn:Module._compiled_call_impl"""
    module = nn.Identity()
    before = compiled_call(module)
    set_compiled_call(module, lambda x: x + 1)
    assert (before, module(1), plain_call(module)(1)) == (None, 2, 1)
    assert plain_call(nn.Identity)(module, 3) == 3
    assert COMPILED_CALL in vars(module)
    assert COMPILED_CALL not in module.__getstate__()


def test_knows_hooks_modules() -> None:
    """torch.nn:Module._forward_hooks"""
    module = nn.Identity()
    module.register_forward_pre_hook(lambda *_: None)
    module.register_forward_hook(lambda *_: None)
    module.register_full_backward_pre_hook(lambda *_: None)
    module.register_full_backward_hook(lambda *_: None)
    assert [*map(len, hooks_around(module))] == [1, 1, 1, 1]


def test_holds() -> None:
    """torch.nn:Module._buffers"""
    module = nn.BatchNorm1d(1)
    assert list(buffers_of(module)) == [name for name, _ in module.named_buffers()]


# -- tensors.py ------------------------------------------------------------------------------------


def test_tells_views() -> None:
    """torch:UntypedStorage._cdata"""
    with torch.device("meta"):
        x, y = torch.empty(2), torch.empty(2)
    assert storage_of(x) == storage_of(x[1:]) != storage_of(y)


def test_counts_holders() -> None:
    """torch._C:_storage_Use_Count()"""
    x = torch.ones(())
    memory = x.untyped_storage()
    alone = holders(memory)
    view = x.detach()
    product = torch.ones((), requires_grad=True) * view.detach()  # saves what it reads
    assert holders(memory) == alone + 2
    del view, product
    assert holders(memory) == alone


def test_reads_values() -> None:
    """torch:Tensor._values"""
    places = torch.tensor([[0, 0]])
    with torch.sparse.check_sparse_tensor_invariants():  # else it warns
        twice = torch.sparse_coo_tensor(places, torch.ones(2), (2,))
    assert sparse_values(twice).tolist() == [1.0, 1.0]
