"""Find the decision that breaks a model: `bisect(model, args)`, `mpcompile bisect pkg.module:make`.

The model is run in FP32 and compiled. If the two disagree, passes are disabled one at a time; if no
pass is the cause, operators that run low are put back to FP32, half of the suspects at a time. Each
trial compiles a copy of the model and runs one forward and backward.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..api import mpcompile
from ..errors import MPCompileError, MPCompileWarning, in_one_line, kind_of
from ..pipeline import MAY_BE_DISABLED
from ..plans.graph_plan import PlanNode
from ..records import compiled_plans
from ..rules.policy import Policy
from ..settings import OPTIONS
from ..torch_inside import pytree

# These passes replace operators, so that a policy which names those no longer finds them.
RENAMING = ("expand_attention", "fuse_head", "narrow_softmax")

TOLERANCE = 0.1


@dataclass(frozen=True)
class Outcome:
    """The loss and gradients of one run.

    Attributes:
        loss: the model's result if that is one number, else the mean over all its results.
        gradients: gradients of the loss, by the parameter's name; None for a parameter without one.
    """

    loss: float
    gradients: Mapping[str, torch.Tensor | None]


Agrees = Callable[[Outcome, Outcome], bool]


@dataclass(frozen=True)
class Culprit:
    """The cause that was found.

    Attributes:
        passes: without these passes the model agrees with FP32.
        nodes: with these nodes in FP32 it agrees; each has its module, source line, rule and
            reason. If there are several, neither half of them breaks the model alone.
        trials: how often the model was compiled.
    """

    passes: tuple[str, ...] = ()
    nodes: tuple[PlanNode, ...] = ()
    trials: int = 0

    def __str__(self) -> str:
        lines = [f"pass {name}: without it, {MAY_BE_DISABLED[name]}" for name in self.passes]
        for node in self.nodes:
            where = " ".join(filter(None, (node.module and f"({node.module})", node.source)))
            lines.append(f"{node.name}: {node.op} {where}".rstrip())
            lines.append(f"    {node.precision} by rule {node.rule}: {node.reason}")
        if self.nodes:
            pins = ", ".join(f"{node.name!r}: 'fp32'" for node in self.nodes)
            lines.append(f"Policy(nodes={{{pins}}}) runs it in FP32")
        if not lines:
            lines.append("neither a pass that can be disabled nor an operator that runs low")
        return "\n".join([*lines, f"compilations: {self.trials}"])


def within(tolerance: float) -> Agrees:
    """Check that loss and gradients are finite and, relative to norms, near FP32's."""

    def agrees(ours: Outcome, full: Outcome) -> bool:
        if not abs(ours.loss - full.loss) <= tolerance * max(abs(full.loss), 1e-3):
            return False
        norms = {name: _norm(gradient) for name, gradient in full.gradients.items()}
        slack = 1e-3 * math.sqrt(sum(norm**2 for norm in norms.values()))
        return all(
            _distance(ours.gradients[name], gradient) <= tolerance * (norms[name] + slack)
            for name, gradient in full.gradients.items()
        )

    return agrees


def bisect(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    agrees: Agrees | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> Culprit | None:
    """Find the decision of the compiler that makes a model's loss or gradients wrong.

    Args:
        model: called as `model(*args, **kwargs)`; only copies of it are run.
        args, kwargs: the arguments of that call.
        options: of `mpcompile()`. Without "emit", graphs run op by op, which takes less time.
        agrees: whether an outcome, the first argument, is as good as that of FP32, the second;
            default: `within(TOLERANCE)`.
        progress: called before each run, with what is run.

    Returns:
        The culprit, or None if the compiled model agrees with FP32.

    Raises:
        MPCompileError: the model's call fails; or two runs in FP32 disagree: it is not finite, or
            random.
    """
    _check(model, args)
    agrees = agrees or within(TOLERANCE)
    options = {"emit": "eager", **(options or {})}
    trials = _Trials(model, args, kwargs or {}, options, agrees, progress)
    if trials.agree("compiled"):
        return None
    disabled = tuple(trials.options.get("disable_passes", ()))
    for name in MAY_BE_DISABLED:
        if name in disabled:
            continue
        if trials.agree(f"without the pass {name}", disable_passes=[*disabled, name]):
            return Culprit(passes=(name,), trials=trials.count)
    trials.options["disable_passes"] = [*disabled, *RENAMING]
    if trials.agree(f"without the passes {', '.join(RENAMING)}"):
        return Culprit(passes=RENAMING, trials=trials.count)
    low = {n.name: n for n in trials.nodes if n.precision == "LOW" and not n.is_added}
    if not trials.agree("all operators in FP32", policy=trials.policy.with_pins(low)):
        return Culprit(trials=trials.count)
    found = _halved(list(low), list(low), trials)
    return Culprit(nodes=tuple(low[name] for name in found), trials=trials.count)


def _check(model: Any, args: Any) -> None:
    if not isinstance(model, nn.Module) or not isinstance(args, (tuple, list)):
        raise MPCompileError(
            f"bisect({kind_of(model)}, {kind_of(args)}): give an nn.Module and the tuple of its "
            "arguments, (x,)"
        )


def _halved(suspects: list[str], low: list[str], trials: _Trials) -> list[str]:
    """The smallest set of suspects found that breaks the model while all others run in FP32."""
    while len(suspects) > 1:
        middle = len(suspects) // 2
        for half in (suspects[:middle], suspects[middle:]):
            others = [name for name in low if name not in half]
            what = f"{len(half)} of {len(low)} operators low"
            if not trials.agree(what, policy=trials.policy.with_pins(others)):
                suspects = half
                break
        else:
            break
    return suspects


class _Trials:
    """Runs of copies of one model, each compiled with other options."""

    def __init__(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        options: dict[str, Any],
        agrees: Agrees,
        progress: Callable[[str], None],
    ) -> None:
        self.progress = progress
        self.model, self.args, self.kwargs = model, args, kwargs
        self.policy: Policy = OPTIONS["policy"].parse("policy", options.get("policy"))
        self.options, self.agrees = {**options, "policy": self.policy}, agrees
        self.count = 0
        self.nodes: list[PlanNode] = []  # those of the last trial
        progress("in FP32")
        try:
            self.full = self._outcome(copy.deepcopy(model))
        except MPCompileError:
            raise
        except Exception as error:
            raise MPCompileError(
                f"{type(model).__name__} fails on these inputs: {in_one_line(error)}"
            ) from error
        if not agrees(self._outcome(copy.deepcopy(model)), self.full):
            raise MPCompileError(
                f"{type(model).__name__} disagrees with itself in FP32: its loss or a gradient is "
                "not finite, or the same call gives different numbers; `mpcompile diagnose` names "
                "what is not finite"
            )

    def agree(self, what: str, **changes: Any) -> bool:
        """Whether the model compiled with these options agrees with FP32; `what` they are."""
        self.count += 1
        self.progress(f"{self.count}: {what}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MPCompileWarning)
            twin = mpcompile(copy.deepcopy(self.model), **{**self.options, **changes})
            outcome = self._outcome(twin)
        self.nodes = [node for plan in compiled_plans(twin) for node in plan.nodes]
        return self.agrees(outcome, self.full)

    def _outcome(self, model: nn.Module) -> Outcome:
        args, kwargs = copy.deepcopy((tuple(self.args), dict(self.kwargs)))
        model.zero_grad()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            loss = _loss(model(*args, **kwargs))
            loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        return Outcome(float(loss.detach()), gradients)


def _loss(result: Any) -> torch.Tensor:
    tensors = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
    means = [x.float().mean() for x in tensors if x.requires_grad]
    if not means:
        raise MPCompileError("the model returns nothing that has a gradient")
    return torch.stack(means).sum()


def _norm(gradient: torch.Tensor | None) -> float:
    return 0.0 if gradient is None else float(gradient.double().norm())


def _distance(ours: torch.Tensor | None, full: torch.Tensor | None) -> float:
    if ours is None or full is None:
        return 0.0 if ours is full else math.inf
    distance = float((ours.double() - full.double()).norm())
    return distance if math.isfinite(distance) else math.inf
