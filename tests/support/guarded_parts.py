"""What stands in both worlds of a training loop, the compiled one and the reference, and what must
hold between them. What a loop does to it: guarded_world.py.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from guarded_reference import WIDTH, Net, Numbers, Scale
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from mpcompile import LossScale, MPOptimizer, loss_scale_of, mpcompile


@dataclass(frozen=True)
class Setup:
    """What a world consists of.

    Attributes:
        inputs: of each model: "data"; "stem", a plain FP32 layer before it; "latent", a parameter
            that it reads as it is; "chain", what the model before it returns.
        shared: whether the first two models have their first layer in common.
        layout: which parameters have an optimizer together: "each" model, "one" for all, and for
            the first model's "layers" or "biases" apart.
        kinds: of the optimizers, in turn: "sgd" or "adamw", "mp" before it for an MPOptimizer.
        by_hand: whether the first model is updated by hand.
        init_scale: None has it found in the first backward.
    """

    level: str = "O1"
    inputs: tuple[str, ...] = ("data",)
    shared: bool = False
    layout: str = "each"
    kinds: tuple[str, ...] = ("sgd",)
    by_hand: bool = False
    init_scale: float | None = 2.0**10
    growth_interval: int = 2
    min_scale: float = 2.0**8
    max_scale: float = 2.0**13
    seed: int = 0


@dataclass(eq=False)
class Output:
    """A forward whose backward may come: what it returned, in both worlds."""

    live: torch.Tensor
    wanted: torch.Tensor
    reads: set[str]


@dataclass(eq=False)
class Held:
    """An optimizer and the reference's."""

    names: list[str]
    live: Optimizer
    wanted: Optimizer

    @property
    def generated(self) -> bool:
        return isinstance(self.live, MPOptimizer)


class Parts:
    """Models, optimizers and scales, and how the two sides are compared."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.random = torch.Generator().manual_seed(setup.seed)
        self.wanted = self._build()
        self.wanted_params = self._names(self.wanted)
        for p in self.wanted_params.values():
            p.data.copy_(self._draw(p.shape))
        self._id = {id(p): name for name, p in self.wanted_params.items()}
        self.scales = [self._fresh_scale() for _ in setup.inputs]
        self.groups = self._layout()
        self.tainted: dict[str, set[int]] = {name: set() for name in self.wanted_params}
        self.known: dict[str, list[int]] = {name: [] for name in self.wanted_params}
        self.outputs: list[Output] = []
        self.tape: list[tuple[int, str | None, bool]] = []
        wanted_optimizers = [
            self._optimizer(i, names, self.wanted_params) for i, names in enumerate(self.groups)
        ]
        self._make_live()
        self.held = [
            Held(names, live, wanted)
            for names, live, wanted in zip(
                self.groups, self._live_optimizers(), wanted_optimizers, strict=True
            )
        ]
        self.skips = self.steps = 0

    # -- what there is ------------------------------------------------------------------------

    def _build(self) -> nn.ModuleDict:
        trunk = nn.Linear(WIDTH, WIDTH)
        parts: dict[str, nn.Module] = {}
        for k, kind in enumerate(self.setup.inputs):
            shares = self.setup.shared and k < 2
            parts[f"net{k}"] = Net(trunk if shares else None)
            if kind == "latent":
                parts[f"latent{k}"] = nn.ParameterList([nn.Parameter(torch.zeros(2, WIDTH))])
        if "stem" in self.setup.inputs:
            parts["stem"] = nn.Linear(WIDTH, WIDTH)
        return nn.ModuleDict(parts)

    @staticmethod
    def _names(parts: nn.Module) -> dict[str, nn.Parameter]:
        return dict(parts.named_parameters())

    def _fresh_scale(self) -> Scale:
        setup = self.setup
        start = setup.init_scale or min(2.0**16, setup.max_scale)
        return Scale(
            Numbers(start), setup.growth_interval, setup.min_scale, setup.max_scale,
            fitting=setup.init_scale is None,
        )  # fmt: skip

    def _read_by(self, k: int) -> set[str]:
        """The parameters that a model reads in its graph."""
        own = {self._id[id(p)] for p in self.wanted[f"net{k}"].parameters()}
        return own | {n for n in self.wanted_params if n.startswith(f"latent{k}.")}

    def _layout(self) -> list[list[str]]:
        names, setup = list(self.wanted_params), self.setup
        free = [n for n in names if not (setup.by_hand and n in self._read_by(0))]
        if setup.layout == "one":
            return [free] if free else []
        groups: dict[str, list[str]] = {}
        for name in free:
            part = name.split(".")[0]
            if part == "net0" and setup.layout == "layers":
                part = ".".join(name.split(".")[:2])
            if part == "net0" and setup.layout == "biases":
                part = name.split(".")[-1]
            groups.setdefault(part, []).append(name)
        return list(groups.values())

    def _optimizer(self, i: int, names: Sequence[str], params: dict[str, nn.Parameter]) -> Any:
        kind = self.setup.kinds[i % len(self.setup.kinds)]
        given = [params[n] for n in names]
        if kind.endswith("sgd"):
            return SGD(given, lr=2.0**-4, momentum=0.5)
        return AdamW(given, lr=2.0**-5, eps=0.25)

    def _make_live(self) -> None:
        setup = self.setup
        self.live = self._build()
        self.live.load_state_dict(self.wanted.state_dict())
        self.params = self._names(self.live)
        for k in range(len(setup.inputs)):
            scale = LossScale.dynamic(
                setup.init_scale, growth_interval=setup.growth_interval,
                min_scale=setup.min_scale, max_scale=setup.max_scale,
            )  # fmt: skip
            mpcompile(
                self.live[f"net{k}"], dtype=torch.float16, level=setup.level, emit="eager",
                strict=True, loss_scale=scale, dynamic=True,
            )  # fmt: skip

    def _live_optimizers(self) -> list[Optimizer]:
        made: list[Optimizer] = []
        for i, names in enumerate(self.groups):
            optimizer = self._optimizer(i, names, self.params)
            mixed = self.setup.kinds[i % len(self.setup.kinds)].startswith("mp")
            made.append(MPOptimizer(optimizer, emit="eager") if mixed else optimizer)
        return made

    def live_scale(self, s: int) -> LossScale:
        return loss_scale_of(self.live[f"net{s}"])

    def _draw(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.randint(-4, 5, tuple(shape), generator=self.random) / 4

    # -- what must hold -----------------------------------------------------------------------

    def check(self, *, signs: bool = True) -> None:
        for name, p in self.params.items():
            wanted = self.wanted_params[name]
            assert bool(p.isfinite().all()), f"{name} is not finite"
            assert torch.equal(p, wanted), f"{name} is not what it should be"
            self._check_gradient(name, p, wanted, signs)
        for held in self.held:
            for tensor in self._snapshot(held).values():
                assert bool(tensor.isfinite().all()), "state is not finite"
        for s, scale in enumerate(self.scales):
            live, now = self.live_scale(s).state, scale.numbers
            mine = live.scale, live.good_steps, live.skipped_steps
            assert mine == (now.value, now.good, now.skipped), f"scale {s}: {mine}, not {now}"

    def _check_gradient(
        self, name: str, p: torch.Tensor, wanted: torch.Tensor, signs: bool
    ) -> None:
        assert (p.grad is None) == (wanted.grad is None), name
        if p.grad is None or wanted.grad is None or not signs:
            return
        grad = p.grad.float()
        finite = bool(wanted.grad.isfinite().all())
        assert bool(grad.isfinite().all()) == finite, f"{name}.grad: {grad}, not {wanted.grad}"
        if finite:
            torch.testing.assert_close(
                grad, wanted.grad, rtol=1e-2, atol=1e-2 * largest(wanted.grad), msg=f"{name}.grad"
            )

    def _snapshot(self, held: Held) -> dict[tuple[str, str], torch.Tensor]:
        """The parameters and the state of an optimizer. State of zeros is none."""
        found = {(n, ""): self.params[n].detach().clone() for n in held.names}
        for name in held.names:
            for key, value in held.live.state.get(self.params[name], {}).items():
                if isinstance(value, torch.Tensor) and not torch.equal(
                    value, torch.zeros_like(value)
                ):
                    found[name, key] = value.detach().clone()
        return found

    @staticmethod
    def _same(a: dict[Any, torch.Tensor], b: dict[Any, torch.Tensor]) -> bool:
        return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)

    def _compare_step(self, held: Held) -> None:
        """After a step that was done: as the reference did it, but for rounding, and go on from
        what the live one has, so that roundings don't add up.
        """
        for name in held.names:
            live = held.live.state.get(self.params[name], {})
            wanted = held.wanted.state.get(self.wanted_params[name], {})
            for key, theirs in wanted.items():
                mine = live.get(key)
                if theirs is None:
                    assert mine is None or not bool(mine.any())
                    continue
                _close(mine, theirs, f"{name}: {key}")
                theirs.copy_(mine)
        self._sync_parameters(held.names)

    def _sync_parameters(self, names: Iterable[str]) -> None:
        for name in names:
            wanted = self.wanted_params[name]
            _close(self.params[name].detach(), wanted.detach(), name)
            wanted.data.copy_(self.params[name].detach())


def largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max())


def _close(mine: Any, wanted: torch.Tensor, name: str) -> None:
    torch.testing.assert_close(
        mine, wanted, rtol=2e-2, atol=2e-2 * min(1.0, largest(wanted)) + 1e-4, msg=name
    )
