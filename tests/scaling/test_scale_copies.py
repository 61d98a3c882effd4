"""A forward's copy of the scale: no other forward writes to it while it is needed, and a loop finds
the same addresses in each step, as the CUDA graph of a backward wants them.
"""

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpcompile import LossScale, MPOptimizer, loss_scale_of, mpcompile
from mpcompile.devices.cpu import CPU
from mpcompile.scaling.live_scale import ScaleCopies


def copies_of(numbers: list[float]) -> tuple[list[torch.Tensor], ScaleCopies]:
    """A copy for each value that a scale has had, all of them held."""
    scale, copies = torch.zeros(()), ScaleCopies()
    return [copies.of(scale.fill_(number)) for number in numbers], copies


def test_a_copy_that_is_held_never_changes() -> None:
    numbers = [float(i) for i in range(20)]  # more than there are places
    held, _ = copies_of(numbers)
    assert [copy.item() for copy in held] == numbers


def saved(copy: torch.Tensor) -> Any:
    """What autograd holds of it for a backward."""
    return (copy * torch.ones((), requires_grad=True)).grad_fn


@pytest.mark.parametrize("hold", [torch.Tensor.detach, saved])
def test_a_copy_is_held_by_whatever_reads_its_memory(hold: Any) -> None:
    (copy,), copies = copies_of([1.0])
    place, holder = copy.data_ptr(), hold(copy)
    del copy
    assert copies.of(torch.tensor(2.0)).data_ptr() != place
    del holder
    assert copies.of(torch.tensor(3.0)).data_ptr() == place


def test_threads_never_get_the_same_place() -> None:
    copies, wrong = ScaleCopies(), []

    def take(number: float) -> None:
        scale = torch.tensor(number)
        for _ in range(500):
            copy = copies.of(scale)
            if copy.item() != number:
                wrong.append(number)

    threads = [threading.Thread(target=take, args=(float(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.slow("trainings that overflow, against FP64")
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_loop_finds_the_same_addresses_in_each_step(
    level: Any, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CPU, "cuda_graphs", True)
    torch.manual_seed(0)
    model = mpcompile(
        nn.Linear(8, 4), level=level, dtype=torch.float16, emit="aot_eager",
        loss_scale=LossScale.dynamic(8.0),  # no search for a start, as with CUDA graphs
    )  # fmt: skip
    optimizer = MPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = torch.randn(16, 8), torch.randint(4, (16,))
    kept, places = [], []
    for step in range(14):
        for _ in range(micro_batches):
            loss = F.cross_entropy(model(x), y)
            if step >= 2:  # from then on the scale is kept where the step moves it
                places.append(loss_scale_of(model).used.data_ptr())
            loss.backward()
            # A loop that keeps numbers takes the memory that a step has left.
            kept.extend([loss, *(torch.zeros(()) for _ in range(50))])
        optimizer.step()
        optimizer.zero_grad()
    assert len(set(places)) <= 3
    period = 2 * micro_batches
    assert places[period:] == places[:-period]


@pytest.mark.slow("trainings that overflow, against FP64")
@pytest.mark.parametrize("graphs", [False, True])
def test_each_backward_divides_by_what_its_forward_multiplied_by(
    graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several forwards wait, as the scale grows in each step; their backwards run in the end."""
    monkeypatch.setattr(CPU, "cuda_graphs", graphs)
    torch.manual_seed(0)
    model, other = nn.Linear(8, 4), nn.Linear(8, 4)
    scale = LossScale.dynamic(8.0, growth_interval=1)
    both = [
        mpcompile(m, loss_scale=scale, dtype=torch.float16, emit="aot_eager")
        for m in (model, other)
    ]
    optimizer = MPOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    x, waiting, used = torch.randn(16, 8), [], []
    for _ in range(12):
        waiting.append(both[1](x).square().mean())
        both[0](x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        used.append(scale.value)
    assert used[-1] == 8.0 * 2**12
    gradients = [torch.autograd.grad(w, other.weight)[0] for w in waiting]
    for gradient in gradients:
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-2, atol=1e-4)
