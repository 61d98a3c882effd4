"""spec.verify: a graph that breaks a promise is refused, by the name of the pass that broke it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from compare import leaf
from graphs import Stage
from torch.utils.checkpoint import checkpoint

from mpcompile import ir, pipeline
from mpcompile.ir import spec
from mpcompile.rules.policy import Precision


def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = checkpoint(lambda y: F.linear(y, w).softmax(-1), x, use_reentrant=False)
    return out * 2


def after(name: str) -> Stage:
    """A sound graph that the named pass has just left."""
    (pass_,) = (p for p in pipeline.PASSES if p.__name__ == name)
    stage = Stage(pass_, program, leaf(3, 4), leaf(4, 4), scaled=True)
    stage.run()
    return stage


def forget_a_mark(stage: Stage) -> None:
    del stage.node("linear").meta["mp"]


def leave_a_node_undecided(stage: Stage) -> None:
    ir.remark(stage.node("mul"), precision=Precision.FOLLOW)


def drop_a_cast(stage: Stage) -> None:
    cast = stage.node("linear_f32")
    cast.replace_all_uses_with(cast.args[0])  # type: ignore[arg-type]


def return_low(stage: Stage) -> None:
    stage.gm.graph.output_node().args = ((stage.node("linear"),),)


def read_before_it_is_made(stage: Stage) -> None:
    stage.node("softmax").prepend(stage.node("mul"))


def forget_to_fold(stage: Stage) -> None:
    part = next(n for n in stage.gm.graph.nodes if ir.is_getitem(n))
    ir.set_regions((part,), (ir.Region({}, {}),))


def cut_the_history(stage: Stage) -> None:
    cast = stage.node("linear_f32")
    for insert, enabled in (
        (stage.gm.graph.inserting_before, False),
        (stage.gm.graph.inserting_after, True),
    ):
        with insert(cast):
            stage.gm.graph.call_function(torch._C._set_grad_enabled, (enabled,))


BROKEN: dict[tuple[str, Callable[[Stage], None]], str] = {
    ("classify", forget_a_mark): "after classify: linear has no precision class",
    ("plan", leave_a_node_undecided): "after plan: mul is still FOLLOW",
    ("place_casts", drop_a_cast): "after place_casts: softmax reads linear as torch.float16, "
    "planned torch.float32",
    ("scale_gradients", drop_a_cast): "after scale_gradients: softmax reads linear",
    ("place_casts", return_low): "after place_casts: output 0 is torch.float16, the program "
    "returns torch.float32",
    ("classify", read_before_it_is_made): "after classify: .*used before it has been defined",
    ("clean", cut_the_history): "after clean: .*softmax has lost its history",
    ("outline", forget_to_fold): "after outline: .* still stands in an inlined checkpoint",
}


@pytest.mark.parametrize(("name", "breakage"), BROKEN, ids=lambda x: getattr(x, "__name__", x))
def test_broken_promises(name: str, breakage: Callable[[Stage], None]) -> None:
    stage = after(name)
    breakage(stage)
    with pytest.raises(spec.SpecError, match=BROKEN[name, breakage]):
        spec.verify(stage.gm, name)


def test_every_stage_of_a_sound_graph_passes() -> None:
    stage = Stage(pipeline.PASSES[0], program, leaf(3, 4), leaf(4, 4), scaled=True)
    for pass_ in pipeline.PASSES:
        pass_(stage.gm, stage.config)
        spec.verify(stage.gm, pass_.__name__)


def test_the_complaint_is_short_however_much_is_wrong() -> None:
    stage = after("classify")
    for node in stage.gm.graph.nodes:
        node.meta.pop("mp", None)
    with pytest.raises(spec.SpecError) as caught:
        spec.verify(stage.gm, "classify")
    assert str(caught.value).count("no precision class") == 3


def test_checks_belong_to_passes_that_exist() -> None:
    assert spec.AFTER.keys() <= {pass_.__name__ for pass_ in pipeline.PASSES}
