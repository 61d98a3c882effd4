"""A graph that breaks a promise is refused, by the name of the pass that broke it; so is a run in
which a value has another dtype than the graph says. And the layout of a graph's inputs.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from compare import leaf
from graphs import Stage, ran
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from mpcompile import ir
from mpcompile.capture import pipeline
from mpcompile.errors import CannotRewrite
from mpcompile.ir import spec
from mpcompile.ir.inputs import FOUND, SCALE, GraphInputs
from mpcompile.passes.graph.scale_gradients import scale_gradients
from mpcompile.rules.policy import Precision


def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = checkpoint(lambda y: F.linear(y, w).softmax(-1), x, use_reentrant=False)
    return out * 2


def after(name: str) -> Stage:
    """A sound graph that the named pass has just left."""
    (pass_,) = (p for p in pipeline.PASSES if p.__name__ == name)
    return ran(pass_, program, leaf(3, 4), leaf(4, 4), scaled=True)


def forget_a_mark(stage: Stage) -> None:
    del stage.node("linear").meta["mp"]


def leave_a_node_undecided(stage: Stage) -> None:
    ir.remark(stage.node("mul"), precision=Precision.FOLLOW)


def drop_a_cast(stage: Stage) -> None:
    cast = stage.node("linear_f32")
    cast.replace_all_uses_with(cast.args[0])  # type: ignore[arg-type]


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
            new = stage.gm.graph.call_function(torch._C._set_grad_enabled, (enabled,))
            ir.set_mark(new, ir.mark(stage.node("mul")))


def say_that_the_result_is_low(stage: Stage) -> None:
    (result,) = stage.gm.graph.output_node().all_input_nodes
    ir.set_value(result, ir.value(result).half())


def test_every_stage_of_a_sound_graph_passes() -> None:
    stage = Stage(pipeline.PASSES[0], program, leaf(3, 4), leaf(4, 4), scaled=True)
    for pass_ in pipeline.PASSES:
        pass_(stage.gm, stage.config)
        pipeline.verify(stage.gm, pass_.__name__)


def test_the_complaint_is_short_however_much_is_wrong() -> None:
    stage = after("classify")
    for node in stage.gm.graph.nodes:
        node.meta.pop("mp", None)
    with pytest.raises(spec.SpecError) as caught:
        pipeline.verify(stage.gm, "classify")
    assert str(caught.value).count("no precision class") == 3


NAMES = [pass_.__name__ for pass_ in pipeline.PASSES]


def test_checks_belong_to_passes_that_exist() -> None:
    for promise in spec.PROMISES:
        assert NAMES.index(promise.since) <= NAMES.index(promise.until)


# A breakage that is one after every pass at which its check holds; what the complaint says.
BROKEN: dict[tuple[str, str, Callable[[Stage], None]], str] = {
    ("classify", "clean", forget_a_mark): "linear has no precision class",
    ("plan", "outline", leave_a_node_undecided): "mul is still FOLLOW",
    ("place_casts", "clean", drop_a_cast): "softmax reads linear as torch.float16, planned "
    "torch.float32",
    ("place_casts", "outline", say_that_the_result_is_low): "output 0 is torch.float16, the "
    "program returns torch.float32",
    ("classify", "classify", read_before_it_is_made): "used before it has been defined",
    ("clean", "clean", cut_the_history): "softmax has lost its history",
    ("outline", "outline", forget_to_fold): " still stands in an inlined checkpoint",
}


@pytest.mark.parametrize(
    ("stage", "breakage", "message"),
    [
        (name, breakage, message)
        for (since, until, breakage), message in BROKEN.items()
        for name in NAMES[NAMES.index(since) : NAMES.index(until) + 1]
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_checks_hold_from_their_pass_on(
    stage: str, breakage: Callable[[Stage], None], message: str
) -> None:
    found = after(stage)
    breakage(found)
    with pytest.raises(spec.SpecError, match=f"after {stage}: .*{message}"):
        pipeline.verify(found.gm, stage)


@pytest.mark.parametrize("owner", ["x", "mul"])
def test_a_result_that_shared_memory_is_no_copy_of_it(owner: str) -> None:
    """Neither of an input's nor of another result's."""

    def shares(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        return y, (x if owner == "x" else y).view(-1)

    pass_ = pipeline.PASSES[NAMES.index("clean")]
    stage = ran(pass_, shares, torch.randn(3, 4))
    view = next(n for n in stage.gm.graph.nodes if "view" in n.name)
    with stage.gm.graph.inserting_after(view):
        copy = stage.gm.graph.call_function(torch.ops.aten.clone.default, (view,))
    ir.set_value(copy, ir.value(view).clone())
    ir.set_mark(copy, ir.mark(view))
    view.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
    with pytest.raises(
        spec.SpecError, match=f"clone_default no longer lies in the memory of {owner}"
    ):
        pipeline.verify(stage.gm, "clean")


def test_a_new_pass_is_held_to_what_held_before_it() -> None:
    """Wherever it stands, and though no check names it."""
    order = [*NAMES]
    order.insert(NAMES.index("read_copies"), "mine")
    stage = after("place_pads")
    spec.verify(stage.gm, "mine", order)
    drop_a_cast(stage)
    with pytest.raises(spec.SpecError, match="after mine: softmax reads linear"):
        spec.verify(stage.gm, "mine", order)


def test_what_runs_the_graph_is_checked_once() -> None:
    """It takes as long as all passes together."""
    checked = [p.check for name in NAMES for p in spec.promises_after(name, NAMES)]
    costly = {promise.check: promise.until for promise in spec.PROMISES if promise.costly}
    assert {check: checked.count(check) for check in costly} == dict.fromkeys(costly, 1)
    for check, until in costly.items():
        assert check in [p.check for p in spec.promises_after(until, NAMES)]


def test_autocast_around_a_run_is_found() -> None:
    x, weight = torch.ones(2, 3), torch.ones(3, 4)
    graph = make_fx(lambda x, weight: (x @ weight).exp(), tracing_mode="fake")(x, weight)
    torch.testing.assert_close(spec.AsPlanned(graph).run(x, weight), torch.full((2, 4), 3.0).exp())
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(CannotRewrite, match=r"mm is torch.bfloat16, was planned as torch.float32"),
    ):
        spec.AsPlanned(graph).run(x, weight)


# -- the layout of inputs --------------------------------------------------------------------------


def program_of_inputs(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """`w` is read low alone, `v` in FP32 as well."""
    return F.linear(F.linear(x, w), v).exp() + v.sum()


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    ("copied", "copies", "names"),
    [
        ({}, {}, []),
        ({1: None}, {1: 1}, []),
        ({1: None, 2: None}, {1: 1, 3: 2}, ["v_copy"]),
        ({2: None}, {3: 2}, ["v_copy"]),
    ],
)
def test_the_layout_of_a_graph(
    scaled: bool, copied: dict[int, None], copies: dict[int, int], names: list[str]
) -> None:
    inputs = torch.randn(3, 4), leaf(4, 4), leaf(4, 4)
    options = {"level": "O2", "scaled": scaled, "copied": copied}
    graph = ran(scale_gradients, program_of_inputs, *inputs, **options).gm.graph
    found = [n.name for n in graph.find_nodes(op="placeholder")]
    assert found[3:] == names + [SCALE, FOUND] * scaled
    assert GraphInputs.of(graph) == GraphInputs(3, copies, scaled)


def test_copies_are_as_many_as_the_graph_reads() -> None:
    with pytest.raises(ValueError, match="shorter"):
        GraphInputs(3, {1: 1, 3: 2}).assembled(["x", "w", "v"], ["w_low"])
