"""fuse_head: a linear layer and the cross entropy that alone reads it, as one operator."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import leaf
from expecttest import assert_expected_inline
from graphs import Stage
from heads import FUSED, head, head_inputs
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mpcompile import Policy
from mpcompile.passes.graph.fuse_head import fuse_head
from mpcompile.passes.graph.place_casts import place_casts


def text(stage: Stage) -> str:
    """The graph, the operator by a short name."""
    return stage.text.replace(FUSED, "fused")


def reason(program: Callable[..., Any], *inputs: Any, **options: Any) -> str:
    """Why the pass leaves the loss of this program alone."""
    stage = Stage(fuse_head, program, *inputs, fuse_head=True, **options)
    stage.run_twice()
    assert "fused(" not in text(stage)
    return stage.mark("cross_entropy_loss").reason.rpartition("not fused with its head: ")[2]


# -- the graph -------------------------------------------------------------------------------------


def test_applies() -> None:
    stage = Stage(fuse_head, head, *head_inputs(), fuse_head=True)
    stage.run_twice()
    assert_expected_inline(
        text(stage),
        """\
x: f32[2, 3, 4] = input
weight: f32[7, 4] = input
target: i64[2, 3] = input
flatten_1: i64[6] = flatten(target)
linear_rows: f32[6, 4] = reshape(x, [-1, 4])
linear_loss: f32[] = fused(linear_rows, weight, None, flatten_1, None, 1, -100, 0.0)
return linear_loss
""",
    )
    assert_expected_inline(
        stage.marks,
        """\
flatten_1: KEEP [captured]
linear_rows: LOW [rewrite]
linear_loss: LOW [rewrite]
""",
    )


def test_what_place_casts_makes_of_it() -> None:
    """Matrices low, bias and class weights FP32, and so the loss."""

    def program(x: Tensor, w: Tensor, b: Tensor, target: Tensor, weights: Tensor) -> Tensor:
        logits = F.linear(x, w, b).float()
        return F.cross_entropy(
            logits, target, weights, ignore_index=3, reduction="sum", label_smoothing=0.1
        )

    target = torch.randint(0, 7, (5,))
    inputs = leaf(5, 4), leaf(7, 4), leaf(7), target, torch.rand(7)
    stage = Stage(place_casts, program, *inputs, fuse_head=True)
    stage.run_twice()
    assert_expected_inline(
        text(stage),
        """\
x: f32[5, 4] = input
w: f32[7, 4] = input
b: f32[7] = input
target: i64[5] = input
weights: f32[7] = input
w_f16: f16[7, 4] = to(w, f16)
x_f16: f16[5, 4] = to(x, f16)
linear_loss: f32[] = fused(x_f16, w_f16, b, target, weights, 2, 3, 0.1)
return linear_loss
""",
    )


def test_only_when_asked() -> None:
    stage = Stage(fuse_head, head, *head_inputs())
    assert not stage.run()
    assert "not fused" not in stage.mark("cross_entropy_loss").reason


def test_two_losses_of_one_weight() -> None:
    def program(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return head(x, weight, target) + head(x.exp(), weight, target)

    stage = Stage(fuse_head, program, *head_inputs(), fuse_head=True)
    stage.run_twice()
    assert text(stage).count("fused(") == 2


# -- left alone ------------------------------------------------------------------------------------


def test_logits_that_are_returned_too() -> None:
    def program(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(x, weight)
        return F.cross_entropy(logits.flatten(0, 1), target.flatten()), logits

    assert reason(program, *head_inputs()) == "the logits are a result, too"


def test_logits_that_something_else_reads() -> None:
    def program(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(x, weight)
        return F.cross_entropy(logits.flatten(0, 1), target.flatten()) + logits.sum()

    assert reason(program, *head_inputs()) == "something else reads linear"


def test_classes_in_the_middle() -> None:
    def program(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).transpose(1, 2), target)

    assert reason(program, *head_inputs()) == "its logits are not rows of classes, (N, V)"


def test_views_that_move_the_classes() -> None:
    def program(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(x, weight).view(2, 7, 3).reshape(6, 7)
        return F.cross_entropy(logits, target.flatten())

    assert reason(program, *head_inputs()).endswith("moves the classes")


def test_something_between() -> None:
    def program(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).tanh().flatten(0, 1), target.flatten())

    assert reason(program, *head_inputs()) == "its logits come from tanh"


def test_probabilities_for_targets() -> None:
    def program(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight), target)

    why = reason(program, leaf(5, 4), leaf(7, 4), torch.rand(5, 7).softmax(-1))
    assert why == "its targets are not int64 indices of classes"


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Policy(full=["linear"]), "linear is FULL, policy: operator 'aten::linear'"),
        (Policy(keep=["linear"]), "linear is KEEP, policy: operator 'aten::linear'"),
        (Policy(low=["cross_entropy_loss"]), "it is LOW, policy:"),
        (Policy(keep=["cross_entropy_loss"]), "it is KEEP, policy:"),
    ],
)
def test_the_users_word(policy: Policy, expected: str) -> None:
    assert reason(head, *head_inputs(), policy=policy).startswith(expected)


def test_a_weight_that_is_written() -> None:
    def program(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        weight = weight.clone()
        logits = F.linear(x, weight)
        with torch.no_grad():
            weight.detach().copy_(torch.zeros(7, 4))
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    assert reason(program, *head_inputs()) == "clone is written in place"


def test_grad_modes() -> None:
    def program(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            logits = F.linear(x, weight)
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    assert reason(program, *head_inputs()) == "the grad mode changes between them"


def test_a_checkpoint_around_the_linear() -> None:
    def program(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        logits = checkpoint(F.linear, x, weight, use_reentrant=False)
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    assert reason(program, *head_inputs()) == "an activation checkpoint ends between them"


def test_without_autocast() -> None:
    def program(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return head(x, weight, target)

    assert reason(program, *head_inputs()) == "linear is KEEP, autocast is disabled here"
