"""fuse_head: a linear layer and the cross entropy that alone reads it, as one operator: which
graphs, what it computes, how it trains and what it keeps for the backward.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import SETTINGS, check, leaf
from expecttest import assert_expected_inline
from graphs import Stage, ran_twice
from heads import FUSED, head, head_inputs
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mpcompile import MPCompileError, MPOptimizer, Policy, compiled_plans, mpcompile
from mpcompile.demo.train import bytes_saved_for_backward
from mpcompile.passes.graph.place_casts import place_casts
from mpcompile.passes.graph.replace_operators import fuse_head

# -- which graphs ----------------------------------------------------------------------------------


def text(stage: Stage) -> str:
    """The graph, the operator by a short name."""
    return stage.text.replace(FUSED, "fused")


def reason(program: Callable[..., Any], *inputs: Any, **options: Any) -> str:
    """Why the pass leaves the loss of this program alone."""
    stage = ran_twice(fuse_head, program, *inputs, fuse_head=True, **options)
    assert "fused(" not in text(stage)
    return stage.mark("cross_entropy_loss").reason.rpartition("not fused with its head: ")[2]


# -- the graph -------------------------------------------------------------------------------------


def test_applies() -> None:
    stage = ran_twice(fuse_head, head, *head_inputs(), fuse_head=True)
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
    stage.expect_marks("""\
flatten_1: KEEP [captured]
linear_rows: LOW [rewrite]
linear_loss: LOW [rewrite]
""")


def test_what_place_casts_makes_of_it() -> None:
    """Matrices low, bias and class weights FP32, and so the loss."""

    def program(x: Tensor, w: Tensor, b: Tensor, target: Tensor, weights: Tensor) -> Tensor:
        logits = F.linear(x, w, b).float()
        return F.cross_entropy(
            logits, target, weights, ignore_index=3, reduction="sum", label_smoothing=0.1
        )

    target = torch.randint(0, 7, (5,))
    inputs = leaf(5, 4), leaf(7, 4), leaf(7), target, torch.rand(7)
    stage = ran_twice(place_casts, program, *inputs, fuse_head=True)
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

    stage = ran_twice(fuse_head, program, *head_inputs(), fuse_head=True)
    assert text(stage).count("fused(") == 2


# -- left alone ------------------------------------------------------------------------------------


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def returned_too(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(x, weight)
    return loss_of(logits, target), logits


def read_elsewhere(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    logits = F.linear(x, weight)
    return loss_of(logits, target) + logits.sum()


def moved(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    logits = F.linear(x, weight).view(2, 7, 3).reshape(6, 7)
    return F.cross_entropy(logits, target.flatten())


def written(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    weight = weight.clone()
    logits = F.linear(x, weight)
    with torch.no_grad():
        weight.detach().copy_(torch.zeros(7, 4))
    return loss_of(logits, target)


def in_two_grad_modes(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    with torch.no_grad():
        logits = F.linear(x, weight)
    return loss_of(logits, target)


def without_autocast(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return head(x, weight, target)


LEFT: dict[str, tuple[Callable[..., Any], str]] = {
    "logits that are returned too": (returned_too, "the logits are a result, too"),
    "logits that something else reads": (read_elsewhere, "something else reads linear"),
    "classes in the middle": (
        lambda x, w, t: F.cross_entropy(F.linear(x, w).transpose(1, 2), t),
        "its logits are not rows of classes, (N, V)",
    ),
    "views that move the classes": (moved, "view moves the classes"),
    "something between": (
        lambda x, w, t: loss_of(F.linear(x, w).tanh(), t), "its logits come from tanh"
    ),
    "a weight that is written": (written, "clone is written in place"),
    "grad modes": (in_two_grad_modes, "the grad mode changes between them"),
    "a checkpoint around the linear": (
        lambda x, w, t: loss_of(checkpoint(F.linear, x, w, use_reentrant=False), t),
        "an activation checkpoint ends between them",
    ),
    "without autocast": (without_autocast, "linear is KEEP, autocast is disabled here"),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT)
def test_what_is_left(case: str) -> None:
    program, expected = LEFT[case]
    assert reason(program, *head_inputs()) == expected


def test_probabilities_for_targets() -> None:
    program = lambda x, w, t: F.cross_entropy(F.linear(x, w), t)  # noqa: E731
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


# -- end to end ------------------------------------------------------------------------------------


HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


class LM(nn.Module):
    """Tokens in, loss out; the head is tied to the embedding, or has a bias."""

    def __init__(self, *, tied: bool = False, classes: int = 29) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, 16)
        self.norm = nn.LayerNorm(16)
        self.middle = nn.Linear(16, 16)
        self.head = nn.Linear(16, classes, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = self.embedding(tokens)
        logits = self.head(x + F.gelu(self.middle(self.norm(x))))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), target.view(-1))


def batch(rows: int = 6, length: int = 5, classes: int = 29) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, classes, (rows, length))
    target = (tokens * 3 + 1) % classes
    target[0, 0] = -100
    return tokens, target


def is_fused(program: Any) -> bool:
    ops = [node.op for plan in compiled_plans(program) for node in plan.nodes]
    assert (FUSED in ops) != ("aten::cross_entropy_loss" in ops)
    return FUSED in ops


@SETTINGS
@HALVES
@pytest.mark.parametrize("tied", [False, True])
def test_a_model(level: str, emit: str, dtype: torch.dtype, tied: bool) -> None:
    options = {"level": level, "emit": emit, "dtype": dtype}
    seen = check(LM(tied=tied), *batch(), fuse_head=True, steps=2, **options)
    assert is_fused(seen.model)


@SETTINGS
def test_padding_leaves_the_operator_alone(level: str, emit: str) -> None:
    """29 classes and 30 rows, where products want multiples of 8."""
    options = {"level": level, "emit": emit, "pad": "always"}
    seen = check(LM(), *batch(), fuse_head=True, **options)
    assert is_fused(seen.model)
    (plan,) = seen.plans
    assert [n.planned for n in plan.nodes if n.op == "aten::reshape"] == ["f16[30, 16]"]


def test_o3() -> None:
    assert is_fused(check(LM(), *batch(), fuse_head=True, level="O3", tolerance=0.1).model)


@SETTINGS
def test_inside_a_checkpoint(level: str, emit: str) -> None:
    def program(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return checkpoint(head, x, weight, target, use_reentrant=False)

    seen = check(program, *head_inputs(), fuse_head=True, level=level, emit=emit)
    assert is_fused(seen.model)


def test_all_rows_ignored() -> None:
    """NaN, as in FP32; the gradients are zero and no overflow is seen."""
    tokens, target = batch()
    model = mpcompile(LM(), dtype=torch.float16, emit="aot_eager", strict=True, fuse_head=True)
    loss = model(tokens, torch.full_like(target, -100))
    loss.backward()
    assert loss.isnan()
    assert is_fused(model)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("emit", ["eager", "aot_eager"])
def test_any_number_of_rows_by_one_compilation(emit: str) -> None:
    model = LM()
    reference = copy.deepcopy(model)
    fast = mpcompile(model, dtype=torch.bfloat16, emit=emit, strict=True, fuse_head=True)
    for rows in (6, 4, 9):
        tokens, target = batch(rows)
        for x in (tokens, target):
            torch._dynamo.mark_dynamic(x, 0)
        got, wanted = fast(tokens, target), reference(tokens, target)
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)
        got.backward()
        wanted.backward()
    assert len(compiled_plans(model)) == 1
    assert is_fused(model)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert (mine.grad - theirs.grad).norm() < 3e-2 * theirs.grad.norm()


def saved_bytes(emit: str, *, fuse: bool) -> int:
    """What a head of 50 rows and 1000 classes keeps for its backward, without its inputs."""
    x, weight, target = leaf(50, 8), leaf(1000, 8), torch.randint(0, 1000, (50,))
    program = mpcompile(
        lambda x, w, t: F.cross_entropy(F.linear(x, w), t),
        dtype=torch.float16, emit=emit, strict=True, fuse_head=fuse,
    )  # fmt: skip
    program(x, weight, target)
    inputs = nn.ParameterList([x, weight])
    inputs.register_buffer("target", target)
    with bytes_saved_for_backward(inputs) as kept:
        program(x, weight, target)
    return sum(kept.values())


@pytest.mark.parametrize("emit", ["eager", "aot_eager"])
def test_no_logits_are_kept(emit: str) -> None:
    assert saved_bytes(emit, fuse=False) >= 2 * 50 * 1000
    casts, lse = 2 * (50 * 8 + 1000 * 8), 4 * 50
    assert saved_bytes(emit, fuse=True) <= casts + lse + 64


@pytest.mark.slow("compiles by Inductor, or a deep model")
@HALVES
@pytest.mark.parametrize("tied", [False, True])
def test_under_an_mpoptimizer(dtype: torch.dtype, tied: bool) -> None:
    """O2's working copies are read; trains as the unfused model does."""
    losses = []
    for fuse in (False, True):
        torch.manual_seed(0)
        model = mpcompile(
            LM(tied=tied), level="O2", dtype=dtype, emit="eager", strict=True, fuse_head=fuse
        )
        optimizer = MPOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), emit="eager")
        tokens, target = batch()
        for _ in range(8):
            loss = model(tokens, target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert is_fused(model) == fuse
        losses.append(loss.detach())
    torch.testing.assert_close(losses[0], losses[1], rtol=3e-2, atol=0)


@pytest.mark.slow("compiles by Inductor, or a deep model")
def test_compiled_by_inductor() -> None:
    seen = check(LM(), *batch(), fuse_head=True, dtype=torch.bfloat16, emit="inductor")
    assert is_fused(seen.model)


def test_a_flag_is_true_or_false() -> None:
    with pytest.raises(MPCompileError, match=r"fuse_head=1: use True or False"):
        mpcompile(LM(), fuse_head=1)
