"""What writes weights in a program: whoever keeps a copy of them must notice each."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)


def _swap_averages(model: nn.Module) -> None:
    weights = list(model.parameters())
    with torch.no_grad():
        torch._foreach_lerp_(weights, [torch.ones_like(p) for p in weights], 0.5)


def _stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        p.grad = None
        p.grad_dtype = torch.float32
        p.grad = torch.ones_like(p)
    optimizer.step()
    model.zero_grad()


def _in_inference_mode(model: nn.Module) -> None:
    with torch.inference_mode():
        for p in model.parameters():
            p.mul_(0.5)


def _new_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data * 0.5


def _data_there_and_back(model: nn.Module) -> None:
    """The last memory may be the first again."""
    for p in model.parameters():
        p.data = p.data.double()
        p.data = (p.data * 0.5).float()


WRITES: dict[str, Callable[[nn.Module], object]] = {
    "in place": in_place,
    "load_state_dict": lambda m: m.load_state_dict(
        {k: torch.full_like(v, 0.3, dtype=torch.float64) for k, v in m.state_dict().items()}
    ),
    "assigned": lambda m: m.load_state_dict(
        {k: v * 0.5 for k, v in m.state_dict().items()}, assign=True
    ),
    "an optimizer": lambda m: _stepped(m, torch.optim.SGD(m.parameters(), lr=0.1)),
    "one by foreach": lambda m: _stepped(m, torch.optim.Adam(m.parameters(), lr=0.1, foreach=True)),
    "averages swapped": _swap_averages,
    "in inference mode": _in_inference_mode,
    "detached": lambda m: [p.detach().mul_(0.5) for p in m.parameters()],
    "through .data": lambda m: [p.data.mul_(0.5) for p in m.parameters()],
    "new .data": _new_data,
    ".data there and back": _data_there_and_back,
    "to another dtype and back": lambda m: in_place(m.double().float()),
    "an EMA's copy": lambda m: [p.data.copy_(p.data.clone() * 0.5) for p in m.parameters()],
    "a vector": lambda m: vector_to_parameters(
        parameters_to_vector(m.parameters()).detach() * 0.5, m.parameters()
    ),
    "the state's tensors": lambda m: [v.mul_(0.5) for v in m.state_dict().values()],
    "through .data of the state's": lambda m: [v.data.mul_(0.5) for v in m.state_dict().values()],
    "through .data of a view": lambda m: [p.detach().view(-1).mul_(0.5) for p in m.parameters()],
    "an array": lambda m: [np.divide(a := p.detach().numpy(), 2, a) for p in m.parameters()],
    "an initialiser": lambda m: [nn.init.constant_(p, 0.25) for p in m.parameters()],
}

HANDLES: dict[str, Callable[[torch.Tensor], Any]] = {
    "a tensor from .data": lambda p: p.data,
    "a view of it": lambda p: p.data[:],
    "an array of it": lambda p: p.data.numpy(),
    "a detached tensor": torch.Tensor.detach,
    "a view of that": lambda p: p.detach()[:],
    "an array of that": lambda p: p.detach().numpy(),
}
"""By which a weight may be written without its version's saying so."""
