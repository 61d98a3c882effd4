"""Embedding bags and sparse gradients, modules called with parameters of the caller's, and mixtures
of experts that fill a buffer they made.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops import MOSTLY_O1, O1, O2, PLAIN, WAYS, Way, agreeing, same, snapshot
from module_of import module_of
from torch import nn
from torch.func import functional_call

from mpcompile import MPCompileError


def bags(mode: str) -> Any:
    """Bags of words of any length, each word with a weight."""

    def forward(m: Any, words: torch.Tensor, offsets: torch.Tensor, weights: Any) -> torch.Tensor:
        return m.head(m.bag(words, offsets, per_sample_weights=weights))

    bag = nn.EmbeddingBag(30, 16, mode=mode)
    return module_of(forward, bag=bag, head=nn.Linear(16, 4))


@MOSTLY_O1
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@agreeing()
def test_embedding_bag(mode: str, way: Way) -> None:
    model = way.model(bags(mode))
    optimizer = way.optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    words, y = torch.randint(30, (4, 20)), torch.randint(4, (4, 5))
    offsets = torch.tensor([0, 4, 4, 9, 17])  # the second bag is empty
    weights = torch.rand(4, 20)
    for step, update in way.updates(4, model, optimizer, planted=2):
        logits = model(words[step], offsets, weights[step] if mode == "sum" else None)
        update(F.cross_entropy(logits, y[step]))


def words_net() -> Any:
    return module_of(
        lambda m, words: m.head(F.relu(m.hidden(m.table(words)).mean(1))),
        table=nn.Embedding(30, 16, sparse=True),
        hidden=nn.Linear(16, 32),
        head=nn.Linear(32, 4),
    )


@agreeing(WAYS, tolerance=0.05, bf16=0.3)
def test_sparse_embeddings_with_sparse_adam(way: Way) -> None:
    """SparseAdam for the table, as it is; any optimizer for the rest."""
    model = way.model(words_net())
    sparse = torch.optim.SparseAdam(model.table.parameters(), lr=0.01, eps=1e-3)
    if way.plain:  # what `way.optimizer` would do
        sparse.register_step_pre_hook(lambda *_: sparse.zero_grad() if way.planting else None)
    rest = [*model.hidden.parameters(), *model.head.parameters()]
    dense = way.optimizer(torch.optim.SGD(rest, lr=0.5))
    words, y = torch.randint(30, (4, 6, 5)), torch.randint(4, (4, 6))
    for step, factor in way.steps(4, model, sparse, dense, planted=2):
        sparse.zero_grad()
        dense.zero_grad()
        loss = F.cross_entropy(model(words[step]), y[step])
        (loss * factor).backward()
        assert model.table.weight.grad.is_sparse
        sparse.step()
        dense.step()
        way.log(loss)


def test_sparse_gradients_are_refused_by_an_mpoptimizer_before_anything_changes() -> None:
    way = O2.again
    model = way.model(words_net())
    optimizer = way.optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    before = snapshot([model])
    model(torch.randint(30, (6, 5))).square().sum().backward()
    words = r"make it dense \(nn\.Embedding\(sparse=False\)\), or use the plain torch\.optim"
    with pytest.raises(MPCompileError, match=words):
        optimizer.step()
    assert same(before, snapshot([model, optimizer]))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))


@pytest.mark.parametrize("planted", [None, 2])
@pytest.mark.parametrize("way", [O1], ids=str)
@agreeing()
def test_functional_call_with_replaced_parameters(way: Way, planted: int | None) -> None:
    """A hypernetwork's weights: gradients go through them to what made them."""
    model = way.model(network())
    makers = way.follow(nn.ParameterDict({
        name.replace(".", "_"): torch.zeros_like(p) for name, p in model.named_parameters()
    }))  # fmt: skip
    optimizer = way.optimizer(torch.optim.SGD(makers.parameters(), lr=0.5))
    x, y = torch.randn(4, 8, 16), torch.randint(4, (4, 8))
    before = snapshot([model])
    for step, update in way.updates(4, makers, optimizer, planted=planted):
        made = {
            name: p.detach() + makers[name.replace(".", "_")]
            for name, p in model.named_parameters()
        }
        update(F.cross_entropy(functional_call(model, made, (x[step],)), y[step]))
    assert same(before, snapshot([model]))


@agreeing(PLAIN)
def test_functional_call_in_a_meta_learning_step(way: Way) -> None:
    """First-order MAML: a step by torch.autograd.grad on a copy, the loss of what came of it."""
    model = way.model(network())
    optimizer = way.optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    x, y = torch.randn(4, 2, 8, 16), torch.randint(4, (4, 2, 8))
    for step, update in way.updates(4, model, optimizer, planted=1):
        inner = dict(model.named_parameters())
        loss = F.cross_entropy(functional_call(model, inner, (x[step, 0],)), y[step, 0])
        grads = torch.autograd.grad(loss, list(inner.values()))
        inner = {n: p - 0.1 * g for (n, p), g in zip(inner.items(), grads, strict=True)}
        update(F.cross_entropy(functional_call(model, inner, (x[step, 1],)), y[step, 1]))


def test_functional_call_at_o2_with_copies() -> None:
    """The copies are the module's own parameters'; replaced ones must not be read from them."""
    way = O2.again
    model = way.model(network())
    optimizer = way.optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    x = torch.randn(8, 16)
    model(x).square().sum().backward()
    optimizer.step()
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    assert not functional_call(model, zeros, (x,)).any()
    assert model(x).any()
    given = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    reference = network()
    functional_call(model, given, (x,)).square().mean().backward()
    optimizer.zero_grad()
    wanted = {n: p.detach().clone().requires_grad_() for n, p in given.items()}
    functional_call(reference, wanted, (x,)).square().mean().backward()
    for name, p in given.items():
        expected = wanted[name].grad
        assert (p.grad - expected).norm() <= 0.02 * expected.norm(), name


def test_functional_call_by_a_plain_way_leaves_no_gradient_behind() -> None:
    way = O1.again
    model = way.model(network())
    given = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    functional_call(model, given, (torch.randn(8, 16),)).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None and p.grad.any() for p in given.values())


# -- experts ---------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Top-1 routing; each expert's results are put where its tokens came from."""

    def __init__(self, fill: str) -> None:
        super().__init__()
        self.fill, self.router = fill, nn.Linear(16, 2)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor, places: list[torch.Tensor]) -> torch.Tensor:
        gates = self.router(x).softmax(-1)
        out = torch.zeros_like(x) if self.fill != "slices" else x.new_zeros(x.shape)
        for i, (expert, index) in enumerate(zip(self.experts, places, strict=True)):
            result = expert(x[index]) * gates[index, i, None]
            if self.fill == "index_add_":
                out.index_add_(0, index, result)
            elif self.fill == "index_copy_":
                out.index_copy_(0, index, result)
            elif self.fill == "index_put_":
                out[index] = result
            elif self.fill == "scatter_add_":
                out.scatter_add_(0, index[:, None].expand_as(result), result)
            else:
                out[i * 4 : i * 4 + 4] = result
        return out


FILLS = ["index_add_", "index_copy_", "index_put_", "scatter_add_", "slices"]


@pytest.mark.slow_rows("a loop in each way of training, against FP64")
@pytest.mark.parametrize("way", [O1, O2], ids=str)
@pytest.mark.parametrize("fill", [*FILLS[:-1], "slices"])
@agreeing()
def test_a_filled_buffer_is_returned(fill: str, way: Way) -> None:
    model = way.model(Experts(fill))
    head = way.model(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 4)))
    parameters = [*model.parameters(), *head.parameters()]
    optimizer = way.optimizer(torch.optim.SGD(parameters, lr=0.5))
    x, y = torch.randn(3, 8, 16), torch.randint(4, (3, 8))
    for step, update in way.updates(3, model, head, optimizer, planted=1):
        order = torch.randperm(8)
        update(F.cross_entropy(head(model(x[step], [order[:4], order[4:]])), y[step]))


class Residual(Experts):
    """The same, with the buffer used once more before it leaves."""

    def forward(self, x: torch.Tensor, places: list[torch.Tensor]) -> torch.Tensor:
        return x + super().forward(x, places)


@MOSTLY_O1
@pytest.mark.parametrize("fill", FILLS)
@agreeing()
def test_a_filled_buffer_is_added_to_the_input(fill: str, way: Way) -> None:
    model = way.model(Residual(fill))
    optimizer = way.optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    x, y = torch.randn(3, 8, 16), torch.randn(3, 8, 16)
    for step, update in way.updates(3, model, optimizer, planted=1):
        order = torch.randperm(8)
        update(F.mse_loss(model(x[step], [order[:4], order[4:]]), y[step]))
