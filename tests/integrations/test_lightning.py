"""LightningModules under a Lightning Trainer: what is compiled, logged, and refused; copies."""

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

import pytorch_lightning
import torchmetrics
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning_nets import FP16, FROM_LIGHTNING, Net, batches, distance, fitted, made, trainer

from mpcompile import MPCompileError, MPCompileWarning, compiled_plans, loss_scale_of, mpcompile
from mpcompile.integrations.lightning import MPCompilePrecision
from mpcompile.integrations.pytorch_lightning import MPCompilePrecision as OldPrecision

pytestmark = [pytest.mark.filterwarnings(line) for line in FROM_LIGHTNING]


def plugin(**options: Any) -> dict[str, Any]:
    """The changed line."""
    return {"plugins": [MPCompilePrecision(**{**FP16, **options})]}


@pytest.fixture(scope="module")
def reference() -> Any:
    """Trained in FP32."""
    return fitted(made())


# A rounding to FP16 is at most 2**-11 of a value; a dozen steps at lr=0.1 add up a few of them.
CLOSE = 2**-8

HOWS = {
    "mpcompile(module)": lambda module: fitted(mpcompile(module, **FP16)),
    "plugin": lambda module: fitted(module, **plugin()),
}


@pytest.mark.parametrize("how", HOWS)
def test_a_training_step_is_one_graph_with_its_loss(how: str, reference: Any) -> None:
    module = HOWS[how](made())
    plans = compiled_plans(module)
    assert [plan.scaled for plan in plans] == [False, True]  # validation_step, training_step
    for plan in plans:
        assert any("cross_entropy" in node.op for node in plan.nodes)
        assert plan.counts()["LOW"] > 0
        assert plan.ends_with is None
        assert {"net.0", "net.2"} <= {node.module for node in plan.nodes}
    assert loss_scale_of(module).skipped_steps == 0
    assert 0 < distance(module, reference) < CLOSE


def test_the_older_package_has_the_plugin_too(reference: Any) -> None:
    class Old(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = made().net

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    module = Old()
    trainer(pytorch_lightning.Trainer, plugins=[OldPrecision(**FP16)]).fit(module, batches())
    assert [plan.scaled for plan in compiled_plans(module)] == [True]
    assert 0 < distance(module, reference) < CLOSE


class Logging(Net):
    """Logs in each way that there is."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torchmetrics.MeanMetric()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.net(batch[0])
        total = out.detach().square().mean()
        self.log("total", total, on_step=True, on_epoch=True)
        loss = F.cross_entropy(out, batch[1])
        self.log_dict({"loss": loss, "number": 3.0}, prog_bar=True, reduce_fx="max")
        self.accuracy(out, batch[1])
        self.seen.update(loss)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        total.add_(1000.0)  # what was logged was logged
        return {"loss": loss, "total": total}


def test_what_is_logged_is_what_plain_lightning_logs() -> None:
    logged = []
    for options in ({}, plugin()):
        module, train = made(Logging), trainer(**options)
        train.fit(module, batches(), batches())
        logged.append({k: float(v) for k, v in train.logged_metrics.items()})
        assert "log" not in vars(module)
    plain, ours = logged
    assert set(plain) == {
        "total_step", "total_epoch", "loss", "number", "accuracy", "seen", "val_loss"
    }  # fmt: skip
    assert ours == pytest.approx(plain, abs=0.01)
    # A metric ends a graph and is inside of none: there are the validation step and, of the
    # training step, what comes before the accuracy, between the two metrics, and after them.
    assert len(compiled_plans(module)) <= 4


class Annealed(Net):
    """Reads how far the training has come."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        done = (self.global_step + 1) / 40 + self.current_epoch / 8 + batch_idx / 100
        return self.loss(batch) * min(1.0, done)


def test_the_number_of_the_step_does_not_compile_it_again() -> None:
    plain = fitted(made(Annealed), max_epochs=4)
    module = fitted(made(Annealed), max_epochs=4, **plugin())
    # At first the numbers are constants; when they change they become inputs, the epoch's last.
    assert sum(plan.scaled for plan in compiled_plans(module)) <= 3
    assert loss_scale_of(module).state.good_steps == 24
    assert module.losses == pytest.approx(plain.losses, abs=0.01)


def test_evaluation_and_prediction_are_compiled() -> None:
    module, train = made(), trainer(**plugin())
    (result,) = train.validate(module, batches(), verbose=False)
    predicted = torch.cat(train.predict(module, batches()))
    assert [plan.left for plan in compiled_plans(module)] == [None, None]
    x, y = batches().dataset.tensors
    out = made().net(x).detach()
    assert predicted.dtype is torch.float32
    assert 0 < float((predicted - out).abs().max()) < CLOSE
    assert result["val_loss"] == pytest.approx(float(F.cross_entropy(out, y)), abs=CLOSE)


def test_a_second_fit_keeps_graphs_and_scale() -> None:
    module, options = made(), plugin()
    fitted(module, **options)
    plans, good = len(compiled_plans(module)), loss_scale_of(module).state.good_steps
    assert good > 0
    fitted(module, **options)
    assert len(compiled_plans(module)) == plans
    assert loss_scale_of(module).state.good_steps == good + 12  # the steps of a fit


@pytest.mark.slow("trains by a trainer of others")
def test_another_trainer_compiles_a_module_again() -> None:
    module = fitted(made(Logging), **plugin())
    fitted(module, **plugin(level="O2"))
    assert {plan.level for plan in compiled_plans(module)} == {"O2"}
    assert isinstance(module.training_step.method.__self__, Logging)


# -- refused ---------------------------------------------------------------------------------------


def test_options_are_checked_when_the_plugin_is_made() -> None:
    with pytest.raises(MPCompileError, match=r"levle.*did you mean 'level'"):
        MPCompilePrecision(levle="O2")
    with pytest.raises(MPCompileError, match="O7"):
        MPCompilePrecision(level="O7")
    with pytest.raises(MPCompileError, match="compile_optimizers"):
        MPCompilePrecision(compile_optimizers="yes")


def test_lightning_refuses_a_second_precision_beside_the_plugin() -> None:
    with pytest.raises(ValueError, match=r"precision=16-mixed.*MPCompilePrecision\(level='O2'\)"):
        trainer(precision="16-mixed", plugins=[MPCompilePrecision(level="O2")])


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("automatic", [True, False])
def test_autocast_around_a_compiled_module_is_refused(precision: Any, automatic: bool) -> None:
    module = made()
    module.automatic_optimization = automatic
    theirs = MixedPrecision(precision, "cpu")  # Trainer(precision="16-mixed") isn't for CPUs
    with pytest.raises(MPCompileError, match=f"Trainer\\(precision='{precision}'\\).*leave"):
        fitted(mpcompile(module, **FP16), plugins=[theirs])


def test_a_gradscaler_around_a_compiled_submodule_is_said() -> None:
    module = made()
    module.net = mpcompile(module.net, **FP16)
    with pytest.warns(MPCompileWarning, match="GradScaler steps SGD"):
        fitted(module, plugins=[MixedPrecision("16-mixed", "cpu")])


@pytest.mark.parametrize("precision", ["16-true", "bf16-true", "64-true"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_module_that_lightning_casts_is_refused(precision: Any, whole: bool) -> None:
    module = made()
    if whole:
        mpcompile(module, **FP16)
    else:
        module.net = mpcompile(module.net, **FP16)
    with pytest.raises(MPCompileError, match=r"cast after mpcompile\(\).*precision='16-true'"):
        fitted(module, precision=precision)


@pytest.mark.parametrize("part", ["", "net"])
def test_the_plugin_refuses_what_is_compiled_already(part: str) -> None:
    module = made()
    mpcompile(module.get_submodule(part), **FP16)
    with pytest.raises(MPCompileError, match=rf"Net is compiled already \({part or 'all of it'}\)"):
        fitted(module, **plugin())


# -- steps -----------------------------------------------------------------------------------------


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
