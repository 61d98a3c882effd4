"""One run of a random program, and all that its caller sees of it.

In FP64, plain or with the noise of FP16; in FP32; and compiled once, for several calls.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fuzz_programs import BATCH, Program, draw_inputs
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

UNIT = 2.0**-11  # FP16: half the distance between 1 and the next number
SUBNORMAL = 2.0**-25  # and below its normal numbers
CARRIES = ("add", "sub", "mul", "clamp", "floor", "_to_copy")  # a position stays one


class Discarded(Exception):
    """The program itself is at fault, or torch."""


@dataclass
class Observed:
    """All that one run of a program shows to its caller, by name."""

    facts: dict[str, Any]
    values: dict[str, torch.Tensor | None]


class Noise(TorchDispatchMode):
    """Disturbs every new or written floating-point value by `amount` roundings, and watches sizes.

    Zeros stay: a mask or a padding is no less exact in FP16. So do values that come of no input,
    such as positions and what is computed of them alone, and the bounds of a clamp hold. Positions
    beyond 64, where FP16 is coarser than 1/16, are carried in FP32 also with an input added, as
    autocast does.
    """

    def __init__(self, amount: float, seed: int = 0, scale: float = 1.0) -> None:
        super().__init__()
        self.amount, self.scale = amount, scale
        self.generator = torch.Generator().manual_seed(seed)
        self.backward = False
        self.largest = {False: 0.0, True: 0.0}
        # Memory that comes of no input. The storages are kept, so that no other gets their place.
        self.exact: dict[int, Any] = {}
        self.positions: dict[int, Any] = {}  # likewise: those of an `arange`

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        schema = func._schema
        exact = self._is_exact(args, kwargs, results)
        if self._is_position(func, args, results) or exact or "empty" in schema.name:
            return results  # what memory held before is no value
        flat = results if isinstance(results, (tuple, list)) else (results,)
        for result, returned in zip(flat, schema.returns, strict=False):
            if returned.alias_info is None or returned.alias_info.is_write:
                for value in result if isinstance(result, (tuple, list)) else (result,):
                    self.disturb(value)
                    if self.amount and func is torch.ops.aten.clamp.default:
                        value.clamp_(*args[1:])
        return results

    def _is_exact(self, args: Any, kwargs: Any, results: Any) -> bool:
        """Whether results come of no input: note so."""
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        made = [x for x in pytree.tree_leaves(results) if isinstance(x, torch.Tensor)]
        exact = all(x.untyped_storage()._cdata in self.exact for x in given)
        for x in made:
            storage = x.untyped_storage()
            if exact:
                self.exact[storage._cdata] = storage
            else:
                self.exact.pop(storage._cdata, None)
        return exact

    def _is_position(self, func: Any, args: Any, results: Any) -> bool:
        """Whether the result is a large position: note so."""
        name = func._schema.name.partition("::")[2]
        given = [x.untyped_storage()._cdata for x in args if isinstance(x, torch.Tensor)]
        carried = name in CARRIES and not self.positions.keys().isdisjoint(given)
        if self.backward or not (name == "arange" or carried):
            return False
        if carried and (not results.numel() or float(results.abs().amax()) < 64):
            return False
        storage = results.untyped_storage()
        self.positions[storage._cdata] = storage
        return True

    def disturb(self, value: Any) -> None:
        if not isinstance(value, torch.Tensor) or value.dtype is not torch.float64:
            return
        if value.numel():
            largest = float(value.abs().amax())
            self.largest[self.backward] = max(self.largest[self.backward], largest)
        if self.amount and 0 not in value.stride():
            draw = torch.rand(value.shape, generator=self.generator, dtype=torch.float64) * 2 - 1
            least = SUBNORMAL / (self.scale if self.backward else 1.0)
            size = value.abs() * UNIT + least * (value != 0)
            value.add_(draw * size, alpha=self.amount)


class _Owner(nn.Module):
    """Hands a function the parameters and buffers that it takes last or first."""

    def __init__(self, function: Any, program: Program, leaves: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.names = [i.name for i in program.inputs]
        self.own = set()
        for item, value in zip(program.inputs, leaves, strict=True):
            if item.kind == "parameter":
                self.register_parameter(item.name, value)  # type: ignore[arg-type]
                self.own.add(item.name)
            elif item.kind == "buffer":
                self.register_buffer(item.name, value)
                self.own.add(item.name)

    def forward(self, **given: Any) -> Any:
        return self.function(*[getattr(self, n) if n in self.own else given[n] for n in self.names])


def _overlaps(x: torch.Tensor) -> bool:
    """Whether two elements have one place."""
    places = torch.arange(x.untyped_storage().nbytes() // x.element_size())
    return places.as_strided(x.size(), x.stride(), x.storage_offset()).unique().numel() < x.numel()


def _call(
    run: Callable[..., Any],
    program: Program,
    arguments: list[torch.Tensor],
    leaves: list[torch.Tensor],
    backward: Callable[[], Any] = lambda: None,
) -> Observed:
    """Call a program, then differentiate what it returns and what it wrote."""
    was_leaf = [a.is_leaf for a in arguments]
    output = run(*arguments)
    flat, structure = pytree.tree_flatten(output)
    tensors = [x for x in flat if isinstance(x, torch.Tensor)]
    facts: dict[str, Any] = {"structure": str(structure)}
    for k, x in enumerate(flat):
        facts[f"result {k}"] = (
            (x.dtype, tuple(x.shape), x.requires_grad) if isinstance(x, torch.Tensor) else x
        )
        if isinstance(x, torch.Tensor):
            facts[f"result {k} is an argument"] = [
                item.name
                for item, a in zip(program.inputs, arguments, strict=True)
                if a is x and item.name in program.returned
            ]
            facts[f"result {k} is the same as"] = [j for j, a in enumerate(flat) if a is x]
    for item, x in zip(program.inputs, arguments, strict=True):
        facts[f"{item.name} after"] = (x.dtype, tuple(x.shape), x.requires_grad)
    if program.doubled is not None and tensors:
        written = tensors[program.doubled % len(tensors)]
        if _overlaps(written):
            raise Discarded("the caller writes to elements that share memory, which is undefined")
        with torch.enable_grad():
            written.mul_(2)
    values: dict[str, torch.Tensor | None] = {}
    for k, x in enumerate(flat):
        if isinstance(x, torch.Tensor):
            values[f"result {k}"] = x.detach().clone()
    roots = [x for x in tensors if x.requires_grad]
    for item, x, leaf in zip(program.inputs, arguments, was_leaf, strict=True):
        values[f"{item.name} after"] = x.detach().clone()
        if x.requires_grad and not (leaf and item.trained):
            roots.append(x)
    loss = [_weighted(x, k) for k, x in enumerate(roots) if x.is_floating_point()]
    backward()
    if loss:
        _differentiate(loss, program.backwards)
    for item, leaf in zip(program.inputs, leaves, strict=True):
        if item.trained:
            values[f"gradient of {item.name}"] = leaf.grad
    return Observed(facts, values)


def _differentiate(losses: list[torch.Tensor], how: str) -> None:
    """See `Program.backwards`."""
    if how == "each":
        for k, loss in enumerate(losses):
            loss.backward(retain_graph=k < len(losses) - 1)
        return
    for k in range(2 if how == "again" else 1):
        torch.autograd.backward(losses, retain_graph=how == "again" and not k)


def _weighted(x: torch.Tensor, k: int) -> torch.Tensor:
    """A scalar whose gradient differs at every element."""
    weights = torch.linspace(-1.0, 1.5 + 0.3 * k, x.numel(), dtype=torch.float64).view(x.shape)
    return (x * weights.to(x.dtype)).sum() / max(x.numel(), 1)


def in_fp64(
    program: Program, seed: int, batch: int = BATCH, noise: Noise | None = None
) -> Observed:
    noise = noise or Noise(0.0)
    torch.set_default_dtype(torch.float64)
    try:
        function = program.function(wide=True)
        arguments, leaves = draw_inputs(program, seed, batch, torch.float64)
        for leaf in leaves:
            noise.disturb(leaf.detach())
        if any(i.kind == "inner" for i in program.inputs):
            arguments = [
                leaf * 1.0 if i.kind == "inner" else leaf
                for i, leaf in zip(program.inputs, leaves, strict=True)
            ]
        with noise:

            def begin() -> None:
                noise.backward = True

            return _call(function, program, arguments, leaves, begin)
    finally:
        torch.set_default_dtype(torch.float32)


def in_fp32(program: Program, seed: int, batch: int = BATCH) -> Observed:
    arguments, leaves = draw_inputs(program, seed, batch)
    return _call(program.function(), program, arguments, leaves)


class Compiled:
    """A program compiled once, for several calls. A module's parameters stay its own."""

    def __init__(self, program: Program, compiler: Callable[[Any], Any], seed: int) -> None:
        self.program = program
        function = program.function(compiled=True)
        self.owner: _Owner | None = None
        if program.module:
            leaves = draw_inputs(program, seed)[1]
            leaves = [
                nn.Parameter(x.detach()) if i.kind == "parameter" else x
                for i, x in zip(program.inputs, leaves, strict=True)
            ]
            self.owner = _Owner(function, program, leaves)
            self.run = compiler(self.owner)
        else:
            self.run = compiler(function)

    def __call__(self, seed: int, batch: int = BATCH) -> Observed:
        arguments, leaves = draw_inputs(self.program, seed, batch)
        if self.owner is None:
            return _call(self.run, self.program, arguments, leaves)
        with torch.no_grad():
            for k, item in enumerate(self.program.inputs):
                if item.name in self.owner.own:
                    held: torch.Tensor = getattr(self.owner, item.name)
                    if item.kind == "buffer" and held.requires_grad:
                        # Written with what has a history: the next call gets a fresh one.
                        held = arguments[k]
                        setattr(self.owner, item.name, held)
                    else:
                        held.copy_(arguments[k])
                    held.grad = None
                    arguments[k] = leaves[k] = held

        def run(*given: Any) -> Any:
            names = [i.name for i in self.program.inputs]
            pairs = dict(zip(names, given, strict=True))
            return self.run(**{n: v for n, v in pairs.items() if n not in self.owner.own})

        return _call(run, self.program, arguments, leaves)
