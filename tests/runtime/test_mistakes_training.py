"""Mistakes in a training loop: what is said, or that nothing is lost."""

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from block_net import Net
from torch import nn

import mpcompile as module
from mpcompile import MPCompileError, MPCompileWarning

# Any: a type checker would find some of these mistakes.
mp: Any = module
mpcompile, train_step, MPOptimizer, Policy = (
    mp.mpcompile, mp.train_step, mp.MPOptimizer, mp.Policy,
)  # fmt: skip

EAGER = {"emit": "eager", "dtype": "fp16"}
Loop = Callable[[], Any]


def batch(size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 8), torch.randint(4, (size,))


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def generated(model: nn.Module) -> Any:
    return MPOptimizer(sgd(model), emit="eager")


def loss_of(model: Any) -> torch.Tensor:
    x, y = batch()
    return F.cross_entropy(model(x), y)


def backward(level: str = "O1") -> tuple[Any, Any]:
    """A compiled model that has gone backward, and its MPOptimizer."""
    model = mpcompile(Net(), level=level, **EAGER)
    optimizer = generated(model)
    loss_of(model).backward()
    return model, optimizer


def step(**options: Any) -> Callable[..., Any]:
    model = Net()
    given: dict[str, Any] = {"loss_fn": F.cross_entropy, **EAGER, **options}
    return train_step(model, sgd(model), **given)


# -- refused ---------------------------------------------------------------------------------------


def cast(change: Callable[[Any], Any]) -> Loop:
    return lambda: loss_of(change(mpcompile(Net(), **EAGER)))


def autocast_forward() -> None:
    model = Net()
    model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)  # type: ignore[method-assign]
    mpcompile(model, **EAGER)(batch()[0])


def of_a_copy() -> None:
    model = mpcompile(Net(), **EAGER)
    mp.compiled_plans(copy.deepcopy(model))


def made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = Net()
    loss_of(mpcompile(model, **EAGER))


def traced() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of TorchScript
        model = torch.jit.trace(Net(), batch()[0])  # type: ignore[no-untyped-call]
    mpcompile(model)


REFUSED: dict[str, tuple[Loop, str]] = {
    "half": (cast(lambda m: m.half()), "It was cast after mpcompile()"),
    "bfloat16": (cast(lambda m: m.bfloat16()), "copy.deepcopy(model).to(dtype)"),
    "meta": (
        cast(lambda m: m.to("meta")),
        "is on meta; supported devices: cuda, cpu. It was moved there after mpcompile()",
    ),
    "forward": (autocast_forward, "was replaced by one under autocast(torch.bfloat16)"),
    "inference mode": (made_in_inference_mode, "make it outside, or load its state_dict()"),
    "TorchScript": (traced, "TorchScript can't be captured; give the model or the function that"),
    "copy": (of_a_copy, "or is a copy of one that was. (Of a training step, ask the step"),
    "accumulate=3": (
        lambda: step(accumulate=3)(*batch(16)),
        "accumulate=3 can't split a batch of 16 into equal parts: give batches of a multiple of 3",
    ),
    "accumulate=16": (
        lambda: step(accumulate=16)(*batch(4)),
        "accumulate=16 can't split a batch of 4 into equal parts",
    ),
    "sizes": (
        lambda: step(accumulate=2)(batch(4)[0], batch(8)[1]),
        "splits all arguments alike along dim 0, and they have 4, 8 rows",
    ),
    "a number": (
        lambda: step(accumulate=2)(batch(4)[0], torch.tensor(1)),
        "splits each argument along its dim 0, and can't split a number",
    ),
    "a dict": (lambda: step(accumulate=2)({"x": 1}, batch()[1]), "can't split a dict"),
    "no target": (lambda: step()(batch()[0]), "give the model's inputs and, last, the target"),
    "a tuple": (lambda: step()(batch()), "step(tuple): give the model's inputs and, last, the"),
    "unreduced": (
        lambda: step(loss_fn=nn.CrossEntropyLoss(reduction="none"))(*batch()),
        'a tensor of shape (4,); give one number, such as its mean (reduction="mean")',
    ),
    "detached": (
        lambda: step(loss_fn=lambda p, y: F.cross_entropy(p.detach(), y))(*batch()),
        "the loss has no gradient: it doesn't depend on a trained parameter",
    ),
    "item": (
        lambda: step(loss_fn=lambda p, y: 0.5)(*batch()),
        "loss_fn returned a float, not a tensor",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name: str) -> None:
    loop, words = REFUSED[name]
    with pytest.raises(MPCompileError, match=re.escape(words)):
        loop()


@pytest.mark.parametrize("order", ["before", "after"])
def test_torch_compile_beside_mpcompile_is_no_mistake(order: str) -> None:
    by_torch: Any = torch.compile(Net() if order == "before" else mpcompile(Net(), **EAGER))
    model = mpcompile(by_torch, strict=True, **EAGER) if order == "before" else by_torch
    model(batch()[0]).sum().backward()
    (plan,) = mp.compiled_plans(model)
    assert plan.counts()["LOW"] == 2


# -- said ------------------------------------------------------------------------------------------


def stepped_first(make: Callable[[Any], Any]) -> Loop:
    def loop() -> None:
        model = mpcompile(Net(), **EAGER)
        optimizer = make(model)
        for _ in range(2):
            loss = loss_of(model)
            optimizer.step()
            optimizer.zero_grad()
            del loss

    return loop


def of_another_model() -> None:
    model, optimizer = mpcompile(Net(), **EAGER), generated(Net())
    loss_of(model).backward()
    optimizer.step()


def whole(**options: Any) -> Any:
    """A whole step in the wrong order; `options` are its own."""
    model = Net()
    optimizer = sgd(model)

    @mpcompile(**EAGER, **options)
    def stepped(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        if not options:
            optimizer.step()
        loss.backward()
        optimizer.zero_grad()
        return loss.detach()

    stepped(*batch())


def function_with(**policy: Any) -> Loop:
    model = Net()
    compiled = mpcompile(lambda x: model(x), policy=Policy(**policy), **EAGER)
    return lambda: compiled(batch()[0])


NO_GRADIENT = "changes nothing, since none of its parameters has a gradient: call loss.backward()"

SAID: dict[str, tuple[Loop, str]] = {
    "step first": (stepped_first(sgd), f"this step of SGD {NO_GRADIENT} before step()"),
    "generated": (stepped_first(generated), f"this step of MPOptimizer {NO_GRADIENT}"),
    "another model": (of_another_model, "are these the parameters of another model?"),
    "step first in a whole step": (whole, f"this step of SGD {NO_GRADIENT}"),
    "modules": (
        function_with(modules={"fcX": "fp32"}),
        "Policy(modules=...): 'fcX' matches no module; did you mean 'fc",
    ),
    "nodes": (function_with(nodes={"linaer": "fp32"}), "no node 'linaer'; did you mean 'linear'?"),
    "modules of a step": (
        lambda: whole(policy=Policy(modules={"fcX": "fp32"})),
        "stepped: Policy(modules=...): 'fcX' matches no module; did you mean 'fc",
    ),
    "head": (
        lambda: step(loss_fn=lambda p, y: p.square().mean(), fuse_head=True)(*batch()),
        "fuse_head=True, but there is no cross_entropy in what was compiled",
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_it_is_said_once(name: str) -> None:
    loop, words = SAID[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MPCompileWarning)
        loop()
    said = [str(one.message) for one in caught if issubclass(one.category, MPCompileWarning)]
    assert len(said) == 1, said
    assert words in said[0]


def test_a_right_order_is_not_spoken_of() -> None:
    """A closure makes the gradients within the step; frozen parameters have none."""
    model = mpcompile(Net(), **EAGER)
    model.fc1.requires_grad_(False)
    for optimizer in (generated(model), sgd(model)):

        def closure(optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss

        optimizer.step(closure)
        optimizer.zero_grad()
        optimizer.step()  # not the first
