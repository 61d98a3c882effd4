"""guard_factorisations: what a matrix factorisation reads is computed in FP32."""

import torch
from compare import LEVELS, check
from torch import nn

from mpcompile import Policy


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
def test_applies(level: str) -> None:
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

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Linear(8, 8), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(determined(self.embed(x)))

    seen = check(Head(), features(), level=level, tolerance=0.1, low=["linear"])
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


def test_the_users_word_beats_it() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.det(gram(x) + 100 * torch.eye(16)).log()

    assert "matmul" in check(program, features(), policy=Policy(low=["matmul"])).ops("LOW")


def test_o3_has_no_rules() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.slogdet(gram(x) + 100 * torch.eye(16))[1]

    seen = check(program, features(), level="O3")
    assert "matmul" in seen.ops("LOW")
    assert "linalg_slogdet" in seen.ops("FULL")  # not even O3 runs an operator without a kernel
