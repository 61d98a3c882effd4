"""Guards that keep values in FP32 or in one place: of results that share memory, of what a matrix
factorisation reads, of what is compared with something picked from it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import LEVELS, check, fallback_reason, leaf
from graphs import Stage, ran_twice
from module_of import module_of
from torch import Tensor, nn

import mpcompile
from mpcompile import Policy, ir
from mpcompile.capture import pipeline
from mpcompile.ir import spec
from mpcompile.passes.graph.guard_aliases import guard_aliases
from mpcompile.passes.graph.own_memory import keep_compared

# -- guard_aliases ---------------------------------------------------------------------------------


def whole_and_view(x: Tensor, w: Tensor) -> Any:
    h = F.linear(x, w)
    return h, h.view(-1)


def parts(x: Tensor, w: Tensor) -> Any:
    return F.linear(x, w).transpose(0, 1).chunk(2, 0)


@pytest.mark.parametrize(
    ("program", "aliases"),
    [(whole_and_view, ["view"]), (parts, ["transpose", "chunk", "getitem", "getitem_1"])],
)
def test_up_to_what_makes_the_memory(program: Any, aliases: list[str]) -> None:
    stage = ran_twice(guard_aliases, program, leaf(8, 16), leaf(16, 16))
    marks = ["linear: LOW [table]", *(f"{name}: FULL [alias]" for name in aliases)]
    stage.expect_marks("\n".join(marks) + "\n")


def test_one_result_alone() -> None:
    def alone(x: Tensor, w: Tensor) -> Any:
        h = F.linear(x, w).view(-1)
        return h, h, x.sum()

    stage = Stage(guard_aliases, alone, leaf(8, 16), leaf(16, 16))
    before = stage.marks
    stage.run()
    assert stage.marks == before


def test_without_it_the_specification_refuses_the_graph(monkeypatch: Any) -> None:
    def nothing(gm: torch.fx.GraphModule, config: Any) -> bool:
        return False

    passes = tuple(nothing if p is guard_aliases else p for p in pipeline.PASSES)
    monkeypatch.setattr(pipeline, "PASSES", passes)
    for scale in ("dynamic", "none"):
        torch._dynamo.reset()
        reason = fallback_reason(whole_and_view, leaf(8, 16), leaf(16, 16), loss_scale=scale)
        assert "no longer lies in the memory of" in reason


# -- guard_factorisations --------------------------------------------------------------------------


def gram(x: torch.Tensor) -> torch.Tensor:
    return x @ x.mT


def determined(x: torch.Tensor) -> torch.Tensor:
    """A positive definite matrix whose smallest eigenvalue FP16 would round away."""
    return torch.linalg.cholesky(gram(x) + 1e-2 * torch.eye(x.shape[0])).diagonal()


def features() -> torch.Tensor:
    """Sixteen points in eight dimensions: their Gram matrix has rank eight, entries near 10."""
    torch.manual_seed(0)
    return torch.randn(16, 8).mul(4).requires_grad_()


@LEVELS
def test_guard_factorisations_applies(level: str) -> None:
    seen = check(determined, features(), level=level, tolerance=1e-3)
    assert seen.ops("LOW") == []
    (plan,) = seen.plans
    product = next(n for n in plan.nodes if n.op == "aten::matmul")
    assert (product.precision, product.rule) == ("FULL", "guard")
    assert product.reason == "linalg_cholesky reads it, and would multiply its rounding"


@LEVELS
def test_reaches_through_views_and_elementwise_operators(level: str) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        symmetric = (gram(x) + gram(x).mT) / 2
        return torch.linalg.slogdet(symmetric.view(1, 16, 16)[0] + torch.eye(16))[1]

    assert check(program, features(), level=level, tolerance=1e-3).ops("LOW") == []


@LEVELS
def test_stops_at_the_first_product(level: str) -> None:
    """What the product itself reads may be low: a product of rounded factors is a true product."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.out(determined(m.embed(x)))

    head = module_of(forward, embed=nn.Linear(8, 8), out=nn.Linear(16, 4))
    seen = check(head, features(), level=level, tolerance=0.1, low=["linear"])
    assert seen.ops("LOW").count("linear") == 2
    assert "matmul" in seen.ops("FULL")


@LEVELS
def test_leaves_others_alone(level: str) -> None:
    """Another reader of the same value, and a product that nobody factorises."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.linalg.det(gram(x) + torch.eye(16)).log(), gram(x) @ x

    seen = check(program, features(), level=level)
    assert seen.ops("LOW").count("matmul") == 2
    assert seen.ops("FULL").count("matmul") == 1


@pytest.mark.parametrize("asked", [{"policy": Policy(low=["matmul"])}, {"level": "O3"}], ids=str)
def test_the_users_word_beats_it_and_o3_has_no_rules(asked: dict[str, Any]) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.slogdet(gram(x) + 100 * torch.eye(16))[1]

    seen = check(program, features(), **asked)
    assert "matmul" in seen.ops("LOW")
    assert "linalg_slogdet" in seen.ops("FULL")  # not even O3 runs an operator without a kernel


# -- keep_compared ---------------------------------------------------------------------------------


torch.manual_seed(0)
X, W = torch.randn(4, 16, 16), torch.randn(16, 16, requires_grad=True)

Program = Callable[[torch.Tensor], Any]


def stage(of: Program, *, weight: torch.Tensor = W, **options: Any) -> Stage:
    """`of` applied to a value that Inductor would compute wherever it is read."""
    return ran_twice(keep_compared, lambda x, w: of(F.gelu(x @ w)), X, weight, **options)


def kept(made: Stage) -> list[str]:
    return [n.name for n in made.gm.graph.nodes if ir.role(n) is ir.Role.KEPT]


def topk_mask(h: torch.Tensor) -> torch.Tensor:
    return h.masked_fill(h < h.topk(3, -1).values[..., -1:], 0.0)


def sorted_places(h: torch.Tensor) -> torch.Tensor:
    return torch.searchsorted(h.sort(-1).values, h)


def unpooled(h: torch.Tensor) -> torch.Tensor:
    return F.max_unpool1d(*F.max_pool1d(h, 2, return_indices=True), 2) == h


def scattered(h: torch.Tensor) -> torch.Tensor:
    places = torch.arange(16).view(1, 16, 1).expand(4, 16, 16) % 3
    return h.new_zeros(4, 3, 16).scatter_reduce(1, places, h, "amax")


COMPARING: dict[str, Program] = {
    "amax": lambda h: h.amax(1),
    "amax of a view": lambda h: h.mT[:, 1:].amax(1),
    "aminmax": lambda h: h.aminmax(dim=1).max,
    "max of all": lambda h: h.max(),
    "median of all": lambda h: h.median(),
    "norm of order infinity": lambda h: torch.linalg.vector_norm(h, float("inf")),
    "cdist of order infinity": lambda h: torch.cdist(h, h[:, :2], p=float("inf")),
    "scatter_reduce": scattered,
    "topk": topk_mask,
    "max": lambda h: h == h.max(-1, keepdim=True).values,
    "gather": lambda h: h == h.gather(-1, h.argmax(-1, keepdim=True)),
    "kthvalue": lambda h: h.clamp(min=h.kthvalue(3, -1, keepdim=True).values),
    "maximum": lambda h: torch.maximum(h, h.roll(1, -1)),
    "searchsorted": sorted_places,
    "max_unpool": unpooled,
    "unique": lambda h: h.flatten() == h.flatten().sort().values,
}  # fmt: skip


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", COMPARING)
def test_what_is_compared_is_kept(name: str, low: torch.dtype, level: str) -> None:
    assert kept(stage(COMPARING[name], low=low, level=level)) == ["gelu_kept"]


@pytest.mark.parametrize(
    "of",
    [
        lambda h: h.softmax(-1),
        lambda h: h.max(-1).values,
        lambda h: F.max_pool1d(h, 2),
        lambda h: h.topk(3, -1).values.sum(),
        lambda h: torch.linalg.vector_norm(h),
        lambda h: torch.cdist(h, h),
        lambda h: torch.maximum(h, h * 2),
        lambda h: h.clamp(0.1, 0.3),
        lambda h: torch.where(h != h, 0.0, h),
        lambda h: (h > 0.5) & (h < 1),
    ],
)  # fmt: skip
def test_nothing_else_is(of: Program) -> None:
    assert kept(stage(of)) == []


def test_a_maximum_without_a_gradient() -> None:
    assert kept(stage(lambda h: h.amax(1), weight=W.detach())) == []


def test_inputs_are_in_memory() -> None:
    made = Stage(keep_compared, lambda x: x == x.amax(1, keepdim=True), X)
    assert not made.run()


def test_all_readers_read_what_is_kept() -> None:
    made = stage(lambda h: (topk_mask(h), h @ h.mT, h), level="O2")
    (gelu,) = (n for n in made.gm.graph.nodes if n.name == "gelu")
    assert [user.name for user in gelu.users] == ["gelu_kept"]


def test_results_that_share_memory_still_do() -> None:
    made = stage(lambda h: (h, h.view(-1), h.amax(1)))
    assert kept(made) == ["gelu_kept"]
    for pass_ in mpcompile.capture.pipeline.PASSES:
        if pass_.__name__ in ("scale_gradients", "clean"):
            pass_(made.gm, made.config)
            mpcompile.capture.pipeline.verify(made.gm, pass_.__name__)


def test_a_graph_that_compares_otherwise_is_refused() -> None:
    made = stage(topk_mask)
    (node,) = (n for n in made.gm.graph.nodes if n.name == "gelu_kept")
    node.replace_all_uses_with(node.args[0])
    with pytest.raises(spec.SpecError, match="compares gelu"):
        mpcompile.capture.pipeline.verify(made.gm, "clean")
