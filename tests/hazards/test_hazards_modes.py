"""Grad modes and other modes around a program, parts of it without gradients, and graph breaks."""

import contextlib
import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import DTYPES, EMITS, LEVELS, MLP, SETTINGS, assert_near, check, leaf
from torch import nn
from torch.autograd import graph
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mpcompile import compiled_plans, loss_scale_of, mpcompile

# -- modes -----------------------------------------------------------------------------------------


torch.manual_seed(0)
X, Y = torch.randn(4, 16), torch.randint(8, (4,))


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8))

    # Code of its own: behind a graph break Dynamo compiles no frame of torch's files.
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x)


def loss_of(net: nn.Module) -> torch.Tensor:
    return F.cross_entropy(net(X), Y)


def gradients(net: nn.Module) -> torch.Tensor:
    """Of all parameters that have one, in one row."""
    own = [p.grad.float().flatten() for p in net.parameters() if p.grad is not None]
    return torch.cat(own)


def within(mode: Callable[[], Any], factor: float = 1.0) -> Callable[[nn.Module], None]:
    def loop(net: nn.Module) -> None:
        with mode():
            (loss_of(net) * factor).backward()

    return loop


def forward_within(mode: Callable[[], Any]) -> Callable[[nn.Module], None]:
    def loop(net: nn.Module) -> None:
        with mode():
            loss = loss_of(net)
        loss.backward()

    return loop


def after(mode: Callable[[], Any]) -> Callable[[nn.Module], None]:
    def loop(net: nn.Module) -> None:
        with mode():
            net(X)
        loss_of(net).backward()

    return loop


def batched(net: nn.Module) -> None:
    rows = torch.eye(32).reshape(32, 4, 8)
    found = torch.autograd.grad(net(X), list(net.parameters()), rows, is_grads_batched=True)
    for p, gradient in zip(net.parameters(), found, strict=True):
        p.grad = gradient.sum(0)


def jacobian(net: nn.Module, *, vectorize: bool) -> None:
    found = torch.autograd.functional.jacobian(net, X, vectorize=vectorize)
    net[0].weight.grad = found.sum((0, 1, 2)).expand(32, 16).contiguous()


def vjp(net: nn.Module) -> None:
    _, found = torch.autograd.functional.vjp(net, X, torch.ones(4, 8))
    net[0].weight.grad = found.sum(0).expand(32, 16).contiguous()


def hooks_on_nodes(net: nn.Module) -> None:
    loss, seen, node = loss_of(net), [], None
    node = loss.grad_fn
    while node is not None:
        node.register_hook(lambda _, gradients: seen.append(gradients))
        node.register_prehook(lambda gradients: seen.append(gradients))
        node = node.next_functions[0][0] if node.next_functions else None
    loss.backward()
    assert seen


def hooks_on_parameters(net: nn.Module) -> None:
    seen: list[Any] = []
    own = list(net.parameters())
    handles = [
        graph.register_multi_grad_hook(own, seen.append),
        net.register_full_backward_hook(lambda module, into, out: None),
        net[0].weight.register_hook(lambda gradient: gradient * 2),
        *(p.register_post_accumulate_grad_hook(seen.append) for p in own),
    ]
    out = net(X.clone().requires_grad_())
    out.register_hook(lambda gradient: gradient * 3)
    F.cross_entropy(out, Y).backward()
    for handle in handles:
        handle.remove()
    assert len(seen) == 1 + len(own)


def twice(net: nn.Module) -> None:
    loss = loss_of(net)
    loss.backward(retain_graph=True)
    loss.backward()


def of_inputs(net: nn.Module) -> None:
    loss_of(net).backward(inputs=[net[0].weight])


def by_grad(net: nn.Module) -> None:
    found = torch.autograd.grad(loss_of(net), list(net.parameters()))
    for p, gradient in zip(net.parameters(), found, strict=True):
        p.grad = gradient


def several_roots(net: nn.Module) -> None:
    loss = loss_of(net)
    torch.autograd.backward([loss, loss * 2])


def in_a_thread(net: nn.Module) -> None:
    thread = threading.Thread(target=lambda: loss_of(net).backward())
    thread.start()
    thread.join()


def checkpointed(net: nn.Module, *, use_reentrant: bool) -> None:
    x = X.clone().requires_grad_()
    F.cross_entropy(checkpoint(net, x, use_reentrant=use_reentrant), Y).backward()


@contextlib.contextmanager
def deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


LOOPS: dict[str, Callable[[nn.Module], None]] = {
    "anomaly": within(torch.autograd.detect_anomaly),
    "anomaly, a steep loss": within(torch.autograd.detect_anomaly, 3e4),
    "anomaly without its check": within(lambda: torch.autograd.detect_anomaly(check_nan=False)),
    "a batch of gradients": batched,
    "a vectorized jacobian": lambda net: jacobian(net, vectorize=True),
    "a jacobian": lambda net: jacobian(net, vectorize=False),
    "vjp": vjp,
    "hooks on saved tensors": forward_within(
        lambda: graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x)
    ),
    "saved on the CPU": forward_within(graph.save_on_cpu),
    "one thread": within(lambda: torch.autograd.set_multithreading_enabled(False)),
    "the profiler": within(torch.profiler.profile),
    "the old profiler": within(torch.autograd.profiler.profile),
    "deterministic": within(deterministic),
    "hooks on nodes": hooks_on_nodes,
    "hooks on parameters": hooks_on_parameters,
    "after inference mode": after(torch.inference_mode),
    "after no_grad": after(torch.no_grad),
    "a graph that is kept": twice,
    "inputs=": of_inputs,
    "autograd.grad": by_grad,
    "several roots": several_roots,
    "a thread": in_a_thread,
    "a checkpoint": lambda net: checkpointed(net, use_reentrant=False),
    "a reentrant checkpoint": lambda net: checkpointed(net, use_reentrant=True),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@DTYPES
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@EMITS
@pytest.mark.parametrize("named", LOOPS)
def test_the_gradients_are_those_of_fp32(
    named: str, emit: str, level: str, dtype: torch.dtype
) -> None:
    net, loop = Net(), LOOPS[named]
    plain = copy.deepcopy(net)
    loop(plain)
    model = mpcompile(net, dtype=dtype, level=level, emit=emit)
    for _ in range(2):
        for p in net.parameters():
            p.grad = None
        loop(model)
        found, wanted = gradients(net), gradients(plain)
        assert found.shape == wanted.shape
        off = (found - wanted).norm() / wanted.norm()
        assert 0 < off < 0.03 if level != "O0" else off < 1e-5


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_anomaly_mode_finds_what_is_nan_at_any_scale(level: str) -> None:
    class Root(Net):
        def forward(self, x: torch.Tensor) -> Any:
            out = super().forward(x)
            return out + (out - out.detach()).sqrt()  # 0 times infinity

    model = mpcompile(Root(), dtype=torch.float16, level=level, emit="aot_eager")
    with pytest.raises(RuntimeError, match="returned nan values"), torch.autograd.detect_anomaly():
        loss_of(model).backward()


# -- regions and graph breaks ----------------------------------------------------------------------


@LEVELS
def test_graph_breaks_compose(level: str) -> None:
    class Broken(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.norm(self.up(x))
            torch._dynamo.graph_break()
            h = F.gelu(h) * x.mean()
            torch._dynamo.graph_break()
            out: torch.Tensor = self.down(h)
            return out + x

    result = check(Broken(), leaf(8, 16), level=level, low=["linear"])
    assert len(result.plans) == 3
    assert loss_scale_of(result.model).value == 1024


@SETTINGS
def test_graph_break_inside_no_grad(level: str, emit: str) -> None:
    """A graph that ends in a no_grad region still hands on what came before it with a history."""

    class Broken(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.up(x)
            with torch.no_grad():
                size = h.abs().mean()
                torch._dynamo.graph_break()
                size = size + self.up(x).abs().mean()
            return self.down(h / size)

    check(Broken(), leaf(8, 16), level=level, emit=emit, low=["linear"])


def test_graphs_of_one_model_share_its_loss_scale() -> None:
    """An overflow in the first of three graphs skips the step; the scale backs off once."""

    class Broken(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.up(x)
            torch._dynamo.graph_break()
            return self.down(F.gelu(h))

    options: dict[str, Any] = {"emit": "eager", "strict": True, "loss_scale": "grad_scaler"}
    model = mpcompile(Broken(), dtype=torch.float16, **options)
    optimizer = torch.optim.Adam(model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.randn(8, 16)).mul(1e6).sum().backward()
    optimizer.step()
    assert loss_scale_of(model).value == 2.0**15
    assert loss_scale_of(model).skipped_steps == 1
    for p, b in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, b)


@LEVELS
def test_no_grad_region(level: str) -> None:
    class Teacher(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                target = self.up(x) + x.mean()
            return F.smooth_l1_loss(self.up(x) * 0.9, target) + super().forward(x).mean()

    result = check(Teacher(), leaf(8, 16), level=level, low=["linear"])
    assert result.plans[0].scaled


@LEVELS
def test_enable_grad_inside_no_grad(level: str) -> None:
    class Inner(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                frozen = self.norm(self.up(x))
                with torch.enable_grad():
                    out: torch.Tensor = self.down(frozen)
            return out

    result = check(Inner(), torch.randn(8, 16), level=level, low=["linear"])
    assert result.model.up.weight.grad is None


@LEVELS
def test_detach(level: str) -> None:
    class Detached(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.up(x)
            return self.down(self.norm(h).detach()) + self.down(h) * h.detach().mean()

    check(Detached(), leaf(8, 16), level=level, low=["linear"])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_graph_without_gradients_is_not_scaled(mode: Any) -> None:
    model = MLP()
    fast = mpcompile(MLP(), dtype=torch.float16, emit="eager", strict=True)
    fast.load_state_dict(model.state_dict())
    x = torch.randn(8, 16)
    with mode():
        assert_near(fast(x), model(x), "output", 1e-2)
    (plan,) = compiled_plans(fast)
    assert not plan.scaled
    assert plan.counts()["LOW"] >= 2
    fast(x).sum().backward()
    assert compiled_plans(fast)[1].scaled


@LEVELS
def test_eval_mode_still_differentiates(level: str) -> None:
    """eval() is about dropout and batch norm; gradients (of an input, say) work as before."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout()).eval()
    check(model, leaf(2, 3, 6, 6), level=level, low=["conv2d"])
