"""Steps of a LightningModule that call one another, or are made by functools; copies and pickles of
a compiled LightningModule, and of the metrics in it, which are plain.
"""

import copy
import functools
import pickle
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.context import set_spawning_popen
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("lightning.pytorch")

import torchmetrics
from lightning_nets import FP16, FROM_LIGHTNING, Net, batches, fitted, made, trainer

from mpcompile import MPCompileWarning, compiled_plans, mpcompile
from mpcompile.integrations.lightning import MPCompilePrecision

# -- steps -----------------------------------------------------------------------------------------


pytestmark = [pytest.mark.filterwarnings(line) for line in FROM_LIGHTNING]


def logged(kind: type[Any], **options: Any) -> tuple[Any, dict[str, float]]:
    """A module, trained, and what it logged last."""
    module, train = made(kind), trainer(**options)
    train.fit(module, batches(), batches())
    return module, {name: float(value) for name, value in train.logged_metrics.items()}


class Nested(Net):
    """Its training step isn't compiled, and calls a step that is."""

    @torch.compiler.disable
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("before", loss.detach() + 1)
        self.validation_step(batch, batch_idx)
        self.log("after", loss.detach() + 2)
        return loss


@pytest.mark.filterwarnings("ignore:mpcompile. 50% of the product FLOPs of Nested ran in compiled")
def test_a_step_that_calls_another_logs_all() -> None:
    """The step is not to be compiled, so its products run outside of the graphs."""
    _, plain = logged(Nested)
    precision = MPCompilePrecision(**{**FP16, "strict": False})
    module, ours = logged(Nested, plugins=[precision])
    assert set(plain) == {"before", "val_loss", "after"}
    assert ours == pytest.approx(plain, abs=0.01)
    assert "log" not in vars(module)


class Partial(Net):
    """Its steps are one method, in two stages."""

    def _step(self, batch: Any, batch_idx: int, *, stage: str) -> torch.Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log(stage, loss)
        return loss

    training_step = functools.partialmethod(_step, stage="train")  # type: ignore[assignment]
    validation_step = functools.partialmethod(_step, stage="test")  # type: ignore[assignment]


def test_steps_that_functools_made_are_compiled() -> None:
    _, plain = logged(Partial)
    module, ours = logged(Partial, plugins=[MPCompilePrecision(**FP16)])
    assert set(plain) == {"train", "test"}
    assert ours == pytest.approx(plain, abs=0.01)
    assert [plan.scaled for plan in compiled_plans(module)] == [False, True]
    assert all(plan.counts()["LOW"] > 0 for plan in compiled_plans(module))


# -- copies ----------------------------------------------------------------------------------------


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
    """A copy of one that was trained is plain, and may be compiled and trained again."""
    module = made()
    names = set(module.state_dict())
    fitted(mpcompile(module, **FP16))
    module.trainer = None
    assert set(module.state_dict()) == names
    twin = COPIED[how](module)
    assert twin.training_step.__self__ is twin
    assert twin.training_step.__func__ is Net.training_step
    assert twin._compiled_call_impl is None
    assert "__getstate__" not in vars(twin)
    assert module._compiled_call_impl is not None
    fitted(mpcompile(twin, **FP16))
    assert [plan.scaled for plan in compiled_plans(twin)] == [False, True]


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
