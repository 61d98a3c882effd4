"""Compiled models and optimizers, and beside them the reference; each method does one thing to both
and asserts that they agree. `test_state_machine.py` calls them in random order.
"""

import io
import math
from collections.abc import Iterable, Sequence

import torch
from guarded_parts import Output, Parts, largest
from guarded_reference import WIDTH, emulated

HALF_MAX = 65504.0


class World(Parts):
    """What a training loop may do."""

    # -- forward and backward -----------------------------------------------------------------

    def forward(self, k: int, batch: int = 2, huge: bool = False) -> None:
        """A training forward; huge: with an input that FP16 has no number for."""
        x = self._draw((batch, WIDTH))
        if huge:
            x[0, 0] = 1e6
        live, wanted, reads = self._run(k, x)
        self.outputs = [*self.outputs[-2:], Output(live, wanted, reads)]
        self.check()

    def _run(self, k: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, set[str]]:
        kind = self.setup.inputs[k]
        live = wanted = x
        reads = self._read_by(k)
        if kind == "chain":
            live, wanted, before = self._run(k - 1, x)
            reads = reads | before
        elif kind == "stem":
            live, wanted = self.live["stem"](x), self.wanted["stem"](x)
            reads = reads | {n for n in self.params if n.startswith("stem.")}
        elif kind == "latent":
            (live,), (wanted,) = self.live[f"latent{k}"], self.wanted[f"latent{k}"]
        scale = self.scales[k]
        for name in self._read_by(k):
            if k not in self.known[name]:
                self.known[name].append(k)
        scale.open |= kind in ("chain", "stem")
        scale.forward(any(self.wanted_params[n].grad is not None for n in self._leaves(k)))
        live = self.live[f"net{k}"](live)
        mine = self.live_scale(k)
        scale.fitting = mine.fitting
        assert mine.used is not None

        def note(tensor: torch.Tensor, grad: torch.Tensor) -> None:
            self.tape.append((k, self._id.get(id(tensor)), not bool(grad.isfinite().all())))

        return live, emulated(self.wanted[f"net{k}"], wanted, mine.used, note), reads  # type: ignore[arg-type]

    def _leaves(self, s: int) -> Iterable[str]:
        return [name for name, scales in self.known.items() if s in scales]

    def backward(self, which: Sequence[int], factor: float = 1.0, retain: bool = False) -> None:
        """Of one output, or of a loss of several."""
        chosen = list(dict.fromkeys(self.outputs[i % len(self.outputs)] for i in which))
        targets = [self._draw(o.wanted.shape) for o in chosen]
        live = sum((o.live * t).sum() * factor for o, t in zip(chosen, targets, strict=True))
        wanted = sum((o.wanted * t).sum() * factor for o, t in zip(chosen, targets, strict=True))
        assert isinstance(live, torch.Tensor)
        assert isinstance(wanted, torch.Tensor)
        live.backward(retain_graph=retain)
        self.tape = []
        wanted.backward(retain_graph=retain)
        for s in {s for s, _, _ in self.tape}:
            bad = any(b for t, _, b in self.tape if t == s)
            self.scales[s].ran(bad)
            if self.scales[s].fitting:
                value = self.live_scale(s).value
                assert math.frexp(value)[0] == 0.5
                assert self.setup.min_scale <= value <= self.setup.max_scale
                if value != self.scales[s].numbers.value:
                    self.scales[s].numbers.value, self.scales[s].numbers.good = value, 0
            for name in {name for t, name, _ in self.tape if t == s and name is not None}:
                if bad:
                    self.tainted[name].add(s)
            if bad and self.scales[s].fitting:
                self._found_in_vain()
        if not retain:
            self.outputs = [o for o in self.outputs if o not in chosen]
        self.check()

    def _found_in_vain(self) -> None:
        """Where no scale fits, the search ends at another than the reference has: which elements
        of a gradient are not finite may then differ.
        """
        for name, p in self.params.items():
            wanted = self.wanted_params[name].grad
            if p.grad is not None and wanted is not None:
                wanted.copy_(p.grad)

    # -- gradients ----------------------------------------------------------------------------

    def zero_grad(self, i: int, set_to_none: bool = True) -> None:
        held = self.held[i % len(self.held)]
        held.live.zero_grad(set_to_none=set_to_none)
        held.wanted.zero_grad(set_to_none=set_to_none)
        for name in held.names:
            self.tainted[name].clear()
        self.check()

    def zero_model(self, k: int) -> None:
        k %= len(self.setup.inputs)
        self.live[f"net{k}"].zero_grad()
        self.wanted[f"net{k}"].zero_grad()
        for name in self._read_by(k):
            if not name.startswith("latent"):
                self.tainted[name].clear()
        self.check()

    def clip(self, i: int) -> None:
        """Make ordinary numbers of whatever there is, where gradients are FP32."""
        held = self.held[i % len(self.held)]
        pairs = [(self.params[n].grad, self.wanted_params[n].grad) for n in held.names]
        if any(live is not None and live.dtype is not torch.float32 for live, _ in pairs):
            return
        for grad in (g for pair in pairs for g in pair if g is not None):
            grad.nan_to_num_(0.0, 1.0, -1.0).clamp_(-1.0, 1.0)
        self.check(signs=False)
        for live, wanted in pairs:  # which of two infinities or nan it was, is nobody's business
            if live is not None and wanted is not None:
                wanted.copy_(live)

    # -- steps --------------------------------------------------------------------------------

    def _is_bad(self, names: Iterable[str]) -> bool:
        grads = [self.wanted_params[n].grad for n in names]
        return not all(bool(g.isfinite().all()) for g in grads if g is not None)

    def step(self, i: int) -> None:
        held = self.held[i % len(self.held)]
        have = [n for n in held.names if self.wanted_params[n].grad is not None]
        asked = have if held.generated else held.names
        scales = {s for n in asked for s in self.known[n]} if have else set()
        must = {s: self._must_skip(s, have) for s in scales}
        may = {
            s: must[s] or self.scales[s].stale(held) or any(s in self.tainted[n] for n in have)
            for s in scales
        }
        upstream = self._is_bad(n for n in have if not self.known[n])
        before = self._snapshot(held)
        held.live.step()
        changed = not self._same(before, self._snapshot(held))
        self.steps += 1
        if any(must.values()) or upstream:
            assert not changed, f"a step was not skipped: {must}, upstream {upstream}"
            skipped = True
        elif any(may.values()):
            # Plain SGD with gradients of zero changes nothing either way.
            skipped = bool(held.live.skipped) if held.generated else not changed  # type: ignore[attr-defined]
            assert not (skipped and changed)
        else:
            skipped = False
        if held.generated and have:
            assert bool(held.live.skipped) == skipped  # type: ignore[attr-defined]
        self.skips += skipped
        for s in scales:
            self.scales[s].step(held, must[s] or (may[s] and skipped))
        if upstream:
            self._adopt_skips(but=scales)
        for name in have:  # it has looked: what it keeps of these gradients is its own doing
            self.tainted[name].clear()
        if not skipped:
            held.wanted.step()
            self._compare_step(held)
        self._forget(held.names)
        self.check()

    def _must_skip(self, s: int, have: Iterable[str]) -> bool:
        own = [n for n in have if s in self.known[n]]
        return self._is_bad(own) or any(s in self.tainted[n] for n in own)

    def _adopt_skips(self, but: set[int]) -> None:
        """An optimizer in front of a model counts its skips with the model's scale."""
        for s in set(range(len(self.scales))) - but:
            numbers, live = self.scales[s].numbers, self.live_scale(s).skipped_steps
            assert live - numbers.skipped in (0, 1)
            numbers.skipped = live

    def by_hand(self) -> None:
        """An update of the first model, under the question that is to be asked first."""
        scale, leaves = self.scales[0], list(self._leaves(0))
        names = [n for n in leaves if n.startswith("net0.")]
        must = self._must_skip(0, names)
        may = scale.stale("hand") or self._is_bad(leaves)
        overflowed = self.live_scale(0).overflowed()
        self.steps += 1
        self.skips += overflowed
        assert overflowed or not must, "an overflow was missed"
        assert must or may or not overflowed, "overflowed() without an overflow"
        scale.step("hand", overflowed)
        for name in names:
            self.tainted[name].clear()
        if not overflowed:
            with torch.no_grad():
                for params in (self.params, self.wanted_params):
                    for name in names:
                        grad = params[name].grad
                        if grad is not None:
                            params[name] -= 2.0**-4 * grad
            self._sync_parameters(names)
            self._forget(names)
        self.check()

    def lr(self, i: int, factor: float) -> None:
        held = self.held[i % len(self.held)]
        for group in (*held.live.param_groups, *held.wanted.param_groups):
            group["lr"] *= factor

    def _forget(self, names: Iterable[str]) -> None:
        """A backward through parameters that have changed since is nobody's loop."""
        self.outputs = [o for o in self.outputs if o.reads.isdisjoint(names)]

    # -- the rest of a loop -------------------------------------------------------------------

    def evaluate(self, k: int, batch: int = 2) -> None:
        net, x = self.live[f"net{k}"], self._draw((batch, WIDTH))
        with torch.no_grad():
            hidden, wanted = self.wanted[f"net{k}"].trunk(x), self.wanted[f"net{k}"](x)
            found = net(x)
        if max(float(hidden.abs().max()), float(wanted.abs().max())) < HALF_MAX:
            torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2 * largest(wanted))
        self.check()

    def reload(self) -> None:
        """Save everything and go on with fresh objects."""
        saved = io.BytesIO()
        scales = [self.live_scale(s).state_dict() for s in range(len(self.scales))]
        state = self.live.state_dict(), [h.live.state_dict() for h in self.held], scales
        torch.save(state, saved)
        saved.seek(0)
        parts, optimizers, scales = torch.load(saved)
        self.outputs = []
        for p in self.wanted_params.values():
            p.grad = None
        self._make_live()
        self.live.load_state_dict(parts)
        fresh = self._live_optimizers()
        for s, scale in enumerate(self.scales):
            self.live_scale(s).load_state_dict(scales[s])
            self.scales[s] = self._fresh_scale()
            self.scales[s].copy_state(scale)
        for name in self.params:
            self.tainted[name].clear()
            self.known[name].clear()
        for held, optimizer, theirs in zip(self.held, fresh, optimizers, strict=True):
            optimizer.load_state_dict(theirs)
            held.live = optimizer
        self.check()
