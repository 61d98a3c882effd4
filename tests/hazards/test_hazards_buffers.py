"""Buffers, and parameters that a forward writes, without a gradient, before it reads them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import COMBINED, EMITS, LEVELS, assert_near, check, fallback_reason, leaf
from module_of import module_of
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from mpcompile import MPOptimizer, loss_scale_of, mpcompile, train_step
from mpcompile.runtime.module_call import keep_finite
from mpcompile.torch_inside.tensors import mark_of, version

# -- buffers ---------------------------------------------------------------------------------------


class Buffers(nn.Module):
    """A linear layer, and what `write` does with its result and the buffers."""

    def __init__(self, write: Callable[[Any, torch.Tensor], None]) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(10, 10), write
        self.register_buffer("row", torch.ones(10))
        self.register_buffer("table", torch.ones(32, 10))
        self.register_buffer("number", torch.ones(()))
        self.register_buffer("unused", torch.ones(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> Any:
        h = self.layer(x)
        if self.training:
            with torch.no_grad():
                self.count += 1
                self.write(self, h.detach())
        return h + 0.1 * (self.row + self.number + self.table.mean(0))


class Images(nn.Module):
    def __init__(self, norm: nn.Module, dims: int) -> None:
        super().__init__()
        self.layer, self.norm, self.dims = nn.Linear(10, 10), norm, dims

    def forward(self, x: torch.Tensor) -> Any:
        h = self.layer(x)
        for _ in range(self.dims):
            h = torch.stack([h, 2 * h], -1)
        return self.norm(h).flatten(1)


def key_encoder() -> nn.Module:
    """The batch norm of a momentum encoder, which runs without gradients."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        with torch.no_grad():
            key = m.key(x)
        return m.query(x) * key

    key = nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10)).requires_grad_(False)
    return module_of(forward, query=nn.Linear(10, 10), key=key)


def place(m: Any, h: torch.Tensor) -> torch.Tensor:
    return (torch.arange(16, device=h.device) + m.count) % 32


MODELS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10), nn.Linear(10, 2)),
    "of images": lambda: Images(nn.BatchNorm2d(10), 2),
    "of volumes": lambda: Images(nn.BatchNorm3d(10), 3),
    "instance norm": lambda: Images(nn.InstanceNorm1d(10, track_running_stats=True), 1),
    "of a momentum encoder": key_encoder,
    "an average": lambda: Buffers(lambda m, h: m.row.mul_(0.9).add_(h.mean(0), alpha=0.1)),
    "lerp_": lambda: Buffers(lambda m, h: m.row.lerp_(h.mean(0), 0.1)),
    "copy_": lambda: Buffers(lambda m, h: m.row.copy_(0.9 * m.row + 0.1 * h.mean(0))),
    "through .data": lambda: Buffers(lambda m, h: m.row.data.mul_(0.9).add_(h.mean(0) * 0.1)),
    "a largest value": lambda: Buffers(lambda m, h: m.number.copy_(m.number.maximum(h.max()))),
    "a queue": lambda: Buffers(lambda m, h: m.table[:16].copy_(h)),
    "index_copy_": lambda: Buffers(lambda m, h: m.table.index_copy_(0, place(m, h), h)),
    "index_put_": lambda: Buffers(lambda m, h: m.table.__setitem__(place(m, h), h)),
    "scatter_add_": lambda: Buffers(
        lambda m, h: m.table.mul_(0.9).scatter_add_(0, place(m, h)[:, None].expand_as(h), 0.1 * h)
    ),
    "a codebook": lambda: Buffers(
        lambda m, h: m.table.lerp_(torch.softmax(-torch.cdist(m.table, h), -1) @ h, 0.1)
    ),
    "an observed range": lambda: Buffers(lambda m, h: m.row.mul_(0.9).add_(h.amax(0) - h.amin(0))),
    "spectral norm": lambda: nn.Sequential(spectral_norm(nn.Linear(10, 10)), nn.BatchNorm1d(10)),
}  # fmt: skip


def batches() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(16, 10) for _ in range(6)]


def made(named: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[named]()


def floats(net: nn.Module) -> list[torch.Tensor]:
    return [b for b in net.buffers() if b.is_floating_point()]


@pytest.mark.slow_rows("several programs each", but=8)
@LEVELS
@EMITS
@pytest.mark.parametrize("loop", ["plain", "MPOptimizer", "train_step"])
@pytest.mark.parametrize("named", MODELS)
def test_they_stay_finite(named: str, loop: str, emit: str, level: str) -> None:
    net = made(named)
    model = mpcompile(net, dtype=torch.float16, level=level, emit=emit)
    optimizer: Any = torch.optim.SGD(net.parameters(), 1e-3)
    optimizer = MPOptimizer(optimizer) if loop == "MPOptimizer" else optimizer
    step = train_step(model, optimizer, lambda out, _: out.square().mean())
    for i, x in enumerate(batches()):
        x = x * 2e5 if i == 3 else x
        if loop == "train_step":
            step(x, x)
            continue
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    scale = loss_scale_of(step if loop == "train_step" else model)
    assert scale.skipped_steps == 1
    assert all(bool(b.isfinite().all()) for b in floats(net))
    net.eval()
    with torch.no_grad():
        assert bool(model(batches()[0]).isfinite().all())


@pytest.mark.slow_rows("several programs each", but=8)
@LEVELS
@pytest.mark.parametrize("named", MODELS)
def test_they_follow_fp32(named: str, level: str) -> None:
    net = made(named)
    plain = copy.deepcopy(net)
    model = mpcompile(net, dtype=torch.float16, level=level, emit="aot_eager")
    for x in batches():
        for each in (model, plain):
            each(x).square().mean().backward()
    for ours, theirs in zip(floats(net), floats(plain), strict=True):
        assert (ours - theirs).norm() <= 5e-3 * theirs.norm()


def _broken(m: Any, h: torch.Tensor) -> None:
    torch._dynamo.graph_break()
    m.row = 0.9 * m.row + 0.1 * h.mean(0)


REPLACED: dict[str, Callable[[Any, torch.Tensor], None]] = {
    "an average": lambda m, h: setattr(m, "row", 0.9 * m.row + 0.1 * h.mean(0)),
    "a number": lambda m, h: setattr(m, "number", torch.maximum(m.number, h.max())),
    "a queue": lambda m, h: setattr(m, "table", torch.cat([h, m.table[:16]])),
    "in the dict": lambda m, h: m._buffers.update(row=torch.lerp(m.row, h.mean(0), 0.1)),
    "behind a graph break": _broken,
}


@LEVELS
@pytest.mark.parametrize("named", REPLACED)
def test_those_that_are_replaced(named: str, level: str) -> None:
    plain = copy.deepcopy(net := Buffers(REPLACED[named]))
    model = mpcompile(net, dtype=torch.float16, level=level, emit="aot_eager")
    del net.unused, plain.unused  # it is gone when the first call comes
    net.eval()(batches()[0])
    optimizer = torch.optim.SGD(net.train().parameters(), 0.0)
    for i, x in enumerate(batches()):
        optimizer.zero_grad()
        model(x * 2e5 if i == 3 else x).square().mean().backward()
        optimizer.step()
        assert all(bool(b.isfinite().all()) for b in floats(net))
        if i < 3:
            plain(x)
            for ours, theirs in zip(floats(net), floats(plain), strict=True):
                assert (ours - theirs).norm() <= 5e-3 * theirs.norm()
    assert loss_scale_of(model).skipped_steps == 1


def test_what_the_program_makes_infinite_stays_so() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        with torch.no_grad():
            m.mask[5:] = float("-inf")
        return torch.softmax(m.layer(x) + m.mask, -1)

    model = module_of(forward, layer=nn.Linear(10, 10), mask=nn.Buffer(torch.zeros(10)))
    mpcompile(model, dtype=torch.float16, emit="aot_eager")
    model(torch.randn(4, 10)).square().sum().backward()
    assert torch.equal(model.mask.isfinite(), torch.arange(10) < 5)


INFINITIES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "of constants": lambda m, x: torch.full((10, 10), float("-inf")).triu(4)[0],
    "like the buffer": lambda m, x: torch.full_like(m.mask, float("-inf")).masked_fill(m.few, 0.0),
    "of lengths": lambda m, x: torch.where(torch.arange(10) < m.count, 0.0, float("-inf")),
    "of a parameter": lambda m, x: torch.log((m.layer.bias.detach() > 0).float()),
}


@LEVELS
@EMITS
@pytest.mark.parametrize("named", INFINITIES)
def test_what_the_program_makes_infinite_may_replace_a_buffer(
    named: str, emit: str, level: str
) -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        m.count = m.count + 1
        m.mask = INFINITIES[named](m, x)
        if named == "of lengths":
            torch._dynamo.graph_break()
        m.row = 0.9 * m.row + m.layer(x).detach().mean(0)
        return torch.softmax(m.layer(x) + m.mask.clamp(min=-1e4), -1)

    held = {"mask": nn.Buffer(torch.zeros(10)), "few": nn.Buffer(torch.arange(10) < 4),
            "count": nn.Buffer(torch.tensor(4)), "row": nn.Buffer(torch.zeros(10))}  # fmt: skip
    plain = module_of(forward, layer=nn.Linear(10, 10), **held)
    model = mpcompile(copy.deepcopy(plain), dtype=torch.float16, level=level, emit=emit)
    for _ in range(3):
        x = torch.randn(4, 10)
        plain(x)
        model(x).square().sum().backward()
        assert model.mask.isinf().any()
        torch.testing.assert_close(model.mask, plain.mask)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_constant_result_in_any_mode(mode: Any) -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        return m.layer(x), torch.full((3,), float("-inf"))

    model = mpcompile(module_of(forward, layer=nn.Linear(10, 10)), dtype="fp16", emit="aot_eager")
    with mode():  # in inference mode a tensor has no version
        assert model(torch.randn(4, 10))[1].isinf().all()


def test_an_infinity_that_is_written_later_is_an_overflow() -> None:
    old, mask = torch.zeros(3), torch.full((3,), float("-inf"))
    mark_of(mask).as_written = version(mask)
    held: dict[str, Any] = {"mask": mask}
    keep_finite([(held, "mask", old)])
    assert held["mask"] is mask
    mask.add_(1)
    keep_finite([(held, "mask", old)])
    assert torch.equal(held["mask"], old)


# -- parameters ------------------------------------------------------------------------------------


WITHOUT_GRAD: dict[str, Callable[[Any], object]] = {
    "decayed": lambda m: m.last.weight.mul_(0.9).add_(0.01),
    "normed": lambda m: m.last.weight.div_(m.last.weight.norm(dim=1, keepdim=True)),
    "pruned": lambda m: m.last.weight.copy_(
        torch.where(m.last.weight.abs() > 0.1, m.last.weight, 0.0)
    ),
    "clamped_as_parameters": lambda m: [p.clamp_(-0.1, 0.1) for p in m.last.parameters()],
    "a_row_of_zeros": lambda m: (
        m.last.weight.index_fill_(0, torch.tensor([0]), 0.0),
        m.last.bias.masked_fill_(m.last.bias < 0, 0.0),
    ),
    "a_diagonal": lambda m: m.last.weight.fill_diagonal_(1.0),
    "averaged_with_another": lambda m: m.last.weight.lerp_(m.other.weight, 0.5),
    "symmetric": lambda m: m.last.weight.copy_((m.last.weight + m.last.weight.t()) / 2),
}
OUTSIDE_OF_AUTOGRAD: dict[str, Callable[[Any], object]] = {
    "clamped_as_data": lambda m: m.last.weight.data.clamp_(-0.1, 0.1),
    "clamped_as_detached": lambda m: m.last.weight.detach().clamp_(-0.1, 0.1),
}


def _in_part(m: Any) -> None:
    w = m.last.weight
    w[0] += 1
    w[:, 1] = 0.5
    w[2].clamp_(-0.1, 0.1)
    w[torch.tensor([3, 4])] = 0.3
    w.diagonal().fill_(0.0)
    w.view(-1)[7:9].mul_(2)
    m.last.bias.data[1:3] -= 0.5


WITHOUT_GRAD["in_part"] = _in_part


def writing(case: str) -> nn.Module:
    def forward(m: Any, x: torch.Tensor) -> Any:
        h = m.first(x).relu()
        if case in OUTSIDE_OF_AUTOGRAD:
            OUTSIDE_OF_AUTOGRAD[case](m)
        else:
            with torch.no_grad():
                WITHOUT_GRAD[case](m)
        return m.other(m.last(h))

    layers = {name: nn.Linear(16, 16) for name in ("first", "last", "other")}
    return module_of(forward, **layers)


@COMBINED
@pytest.mark.parametrize("case", [*WITHOUT_GRAD, *OUTSIDE_OF_AUTOGRAD])
def test_a_parameter_written_before_it_is_read(case: str, how: Any) -> None:
    """What is multiplied after it stays in FP32, and no more."""
    result = check(writing(case), leaf(8, 16), steps=3, low=["linear"], **how)
    wide = {n.module for plan in result.plans for n in plan.nodes
            if n.op == "aten::linear" and n.precision == "FULL"}  # fmt: skip
    assert wide <= {"last"}
    for p, q in zip(result.model.parameters(), result.reference.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("case", [*WITHOUT_GRAD, *OUTSIDE_OF_AUTOGRAD])
def test_its_working_copy_is_not_read(case: str) -> None:
    """Nor a kept copy, in an evaluation."""
    net = writing(case)
    reference = copy.deepcopy(net)
    mpcompile(net, level="O2", dtype=torch.float16, emit="aot_eager")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, net)]
    optimizers[1] = MPOptimizer(optimizers[1], emit="eager")
    for training in (True, True, False, False):
        results, x = [], torch.randn(8, 16)
        for model, optimizer in zip((reference, net), optimizers, strict=True):
            with torch.set_grad_enabled(training):
                results.append(model(x))
            if training:
                results[-1].square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_near(results[1].detach(), results[0].detach(), "result", 1e-2)
    for p, q in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=2e-3, rtol=1e-2)


@COMBINED
@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_a_table_that_is_renormalised(layer: Any, how: Any) -> None:
    def forward(m: Any, ids: torch.Tensor) -> Any:
        return m.linear(m.table(ids))

    net = module_of(forward, table=layer(20, 16, max_norm=1.0), linear=nn.Linear(16, 4))
    ids = torch.randint(20, (8, 3))
    check(net, ids, steps=2, low=["linear"], **how)


def test_a_parameter_read_before_it_is_written() -> None:
    """Autograd itself refuses the backward of that: left in FP32, and said so."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        h = m.linear.weight * 2
        with torch.no_grad():
            m.linear.weight.clamp_(-0.1, 0.1)
        return m.linear(x) + h.sum()

    reason = fallback_reason(module_of(forward, linear=nn.Linear(16, 16)), torch.randn(8, 16))
    assert "linear_weight needs a gradient and is written without one" in reason
