"""Copies and pickles of a compiled LightningModule, and of the metrics in it: they are plain."""

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.context import set_spawning_popen
from typing import Any

import pytest
import torch

pytest.importorskip("lightning.pytorch")

import torchmetrics
from lightning_nets import FP16, Net, made

from mpcompile import MPCompileWarning, mpcompile


class Measured(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen = torchmetrics.MeanMetric()


COPIED: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda one: pickle.loads(pickle.dumps(one)),
}
in_each_way = pytest.mark.parametrize("how", COPIED)


@in_each_way
@pytest.mark.parametrize("whole", [True, False])
def test_a_copied_metric_counts_for_itself(how: str, whole: bool) -> None:
    module = mpcompile(made(Measured), **FP16)
    module.seen(torch.tensor(1.0))
    twin = COPIED[how](module).seen if whole else COPIED[how](module.seen)
    if how == "copy" and whole:
        assert twin is module.seen  # a shallow copy shares its submodules
        return
    twin(torch.tensor(3.0))
    twin.update(torch.tensor(5.0))
    assert (float(module.seen.compute()), float(twin.compute())) == (1.0, 3.0)
    assert "__getstate__" not in vars(twin)


@in_each_way
def test_a_copied_module_runs_its_own_steps(how: str) -> None:
    module = mpcompile(made(), **FP16)
    twin = COPIED[how](module)
    assert twin.training_step.__self__ is twin
    assert twin._compiled_call_impl is None
    assert "__getstate__" not in vars(twin)
    assert module._compiled_call_impl is not None


def test_a_step_that_the_module_itself_had_is_copied() -> None:
    def training_step(self: Any, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    module = made()
    module.training_step = training_step.__get__(module)
    mpcompile(mpcompile(module, **FP16), **FP16)
    twin = copy.deepcopy(module)
    assert twin.training_step.__func__ is training_step
    assert twin.training_step.__self__ is twin


@pytest.fixture
def spawning() -> Iterator[None]:
    """As if a process was being started: then its arguments are pickled."""
    set_spawning_popen(object())
    yield
    set_spawning_popen(None)


@pytest.mark.usefixtures("spawning")
def test_a_module_that_is_sent_to_a_spawned_process_is_warned_of() -> None:
    module = made()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pickle.dumps(module)
    mpcompile(module, **FP16)
    with pytest.warns(MPCompileWarning, match=r"Net was compiled.*plain copy.*MPCompilePrecision"):
        pickle.dumps(module)
