"""A module that evaluates reads copies of its weights, cast once, and never a stale one."""

import copy
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from module_of import module_of
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from weight_writes import HANDLES, WRITES, in_place

from mpcompile import MPOptimizer, compiled_plans, mpcompile
from mpcompile.scaling import kept_copies, parameters
from mpcompile.torch_inside.tensors import MARK

BF16 = torch.bfloat16
Write = Callable[[nn.Module], object]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8))


def compiled(module: nn.Module | None = None, **options: Any) -> nn.Sequential:
    options = {"dtype": BF16, "emit": "aot_eager", **options}
    return mpcompile(module or net(), **options)  # type: ignore[return-value]


def batch() -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(1))


def as_cast_in_each_call(model: nn.Module, **options: Any) -> torch.Tensor:
    """The result of a fresh model with these weights, whose graph casts them."""
    fresh = net()
    fresh.load_state_dict(model.state_dict())
    with torch.no_grad():
        return compiled(fresh, disable_passes=["read_copies"], **options)(batch())  # type: ignore[no-any-return]


def kept_of(weight: torch.Tensor) -> list[Any]:
    return list(kept_copies.copies_of(weight).values())


def is_plain(weight: torch.Tensor) -> bool:
    return type(weight) is nn.Parameter and not any(
        name.startswith("_mp_") and name != MARK for name in vars(weight)
    )


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_weights_are_cast_once_and_results_are_the_same(level: str, mode: Any) -> None:
    model = compiled(level=level)
    with mode():
        first = model(batch())
        stored = kept_of(model[0].weight)[0].stored
        writes = stored._version
        again = model(batch())
    assert stored is kept_of(model[0].weight)[0].stored
    assert stored._version == writes
    assert stored.dtype is BF16
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    expected = as_cast_in_each_call(model, level=level)
    torch.testing.assert_close(first.clone(), expected, rtol=0, atol=0)


def test_the_graph_itself_casts_no_weight() -> None:
    model = compiled()
    with torch.no_grad():
        model(batch())
        with torch.profiler.profile() as profile:
            model(batch())
    assert {event.key: event.count for event in profile.key_averages()}["aten::_to_copy"] == 4


def test_both_modes_without_grad_share_the_copies() -> None:
    model = compiled()
    with torch.inference_mode():
        model(batch())
    stored = kept_of(model[0].weight)[0].stored
    assert not stored.is_inference()
    with torch.no_grad():
        model[0].weight.mul_(2)
        found = model(batch())
    assert kept_of(model[0].weight)[0].stored is stored
    torch.testing.assert_close(found, as_cast_in_each_call(model), rtol=0, atol=0)


# -- what changes a weight -------------------------------------------------------------------------


HERE: dict[str, Write] = {**WRITES, "a new module": lambda m: setattr(m, "3", nn.Linear(32, 8))}


@pytest.mark.slow_rows("compiles several models")
@pytest.mark.parametrize("write", HERE)
def test_a_write_is_noticed(write: str) -> None:
    model = compiled()
    model(batch())  # it is trained, too
    with torch.no_grad():
        before = model(batch()).clone()
        in_place(model)  # so that loading the first weights is a change as well
        assert not torch.equal(model(batch()), before)
        last = model(batch()).clone()
    HERE[write](model)
    with torch.no_grad():
        found = model(batch()).clone()
        again = model(batch())
    assert not torch.equal(found, last)
    torch.testing.assert_close(found, as_cast_in_each_call(model), rtol=0, atol=0)
    torch.testing.assert_close(found, again, rtol=0, atol=0)


@pytest.mark.parametrize("handle", HANDLES)
def test_a_write_through_an_older_handle_is_noticed(handle: str) -> None:
    model = compiled()
    same_memory = HANDLES[handle](model[0].weight)
    with torch.no_grad():
        before = model(batch()).clone()
        same_memory *= 0.5
        found = model(batch()).clone()
    assert not torch.equal(found, before)
    torch.testing.assert_close(found, as_cast_in_each_call(model), rtol=0, atol=0)


def test_a_write_through_a_later_tensor_from_data_is_noticed() -> None:
    model = compiled()
    with torch.no_grad():
        model(batch())
        data = model[0].weight.data
        for _ in range(2):
            data.mul_(0.5)
            torch.testing.assert_close(model(batch()), as_cast_in_each_call(model), rtol=0, atol=0)


def set_into(model: nn.Module, flat: torch.Tensor) -> None:
    first, last = model[0].weight, model[3].weight  # type: ignore[index]
    first.set_(flat[: first.numel()].view_as(first))
    last.set_(flat[-last.numel() :].view_as(last))


@pytest.mark.parametrize(
    "shared", [lambda m, flat: vector_to_parameters(flat, m.parameters()), set_into]
)
def test_weights_that_come_to_share_memory_are_cast_in_each_call(shared: Any) -> None:
    model = compiled()
    flat = parameters_to_vector(model.parameters()).detach().clone()
    with torch.no_grad():
        model(batch())
        shared(model, flat)
        model(batch())
        flat.mul_(2)  # no weight's own count tells
        found = model(batch())
    torch.testing.assert_close(found, as_cast_in_each_call(model), rtol=0, atol=0)


def test_a_weight_that_the_forward_detaches_ends_no_graph() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        return m.inner(x) + x @ m.inner.weight.detach().t()

    model = module_of(forward, inner=nn.Linear(16, 8))
    mpcompile(model, dtype=BF16, emit="aot_eager", strict=True, fullgraph=True)
    with torch.no_grad():
        first = model(batch())
        torch.testing.assert_close(model(batch()), first, rtol=0, atol=0)
    assert len(compiled_plans(model)) == 1


def test_memory_of_several_processes_is_cast_in_each_call() -> None:
    model = compiled(net().share_memory())
    with torch.no_grad():
        model(batch())
        assert not any(map(kept_of, model.parameters()))
        # As another process does it: nothing of this one's tensors tells.
        torch.from_numpy(model[0].weight.numpy()).mul_(0.5)
        torch.testing.assert_close(model(batch()), as_cast_in_each_call(model), rtol=0, atol=0)


def test_weights_made_in_inference_mode_are_cast_in_each_call() -> None:
    with torch.inference_mode():
        model = compiled()
        before = model(batch()).clone()
        model[0].weight.mul_(0.5)
        assert not torch.equal(model(batch()), before)


# -- beside a training -----------------------------------------------------------------------------


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(batch()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.slow("compiles several models")
@pytest.mark.parametrize("wraps", [lambda o: o, lambda o: MPOptimizer(o, emit="eager")])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_training_has_no_copies_and_compiles_nothing_again(level: str, wraps: Any) -> None:
    model, plain = compiled(level=level), net()
    optimizer = wraps(torch.optim.SGD(model.parameters(), lr=0.1))
    twin = compiled(plain, level=level)
    other = wraps(torch.optim.SGD(twin.parameters(), lr=0.1))
    for _ in range(3):
        step(model, optimizer)
        step(twin, other)
        with torch.no_grad():
            found = model(batch())
        torch.testing.assert_close(found, as_cast_in_each_call(twin, level=level), rtol=0, atol=0)
    assert len(compiled_plans(model)) == 2  # one that trains, one that evaluates
    kept = [weakref.ref(c.stored) for p in model.parameters() for c in kept_of(p)]
    model(batch())
    assert not any(ref() is not None for ref in kept)
    # The step of an MPOptimizer holds tensors over the weights' memory.
    held = isinstance(optimizer, MPOptimizer)
    assert bool(kept) is not held
    if not (held and level == "O2"):
        assert all(map(is_plain, model.parameters()))


def test_an_evaluation_is_no_change_that_a_training_would_look_into() -> None:
    model = compiled()
    optimizer = MPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), emit="eager")
    step(model, optimizer)
    before = parameters.changes()
    with torch.no_grad():
        model(batch())
    model(batch())
    assert parameters.changes() == before


def test_frozen_weights_beside_those_of_an_optimizer() -> None:
    model = compiled(level="O2")
    model[0].requires_grad_(False)
    optimizer = MPOptimizer(torch.optim.SGD(model[3].parameters(), lr=0.1), emit="eager")
    for _ in range(2):
        step(model, optimizer)
        with torch.no_grad():
            found = model(batch())
        torch.testing.assert_close(found, as_cast_in_each_call(model, level="O2"), rtol=0, atol=0)
    assert kept_of(model[0].weight)
    assert not kept_of(model[3].weight)


def test_copies_and_pickles_of_a_module_that_evaluates_are_plain() -> None:
    model = compiled()
    with torch.no_grad():
        model(batch())
    assert type(model[0].weight) is not nn.Parameter
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(map(is_plain, other.parameters()))
        torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)


@pytest.mark.slow("compiles several models")
def test_threads_that_serve_read_the_weights_as_they_are() -> None:
    model = compiled()
    inputs = [torch.randn(4, 16) for _ in range(32)]

    def serve(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(x).clone()

    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            in_place(model)
            found = list(pool.map(serve, inputs))
            for x, y in zip(inputs, found, strict=True):
                torch.testing.assert_close(y, serve(x), rtol=0, atol=0)
    torch.testing.assert_close(serve(batch()), as_cast_in_each_call(model), rtol=0, atol=0)


def test_a_padded_copy_is_kept() -> None:
    """Also beside one that is stored in another shape: a graph compiled later may pad otherwise."""
    model = mpcompile(nn.Linear(13, 7), dtype=torch.float16, pad="always", emit="aot_eager")

    def check(x: torch.Tensor) -> None:
        with torch.no_grad():
            expected = nn.functional.linear(x.half(), model.weight.half(), model.bias.half())
            torch.testing.assert_close(model(x), expected.float(), rtol=1e-3, atol=1e-3)
            model.weight.mul_(1.5)

    check(torch.randn(3, 13))
    check(torch.randn(3, 13))
    assert [copy.is_padded for copy in kept_of(model.weight)] == [True]
    (padded,) = kept_copies.copies_of(model.weight)
    with torch.no_grad():  # as by a graph that doesn't pad, first after a training
        kept_copies.copy_of(model.weight, torch.float16, model.weight.shape)
    kept = kept_copies.copies_of(model.weight)
    model.weight._mp_kept = {k: copy for k, copy in kept.items() if k != padded}  # type: ignore[assignment]
    check(torch.randn(3, 13))
    assert sorted(copy.is_padded for copy in kept_of(model.weight)) == [False, True]


def test_a_process_group_writes_weights_unnoticed_so_that_none_are_kept() -> None:
    model = compiled()
    with torch.no_grad():
        model(batch())
        assert kept_of(model[0].weight)
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        try:
            model(batch())
            assert not any(map(kept_of, model.parameters()))
        finally:
            dist.destroy_process_group()
