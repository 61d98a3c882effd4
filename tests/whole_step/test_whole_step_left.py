"""Training steps that can't be one graph run in pieces, say why once, and are right."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from module_of import function_of
from torch import nn
from torch.utils.checkpoint import checkpoint
from whole_steps import BOTH, O1, Run, Setting, agree, agree_left, batches, net

from mpcompile import MPCompileWarning, mpcompile

Step = Callable[..., Any]


Doubled = function_of(lambda ctx, x: x * 2, lambda ctx, grad: grad * 2)


def stepping(
    loss_of: Callable[..., Any], *, end: Callable[..., Any] = torch.Tensor.detach
) -> Callable[[Run], Step]:
    """A step with this loss: a function of the model and the arguments."""

    def program(run: Run) -> Step:
        model = run.model(net())
        of_model = run.forward(lambda *args: loss_of(model, *args))
        return run.usual(of_model, run.sgd(model.parameters()), end=end)

    return program


def plain(model: nn.Module, x: torch.Tensor, y: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y) * f


def balanced(model: nn.Module, x: torch.Tensor, y: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
    counts = torch.bincount(y)
    return (F.cross_entropy(model(x), y, reduction="none") / counts[y]).mean() * f


def branching(loss: torch.Tensor) -> torch.Tensor:
    return loss.detach() * (2 if loss > 0 else 3)


def printing(loss: torch.Tensor) -> torch.Tensor:
    print("loss")
    return loss.detach()


ENDS = {
    "item": (
        lambda loss: loss.item(),
        r"Python number of a tensor's value \(at test_whole_step_left.py:\d+: .*loss.item\(\).*\); "
        r"return the tensor, as loss.detach\(\), and call .item\(\) on that",
    ),
    "branch": (
        branching,
        r"left.py:\d+: return loss.detach\(\) \* \(2 if loss > 0 else 3\)\); do that outside",
    ),
    "print": (printing, r'left.py:\d+: print\("loss"\)\); do that outside of the step$'),
}
"""What is done with the loss, and what the reason says."""


@pytest.mark.slow("compiles whole steps of several kinds, against FP64")
@BOTH
@pytest.mark.parametrize("name", ENDS)
def test_python_that_reads_a_value(setting: Setting, name: str) -> None:
    end, reason = ENDS[name]
    run = agree_left(stepping(plain, end=end), batches(4, factors={2: 1e30}), setting, reason)
    assert run.scale.skipped_steps == 1


@pytest.mark.slow("compiles whole steps of several kinds, against FP64")
def test_a_size_that_only_a_run_tells() -> None:
    """As many counts as there are classes in the batch, and the backward needs them."""
    reason = (
        r"size depends on a tensor's values \(at \S+left.py:\d+: counts = .*\); do that outside"
    )
    agree_left(stepping(balanced), batches(2), O1, reason)


@pytest.mark.slow("compiles whole steps of several kinds, against FP64")
def test_parameters_that_have_a_gradient_in_some_calls() -> None:
    """Each set of them is compiled as a whole, up to torch's limit."""
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)

    def step(x: torch.Tensor, kept: tuple[bool, ...]) -> torch.Tensor:
        for layer, keep in zip(layers, kept, strict=True):
            x = x + layer(x) if keep else x
        loss = x.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    calls = [(torch.randn(8, 4), (n != 1, n != 2, n != 3)) for n in (0, 1, 2, 0, 3)]
    start = [p.detach().clone() for p in layers.parameters()]
    wanted = [step(*call) for call in calls]
    trained = [p.detach().clone() for p in layers.parameters()]
    with torch.no_grad():
        for p, before in zip(layers.parameters(), start, strict=True):
            p.copy_(before)
    optimizer.state.clear()
    with torch._dynamo.config.patch(recompile_limit=2):
        whole = mpcompile(step, dtype=torch.bfloat16, emit="eager")
        losses = [whole(*call) for call in calls[:2]]
        with pytest.warns(MPCompileWarning, match="more often than torch compiles it again"):
            losses.append(whole(*calls[2]))
    losses += [whole(*call) for call in calls[3:]]
    torch.testing.assert_close(losses, wanted, rtol=0.02, atol=0)
    torch.testing.assert_close([*layers.parameters()], trained, rtol=0.02, atol=0.01)


@pytest.mark.slow("compiles whole steps of several kinds, against FP64")
@BOTH
def test_a_checkpoint(setting: Setting) -> None:
    def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(lambda x: model[1](model[0](x)), x, use_reentrant=False)
        return F.cross_entropy(model[2](hidden), y) * f

    agree_left(stepping(loss_of), batches(4, factors={2: 1e30}), setting, "checkpoint")


@pytest.mark.slow_rows("compiles whole steps of several kinds, against FP64")
@BOTH
def test_an_autograd_function_is_traced(setting: Setting) -> None:
    def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(Doubled.apply(model(x)), y) * f

    agree(stepping(loss_of), batches(4, factors={2: 1e30}), setting)


@pytest.mark.slow_rows("compiles whole steps of several kinds, against FP64")
@BOTH
def test_a_parameter_written_from_gradients(setting: Setting) -> None:
    """A loss after that depends on the written one: whose scale would its gradient have?"""

    def program(run: Run) -> Step:
        model = run.model(net())
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        def step(x: torch.Tensor, y: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
            weight = model[0].weight
            loss = F.cross_entropy(model(x), y) * f
            (slope,) = torch.autograd.grad(loss, weight)
            with torch.no_grad():
                weight -= 0.1 * slope
            total = F.cross_entropy(model(x), y) * f
            total.backward()
            optimizer.step()
            optimizer.zero_grad()
            return total.detach()

        return step

    run = Run(True, setting)
    step = run.step(program(run))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MPCompileWarning)
        step(*batches(1)[0])
    assert step.left == "a loss is computed from gradients"


@pytest.mark.slow("compiles whole steps of several kinds, against FP64")
@BOTH
def test_a_gradient_of_its_input_is_read(setting: Setting) -> None:
    def program(run: Run) -> Step:
        model = run.model(net())
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        loss_of = run.loss_of(model)

        def step(x: torch.Tensor, y: torch.Tensor, f: torch.Tensor) -> Any:
            x = x.detach().requires_grad_()
            loss = loss_of(x, y, f)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach(), x.grad

        return step

    agree_left(program, batches(3), setting, "does not require grad|requires_grad_")


@pytest.mark.slow("compiles whole steps of several kinds, against FP64")
@pytest.mark.parametrize("retain", [False, True], ids=["used up", "retained"])
def test_a_result_with_a_graph(retain: bool) -> None:
    """`return loss` is detached; a loss that the caller may go backward from again is not."""

    def program(run: Run) -> Step:
        model = run.model(net())
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        return run.usual(run.loss_of(model), optimizer, end=lambda loss: loss, retain_graph=retain)

    if retain:
        agree_left(program, batches(3), O1, "returns a value that still needs a gradient")
    else:
        agree(program, batches(3), O1)


@pytest.mark.slow("compiles whole steps of several kinds, against FP64")
def test_sparse_gradients() -> None:
    def program(run: Run) -> Step:
        model = run.model(nn.Sequential(nn.Embedding(8, 16, sparse=True), nn.Linear(16, 8)))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        return run.usual(run.forward(lambda x, y: F.cross_entropy(model(x), y)), optimizer)

    calls = [(torch.randint(0, 8, (5,)), torch.randint(0, 8, (5,))) for _ in range(3)]
    agree_left(program, calls, O1, "sparse")


def test_lbfgs_and_its_closure() -> None:
    """As a function its closure is called by code that Dynamo skips, so it runs in FP32."""
    ends = []
    for whole in (True, False):
        torch.manual_seed(0)
        run = Run(whole, O1)
        model = net()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

        def step(
            x: torch.Tensor, y: torch.Tensor, model: Any = model, optimizer: Any = optimizer
        ) -> torch.Tensor:
            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            F.cross_entropy(model(x), y).backward()
            return optimizer.step(closure).detach()

        step = run.step(step)
        for i, (x, y, _) in enumerate(batches(3)):
            if whole and i == 0:
                with pytest.warns(MPCompileWarning, match="graph_break"):
                    step(x, y)
            else:
                step(x, y)
        ends.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(*ends, rtol=2e-2, atol=2e-3)


@BOTH
def test_a_call_without_grad_mode(setting: Setting) -> None:
    run = Run(True, setting)
    step = run.step(stepping(plain)(run))
    for i, call in enumerate(batches(3)):
        if i == 1:
            with torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad"):
                step(*call)
        else:
            step(*call)
    assert step.left is None
