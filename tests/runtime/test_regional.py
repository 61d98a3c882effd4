"""`regional=True`: equal modules share one compile, and nothing else of a training changes."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from module_of import module_of
from torch import Tensor, nn

from mpcompile import (
    LossScale,
    MPCompileError,
    MPCompileWarning,
    MPOptimizer,
    Policy,
    compiled_plans,
    loss_scale_of,
    mpcompile,
)
from mpcompile.planner.graph_plan import GraphPlan

BLOCKS, WIDTH = 4, 16


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.factor, self.activation = 1, "gelu"

    def forward(self, x: Tensor) -> Tensor:
        hidden = getattr(F, self.activation)(self.up(self.norm(x)))
        return x + self.factor * self.down(hidden)


class Net(nn.Module):
    """Embedding, equal blocks in a loop, norm, head and loss."""

    def __init__(self, blocks: int = BLOCKS, width: int = WIDTH) -> None:
        super().__init__()
        self.words = nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 32)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), words.flatten())


WORDS = torch.arange(24).reshape(3, 8)


def compiled(model: nn.Module, **options: Any) -> nn.Module:
    given = {"dtype": torch.float16, "emit": "aot_eager", "strict": True, "regional": True}
    return mpcompile(model, **{**given, **options})


def of_blocks(model: nn.Module) -> list[GraphPlan]:
    """The plans of graphs that hold a block's product, trained ones alone."""
    return [p for p in compiled_plans(model) if any("down" in n.module for n in p.nodes)]


def exact(model: nn.Module) -> dict[str, Tensor]:
    """The gradients in FP64."""
    twin = copy.deepcopy(model).double()
    twin(WORDS).backward()
    return {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}


def assert_near(model: nn.Module, gradients: dict[str, Tensor], times: float = 1.0) -> None:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == gradients.keys()
    for name, wanted in gradients.items():
        off = torch.linalg.vector_norm(found[name].double() / times - wanted)
        assert off < 0.02 * torch.linalg.vector_norm(wanted), name


# -- what is compiled ------------------------------------------------------------------------------


@pytest.mark.slow("compiles blocks one by one")
def test_equal_blocks_are_one_graph() -> None:
    model = compiled(Net())
    model(WORDS).backward()
    assert len(of_blocks(model)) == 1
    low = [n for plan in compiled_plans(model) for n in plan.nodes if n.precision == "LOW"]
    assert {"up", "down", "head"} <= {n.module.rpartition(".")[2] for n in low}


@pytest.mark.slow("compiles blocks one by one")
def test_blocks_of_other_sizes_are_fixed_in_size_and_apart() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        for stage in m.stages:
            x = stage(x)
        return x

    stages = [nn.Sequential(Block(w), Block(w), nn.Linear(w, 2 * w)) for w in (8, 16)]
    model = compiled(module_of(forward, stages=nn.ModuleList(stages)))
    x = torch.randn(3, 8)
    twin = copy.deepcopy(model).double()
    y = model(x)
    torch.testing.assert_close(y.double(), twin(x.double()), rtol=1e-2, atol=1e-2)
    # The input of the very first block needs no gradient.
    assert len(of_blocks(model)) == 3
    assert [n.op for p in of_blocks(model) for n in p.nodes if n.op.startswith("aten::sym")] == []


@pytest.mark.slow("compiles blocks one by one")
def test_more_kinds_of_blocks_than_dynamo_compiles_of_a_function() -> None:
    kinds = ["gelu", "silu", "tanh", "softplus", "mish", "sigmoid"]
    model = Net(len(kinds))
    for block, kind in zip(model.blocks, kinds, strict=True):
        block.activation = kind  # type: ignore[assignment]
    gradients = exact(model)
    compiled(model)
    with torch._dynamo.config.patch(recompile_limit=4):
        model(WORDS).backward()
    assert len(of_blocks(model)) == len(kinds)
    assert_near(model, gradients)


@pytest.mark.slow("compiles blocks one by one")
def test_a_policy_of_one_block_holds_for_that_one() -> None:
    model = compiled(Net(), policy=Policy(modules={r"blocks\.2\.up": "fp32"}))
    model(WORDS).backward()
    pinned = {
        n.module: n.precision
        for plan in of_blocks(model)
        for n in plan.nodes
        if n.op == "aten::linear" and n.module.endswith("up")
    }
    assert pinned == {"blocks.0.up": "LOW", "blocks.2.up": "FULL"}


@pytest.mark.slow("compiles blocks one by one")
def test_hooks_of_one_block_are_its_own() -> None:
    model = compiled(Net())
    seen: list[int] = []
    model.blocks[1].register_forward_hook(lambda *_: seen.append(1))
    for _ in range(2):
        model(WORDS).backward()
    assert seen == [1, 1]


@pytest.mark.slow("compiles blocks one by one")
def test_a_hook_that_comes_later_and_goes_again() -> None:
    model = compiled(Net())
    plain = model(WORDS).item()
    handle = model.blocks[1].register_forward_hook(lambda module, given, result: 3 * result)
    hooked, wanted = model(WORDS).item(), copy.deepcopy(model).double()(WORDS).item()
    assert abs(hooked - wanted) < 0.01 < abs(plain - wanted)
    handle.remove()
    assert abs(model(WORDS).item() - plain) < 1e-3


# -- the numbers -----------------------------------------------------------------------------------


@pytest.mark.slow("compiles blocks one by one")
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("emit", ["eager", "aot_eager"])
def test_gradients_are_those_of_fp64(level: str, emit: str) -> None:
    model = Net()
    gradients = exact(model)
    compiled(model, level=level, emit=emit)
    for times in (1.0, 2.0, 3.0):  # they accumulate
        model(WORDS).backward()
        assert_near(model, gradients, times)


@pytest.mark.slow("compiles blocks one by one")
def test_a_frozen_block_and_frozen_words() -> None:
    model = Net()
    model.words.requires_grad_(False)
    model.blocks[2].requires_grad_(False)
    gradients = exact(model)
    compiled(model)
    model(WORDS).backward()
    assert_near(model, gradients)
    model.blocks[2].requires_grad_(True)
    model.zero_grad()
    gradients = exact(copy.deepcopy(model))
    model(WORDS).backward()
    assert_near(model, gradients)


@pytest.mark.slow("compiles blocks one by one")
def test_blocks_that_share_a_parameter() -> None:
    model = Net()
    model.blocks[3].up.weight = model.blocks[1].up.weight  # type: ignore[union-attr]
    gradients = exact(model)
    compiled(model, level="O2")
    optimizer = MPOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), emit="eager")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(WORDS).backward()
    optimizer.step()
    for name, p in model.named_parameters():
        off = torch.linalg.vector_norm(
            before[name].double() - p.detach().double() - gradients[name]
        )
        assert off < 0.02 * torch.linalg.vector_norm(gradients[name]), name


@pytest.mark.slow("compiles blocks one by one")
@pytest.mark.parametrize("made", ["before", "after"])
@pytest.mark.parametrize("pad", ["never", "always"])
def test_steps_of_an_mp_optimizer_are_those_of_fp64(made: str, pad: str) -> None:
    model = Net(width=12 if pad == "always" else WIDTH)
    twin = copy.deepcopy(model).double()
    options: dict[str, Any] = {"level": "O2", "pad": pad}
    optimizer = None
    if made == "before":
        optimizer = MPOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), emit="eager")
    compiled(model, **options)
    if optimizer is None:
        model(WORDS)
        optimizer = MPOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), emit="eager")
    theirs = torch.optim.SGD(twin.parameters(), lr=0.5)
    for _ in range(3):
        for net, one in ((model, optimizer), (twin, theirs)):
            one.zero_grad()
            net(WORDS).backward()
            one.step()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        off = torch.linalg.vector_norm(p.detach().double() - q.detach())
        assert off < 2e-3 * torch.linalg.vector_norm(q), name
    assert loss_scale_of(model).skipped_steps == 0


# -- the loss scale --------------------------------------------------------------------------------


@pytest.mark.slow("compiles blocks one by one")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_one_scale_for_all_and_an_overflow_in_one_block_skips_the_step(level: str) -> None:
    model = compiled(Net(), level=level, loss_scale=LossScale.dynamic(1024.0))
    if level == "O2":
        optimizer: Any = MPOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), emit="eager")
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    bad: list[float] = [1.0]
    model.norm.register_full_backward_pre_hook(lambda _, grads: (grads[0] * bad[0],))
    for factor in (1.0, 1e6, 1.0):
        bad[0] = factor
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.zero_grad()
        model(WORDS).backward()
        optimizer.step()
        moved = [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]
        assert bool(moved) == (factor == 1.0), (factor, moved)
    scale = loss_scale_of(model)
    assert (scale.skipped_steps, scale.value) == (1, 512.0)


def test_the_first_backward_finds_the_scale() -> None:
    model = Net()
    gradients = exact(model)
    compiled(model)
    model(WORDS).backward()
    assert_near(model, gradients)
    assert 1.0 < loss_scale_of(model).value < 2.0**17


class Tied(Net):
    """Its head is a function in the frame that holds the loop."""

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.words.weight)
        return F.cross_entropy(logits.flatten(0, 1), words.flatten())


def test_a_product_beside_the_loop_is_said() -> None:
    model = Tied()
    del model.head
    gradients = exact(model)
    compiled(model, strict=False)
    with pytest.warns(
        MPCompileWarning, match="of the product FLOPs of Tied ran in compiled graphs"
    ):
        model(WORDS).backward()
    assert_near(model, gradients)


# -- what is refused, and what stays ---------------------------------------------------------------


@pytest.mark.slow("compiles blocks one by one")
def test_a_whole_step_holds_the_blocks_as_a_part_of_it() -> None:
    model = compiled(Net(), dtype=torch.bfloat16)
    optimizer = MPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @mpcompile(dtype=torch.bfloat16, emit="eager", strict=True)
    def step() -> Tensor:
        loss: Tensor = model(WORDS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    model(WORDS)  # divides it
    losses = [float(step()) for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert step.left is None  # type: ignore[attr-defined]


def test_evaluation_and_direct_calls() -> None:
    model = compiled(Net())
    twin = copy.deepcopy(model).double()
    with torch.no_grad():
        x = model.words(WORDS)
        torch.testing.assert_close(model(WORDS).double(), twin(WORDS), rtol=1e-2, atol=1e-2)
        y = model.blocks[3](x)
        torch.testing.assert_close(y.double(), twin.blocks[3](x.double()), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    "what", [lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), lambda: lambda x: x]
)
def test_what_has_no_equal_modules_is_refused(what: Callable[[], Any]) -> None:
    with pytest.raises(MPCompileError, match="regional=True"):
        mpcompile(what(), regional=True)


def test_the_backend_refuses_it() -> None:
    block = torch.compile(Block(), backend="mpcompile", options={"regional": True})
    with pytest.raises(Exception, match="regional=True is for mpcompile"):
        block(torch.randn(2, WIDTH))
