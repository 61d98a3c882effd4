"""How many backward passes of a loss scale's graphs overflowed, and which no step has checked yet.

Each scaled graph has one more input, a 0-d leaf. Its "gradient" is nonzero if a gradient that left
the graph was not finite. Autograd adds it up over the graphs of one backward pass, and the count is
taken from it. The count is never reset, so one optimizer's look hides no overflow from the next:
each optimizer remembers how far the count had come when it looked.

Where DistributedDataParallel averages the gradients, one rank's leaf is not asked: the averages are
(`agreement.py`), which are the same on all ranks.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ..devices.registry import AsyncRead
from ..errors import MPCompileError
from ..ranks.shards import Ranks, local, ranks_of
from ..torch_inside.names import norm_of_each
from ..torch_inside.owned_backend import weakly
from ..torch_inside.tensors import TensorMark, found_by, mark_of, mark_on


@dataclass(frozen=True)
class Count:
    """How far the backward passes of a scale's graphs had come at some moment.

    Mostly an optimizer looks after each pass, and then that pass's own flag is the answer. So flags
    are added up only every so often, or where someone looks back over several passes.

    Attributes:
        passes: how many times there was something to count; known without asking the device.
        flags: of the last passes, in how many graphs a gradient was not finite: 0-d int64 each, on
            the device.
        before: how many passes before those had such a gradient: 0-d int64 on the device, or None
            if there were none.
    """

    passes: int = 0
    flags: tuple[torch.Tensor, ...] = ()
    before: torch.Tensor | None = None

    def one_more(self, flag: torch.Tensor) -> Count:
        if len(self.flags) < _FLAGS:
            return Count(self.passes + 1, (*self.flags, flag), self.before)
        return Count(self.passes + 1, (flag,), self._overflows())

    def since(self, earlier: Count) -> torch.Tensor | None:
        """How many overflowed after `earlier`, of the last one perhaps the number of its graphs:
        0-d int64, or None where no backward ran.
        """
        new = self.passes - earlier.passes
        if new == 0:
            return None
        if new == 1:
            return self.flags[-1]
        if new <= len(self.flags):
            return _sum(self.flags[-new:])
        return self._overflows() - earlier._overflows()

    def _overflows(self) -> torch.Tensor:
        if not self.flags:
            return torch.tensor(0)
        recent = _sum(self.flags)
        return recent if self.before is None else recent + self.before.to(recent.device)


_FLAGS = 32


def _sum(flags: Sequence[torch.Tensor]) -> torch.Tensor:
    home = flags[0].device
    return (torch.stack([flag.to(home) for flag in flags]) > 0).sum()


class Overflows:
    """The count of the overflowed backward passes of one loss scale's graphs.

    Attributes:
        void: overflows before this count left no gradients behind in the parameters.
        looks: how far the count had come when each optimizer that looks at it did so last. This
            object stands for updates by hand.
        reductions: each `agreement.Reduction` that averages gradients of the graphs over ranks;
            they are counted after these.
        ranks: those that hold shards of the parameters: each counts its own overflows, and what is
            concluded from them here is made common to all.
    """

    def __init__(self) -> None:
        self._leaves: dict[torch.device, torch.Tensor] = {}
        # Of parameters whose gradients the graphs make: whether they were finite at first.
        self._was_finite: weakref.WeakKeyDictionary[TensorMark, torch.Tensor] = (
            weakref.WeakKeyDictionary()
        )
        self._count = Count()
        self._looked = Count()  # at the last look of any optimizer
        self.void = Count()
        self.looks: weakref.WeakKeyDictionary[Any, Count] = weakref.WeakKeyDictionary()
        self.ranks = Ranks()
        self._arriving: list[tuple[AsyncRead, bool]] = []  # overflows, whether gradients existed
        self.reductions: weakref.WeakSet[Any] = weakref.WeakSet()
        self._hooks: list[RemovableHandle] = []  # on the leaves, while there are reductions

    def leaf(self, device: torch.device) -> torch.Tensor:
        """The input of the graphs on this device whose "gradient" is counted: 0-d FP32."""
        leaf = self._leaves.get(device)
        if leaf is None:
            leaf = torch.zeros((), dtype=torch.float32, device=device, requires_grad=True)
            self._leaves[device] = leaf
            if self._hooks:
                self._leave_alone(leaf)
        return leaf

    @property
    def began(self) -> bool:
        """Whether there may be anything to count: some graph has taken a leaf, on any rank."""
        return bool(self._leaves) or self._count.passes > 0

    # -- after a reduction -----------------------------------------------------------------------

    def leave_to(self, reduction: Any) -> None:
        """Count in the gradients after this reduction from now on, not in the graphs."""
        if reduction not in self.reductions:
            self.reductions.add(reduction)
            if not self._hooks:
                for leaf in self._leaves.values():
                    self._leave_alone(leaf)

    def _leave_alone(self, leaf: torch.Tensor) -> None:
        leaf.grad = None
        arrived = torch.compiler.disable(weakly(self._arrived))
        self._hooks.append(leaf.register_post_accumulate_grad_hook(arrived))

    def _arrived(self, leaf: torch.Tensor) -> None:
        if self._await_reductions():
            leaf.grad = None

    def _await_reductions(self) -> bool:
        """A graph runs backward. Returns whether its overflows are counted after a reduction."""
        reductions = list(self.reductions)
        for reduction in reductions:
            reduction.backward_runs()
        if not reductions:  # the last module has gone
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()
        return bool(reductions)

    def saw_pass(self, flag: torch.Tensor, *others: torch.Tensor) -> None:
        """Count one backward pass, with a 0-d number for each device that ran it."""
        for other in others:
            flag = flag + other.to(flag.device)
        # A copy: the next run of a CUDA graph writes to the memory of what it returned.
        self._count = self._count.one_more(flag.to(torch.int64, copy=True))

    # -- the count --------------------------------------------------------------------------------

    def watch(self, parameters: Sequence[torch.Tensor]) -> None:
        """Note parameters whose gradients come out of the graphs, and shards of them."""
        self.ranks += ranks_of(parameters)
        for parameter in parameters:
            if mark_of(parameter) not in self._was_finite:
                self._was_finite[found_by(parameter)] = _is_finite(local(parameter))

    def _parameters(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The living ones, which torch has not swapped since, and whether they were finite."""
        for mark, was_finite in list(self._was_finite.items()):
            if (parameter := mark.tensor()) is not None and mark_on(parameter) is mark:
                yield parameter, was_finite

    def count(self) -> Count:
        """How far the backward passes have come by now."""
        flags = [leaf.grad for leaf in self._leaves.values() if leaf.grad is not None]
        if flags:
            for leaf in self._leaves.values():
                leaf.grad = None
            self.saw_pass(*flags)
        return self._count

    def saw(self, gradients: Sequence[torch.Tensor]) -> None:
        """Count an overflow in gradients that are multiplied by the scale as they leave a graph."""
        if self._hooks and self._await_reductions():
            return
        for device in self._leaves:
            self.saw_count(any_nonfinite(gradients).to(device, torch.float32))

    def saw_count(self, found: torch.Tensor) -> None:
        """Count so many gradients (0-d FP32) that overflowed in the running backward, or in one
        that ran in a graph with its forward.
        """
        leaf = self.leaf(found.device)
        leaf.grad = found if leaf.grad is None else leaf.grad + found

    def look(self, who: Any, *, upstream: bool = False) -> torch.Tensor | None:
        """How many backward passes overflowed since an optimizer last looked: 0-d int64 on the
        device, or None where none ran. This call counts as a look.

        Those whose gradients were thrown away before the last forward are not counted, unless the
        optimizer's parameters come before the graphs (`upstream`): gradients may still exist there.
        """
        count, earlier = self.count(), self.looks.get(who, Count())
        if not upstream:
            earlier = max(earlier, self.void, key=lambda count: count.passes)
        self.looks[who] = count
        return count.since(earlier)

    def looked(self) -> None:
        """Note that some optimizer's step looks now."""
        self._looked = self.count()

    def before_update_by_hand(self, gradients: Sequence[torch.Tensor] | None) -> bool:
        """Whether a backward overflowed since the last such update, or one of these gradients
        (default: those of the parameters) is not finite; waits for the device.
        """
        if gradients is None:
            gradients = [p.grad for p, _ in self._parameters() if p.grad is not None]
        overflow = any_nonfinite(gradients)
        if (new := self.look(self)) is not None:
            overflow = overflow.to(new.device) | (new > 0)
        return bool(self.ranks.all_max(overflow))

    # -- backward passes that no optimizer's step checked ------------------------------------------

    def before_forward(self) -> Iterator[tuple[bool, bool]]:
        """For each backward pass that no step checked before this training forward, as far as its
        result has arrived: whether it overflowed, and whether gradients existed then.

        Either gradients are being accumulated; or they were thrown away, and must not make the next
        step skip; or a handwritten update used them, or an optimizer of a network that comes before
        these graphs.

        Raises:
            MPCompileError: gradients that overflowed were used in an update written by hand.
        """
        count = self.count()
        if self._arriving or count.passes != self._looked.passes:
            accumulating = self._accumulating()
            if (new := count.since(self._looked)) is not None:
                self._arriving.append((AsyncRead(self.ranks.all_max(new)), accumulating))
            self._looked = count
            if not accumulating:
                self.void = count
            if self.reductions or self.ranks:  # on all ranks in the same forward
                for later, _ in self._arriving:
                    later.wait()
            while self._arriving and (arrived := self._arriving[0][0].read()) is not None:
                _, held = self._arriving.pop(0)
                if overflow := bool(arrived[0]):
                    self._check_parameters()
                yield overflow, held
        elif len(self.looks) > 1 and count.passes != self.void.passes and not self._accumulating():
            self.void = count  # some optimizer may have looked during the backward

    def _accumulating(self) -> bool:
        return any(p.grad is not None for p, _ in self._parameters())

    def _check_parameters(self) -> None:
        """After an overflow that no step checked: raise if a parameter is not finite."""
        for p, was_finite in self._parameters():
            if bool(was_finite) and not bool(_is_finite(local(p))):
                raise MPCompileError(
                    f"a parameter of shape {tuple(p.shape)} is not finite: gradients that "
                    "overflowed went into an update that no optimizer made. Put such an update "
                    "under `if not loss_scale_of(model).overflowed():`"
                )


def _is_finite(parameter: torch.Tensor) -> torch.Tensor:
    """Whether all that this rank holds of it now is finite: 0-d bool. FSDP frees parameters between
    their uses.
    """
    held = parameter.untyped_storage().size() > 0
    value = torch.Tensor.detach(parameter)
    return any_nonfinite([value]).logical_not() if held else torch.tensor(True)


def any_nonfinite(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Whether some element of some gradient is inf or nan: 0-d bool; of a DTensor, some element
    that this rank holds.

    Gradients may be dense, sparse or sharded, on one device or several.
    """
    own = map(local, gradients)
    dense = [g.coalesce().values() if g.is_sparse else g for g in own]
    dense = [g for g in dense if g.numel() > 0]
    if not dense:
        return torch.tensor(False)
    # The largest magnitude of a gradient is inf or nan exactly if some element is; and a difference
    # of equal numbers is 0 exactly if they are finite. (`get_total_norm` and `isfinite` say the
    # same, in more operators: a small model's step would notice.)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in dense:
        by_device.setdefault(gradient.device, []).append(gradient)
    found = []
    for group in by_device.values():
        most = torch.stack(norm_of_each(group, float("inf")))
        found.append((most - most).any())
    return functools.reduce(lambda one, other: one | other.to(one.device), found)
