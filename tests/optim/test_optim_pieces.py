"""How a step is cut into pieces, and which pieces are one program."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from as_written import AsWritten
from step_pieces import adam, cut, params_of, passed, updates
from steps import DYNAMIC, sgd, traced

from mpcompile import ir
from mpcompile.ir import aten
from mpcompile.ir.step import StepConfig
from mpcompile.optim.pieces import FEW, MEASURE, UPDATE, Piece, Split, signature, split, stages_of
from mpcompile.passes.step.agree_on_ranks import agree_on_ranks
from mpcompile.passes.step.lift_numbers import lift_numbers
from mpcompile.passes.step.measure_gradients import measure_gradients


def passed_through(tensors: list[torch.Tensor], gradients: Any = None) -> Split:
    """The pieces of plain SGD over such parameters."""
    gm = traced(sgd, tensors, gradients=gradients)
    for pass_ in (lift_numbers, measure_gradients, agree_on_ranks):
        pass_(gm, StepConfig((), (), checked=False))
    gm.graph.eliminate_dead_code()
    return split(gm, whole=False)


def targets(piece: Piece) -> set[Any]:
    return {n.target for n in piece.graph.graph.nodes if n.op == "call_function"}


POWERS = {aten.pow.Scalar, aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor}


def test_a_power_is_never_taken_inside_an_update() -> None:
    """Fused, it would be computed again for every few elements."""
    for make in (adam, torch.optim.Adam, torch.optim.NAdam, torch.optim.Adamax, torch.optim.RAdam):
        step = cut((3,), (2, 4), make=make)
        powers = [r for r in step.pieces if targets(r) & POWERS]
        assert powers, make
        for piece in powers:
            assert not params_of(piece)
            assert {n.meta["val"].ndim for n in piece.graph.graph.nodes if n.op != "output"} == {0}


def test_a_piece_for_each_parameter() -> None:
    step = cut((3,), (2, 4), (5,))
    assert [params_of(r) for r in updates(step)] == [["param0"], ["param1"], ["param2"]]
    for piece in updates(step):
        slots = [ir.slot_of(n) for n in piece.inputs if n.op == "placeholder"]
        assert len({s.index for s in slots}) == 1, slots


@pytest.mark.parametrize(
    "shapes",
    [[(n,) for n in range(2, 3 + FEW)], [(3,), (1 << 17,)]],
    ids=["many", "large"],
)
def test_each_gradient_is_measured_by_itself_and_first(shapes: list[tuple[int, ...]]) -> None:
    step = cut(*shapes)
    for i, piece in enumerate(step.pieces[: len(shapes)]):
        assert targets(piece) == {aten.linalg_vector_norm.default}
        assert [n.name for n in piece.inputs] == [f"grad{i}"]


def test_few_small_gradients_are_measured_with_what_follows_from_it() -> None:
    """A call costs more than such a norm. Numbers of each parameter's own stay apart: they would
    take long to compile.
    """
    first, *rest = cut((3,), (2, 4), (5,), make=adam).pieces
    measured = [n for n in first.inputs if n.name.startswith("grad")]
    assert [n.name for n in measured] == ["grad0", "grad1", "grad2"]
    assert not any(targets(piece) & {aten.linalg_vector_norm.default} for piece in rest)
    assert not params_of(first)
    assert not any(ir.slot_of(n).kind == "state" for n in first.inputs)


def test_pieces_run_after_what_they_read() -> None:
    step = cut((3,), (2, 4), ())
    ready = set()
    for piece in step.pieces:
        assert all(n.op == "placeholder" or n in ready for n in piece.inputs)
        ready |= set(piece.outputs)
    assert all(value in ready for _, value in step.commits)


def test_nothing_is_lost() -> None:
    """Every operator of the step is in one piece, or is a 0-d write at the end."""
    stage = passed((3,), (2, 4), (), make=adam, scales=(DYNAMIC,), max_grad_norm=1.0)
    calls = len(stage.gm.graph.find_nodes(op="call_function", target=aten.copy_.default))
    everything = sum(n.op == "call_function" for n in stage.gm.graph.nodes)
    for whole in (False, True):
        step = split(stage.gm, whole=whole)
        inside = [n for r in step.pieces for n in r.graph.graph.nodes]
        assert sum(n.op == "call_function" for n in inside) + len(step.commits) == everything
        assert sum(n.target is aten.copy_.default for n in inside) + len(step.commits) == calls


def test_numbers_are_stored_at_the_very_end() -> None:
    """When all who read the old ones have done so. The moments of a 0-d parameter are numbers."""
    names = {str(slot) for slot, _ in cut((3,), ()).commits}
    scale = {"scale", "good_steps", "overflows_left", "skipped_steps", "floor", "hit"}
    assert names == {
        *(f"scale0_{field}" for field in scale), "result_skipped", "result_norm",
        "state0_step", "state1_step", "state1_exp_avg", "state1_exp_avg_sq",
    }  # fmt: skip


def test_equal_shapes_are_one_program_and_flat_ones_whatever_their_shape() -> None:
    pieces = updates(cut((3,), (2, 4), (2, 4)))
    assert all(r.flat for r in pieces)
    assert len({signature(r) for r in pieces}) == 1


def test_other_settings_are_another_program() -> None:
    (first,) = updates(cut((3,)))
    (second,) = updates(cut((3,), make=lambda p: torch.optim.AdamW(p, lr=0.1, eps=1e-3)))
    (third,) = updates(cut((3,), make=lambda p: torch.optim.AdamW(p, lr=0.7)))
    assert signature(first) != signature(second)
    assert signature(first) == signature(third)  # the learning rate is an input


def test_another_dtype_is_another_program() -> None:
    wide, narrow = (
        updates(passed_through([torch.ones(3, dtype=d)]))[0] for d in (torch.float64, torch.float32)
    )
    assert signature(wide) != signature(narrow)
    assert signature(narrow) == signature(updates(passed_through([torch.ones(2, 2)]))[0])


class Centred(AsWritten):
    """Looks along a dimension."""

    def update(self, group: dict[str, Any], p: Any, state: dict[str, Any]) -> None:
        p.sub_(p.grad - p.grad.mean(0, keepdim=True), alpha=0.1)


def test_a_piece_that_looks_at_the_shape_is_not_flat() -> None:
    pieces = updates(cut((2, 4), (4, 2), (2, 4), make=Centred))
    assert not any(r.flat for r in pieces)
    assert len({signature(r) for r in pieces}) == 2


def test_only_dense_tensors_of_one_layout_are_flat() -> None:
    def piece_of(weight: torch.Tensor, grad: torch.Tensor) -> Piece:
        (only,) = updates(passed_through([weight], [grad]))
        return only

    plain = torch.ones(2, 3, 4, 5)
    last = plain.contiguous(memory_format=torch.channels_last)
    gaps = torch.ones(2, 3, 4, 10)[..., ::2]
    assert piece_of(plain, plain).flat
    assert piece_of(last, last).flat
    assert not piece_of(last, plain).flat
    assert not piece_of(plain, last).flat
    assert not piece_of(gaps, gaps).flat
    assert not piece_of(plain, torch.ones(1, 3, 4, 5).expand(2, 3, 4, 5)).flat
    assert not piece_of(torch.ones(1), torch.ones(1)).flat  # a symbolic size is never one


def test_a_step_over_all_parameters_at_once_is_one_piece() -> None:
    """An optimizer that scales by a norm of its own over all gradients ties them together."""

    class Normed(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            params = [p for group in self.param_groups for p in group["params"]]
            total = torch.stack([p.grad.norm() for p in params]).norm()
            for p in params:
                p.sub_(p.grad / total)

    pieces = updates(cut((3,), (2, 4), make=lambda p: Normed(p, lr=0.1)))
    assert [params_of(r) for r in pieces] == [["param0", "param1"]]


def test_as_few_as_the_order_allows() -> None:
    """On a GPU: what is known before the update, then the update, in one launch each."""
    step = cut((3,), (2, 4), (), whole=True)
    before, update = step.pieces
    assert not params_of(before)
    assert targets(before) & POWERS
    assert params_of(update) == ["param0", "param1", "param2"]
    assert not targets(update) & POWERS


def test_multi_tensor_operators_are_not_flat() -> None:
    """Nor in the way, where all tensors have one layout: a model of one parameter."""
    for sizes in (((3, 4),), ((3, 4), (3, 4))):
        step = cut(*sizes, whole=True, foreach=True)
        assert len(step.pieces) == 2
        assert not any(r.flat for r in step.pieces)


def test_stages_only_grow() -> None:
    stages = stages_of(passed((3,), (), make=adam, max_grad_norm=1.0, scales=(DYNAMIC,)).gm)
    assert {MEASURE, UPDATE} <= set(stages.values())
    for node, stage in stages.items():
        assert all(stages[n] <= stage for n in node.all_input_nodes if n in stages), node
