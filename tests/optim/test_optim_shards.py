"""MPOptimizer over sharded parameters: FSDP2's and others' DTensors, on processes that use gloo."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from as_written import AsWritten, MakesState
from ranks import on_each_rank
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from mpcompile import LossScale, MPOptimizer
from mpcompile.errors import CannotRewrite, MPCompileError
from mpcompile.optim.elementwise import refuse_mixing
from mpcompile.optim.first_state import initialise_state
from mpcompile.optim.members import Member
from mpcompile.optim.trace import trace

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")

Make = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


def adamw(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)  # type: ignore[arg-type]


def momentum(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)  # type: ignore[arg-type]


def amsgrad(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05, amsgrad=True)  # type: ignore[arg-type]


class Net(nn.Module):
    """Matrices whose rows no 2 or 4 ranks share evenly: 5, and 3 (over 4, one rank has none)."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.tanh(self.fc1(x)))


def whole(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """All elements of these, of DTensors those of all ranks."""
    full = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
    return torch.cat([t.detach().flatten() for t in full])


def state_of(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """All tensors of an optimizer's state."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return whole(optimizer.state[p][key] for p in params for key in sorted(optimizer.state[p]))


STEPS, OVERFLOW = 4, 2


def train(rank: int, ranks: int, make: Make, norm: float | None, **options: Any) -> None:
    """Steps beside plain FP64 ones in each process over all data; one gradient overflows in one
    rank's shard.
    """
    torch.manual_seed(0)
    net = Net()
    reference = copy.deepcopy(net).double()
    fully_shard(net)
    scale = LossScale.dynamic(init_scale=8.0)
    options = {"emit": "eager", "loss_scale": scale, "max_grad_norm": norm, **options}
    mine, plain = MPOptimizer(make(net.parameters()), **options), make(reference.parameters())
    data = torch.randn(STEPS, ranks, 7, 6, generator=torch.Generator().manual_seed(1))
    for step, xs in enumerate(data):
        mine.zero_grad()
        plain.zero_grad()
        net(xs[rank]).square().mean().backward()
        sum(reference(x.double()).square().mean() for x in xs).div(ranks).backward()  # type: ignore[union-attr]
        if step == OVERFLOW:
            before = whole(net.parameters()), state_of(mine)
            if rank == 1:
                gradient: Any = net.fc1.weight.grad
                gradient.to_local()[0, 0] = torch.inf
        if norm is not None:
            norms = nn.utils.clip_grad_norm_(reference.parameters(), norm)
        with CommDebugMode() as sent:
            mine.step()
        assert sent.get_total_counts() == 1
        assert bool(mine.skipped) == (step == OVERFLOW), f"rank {rank}, step {step}"
        if step == OVERFLOW:
            assert torch.equal(whole(net.parameters()), before[0])
            assert torch.equal(state_of(mine), before[1])
            continue
        plain.step()
        if norm is not None:
            torch.testing.assert_close(mine.grad_norm.double(), norms, rtol=1e-6, atol=0)
    assert (scale.value, mine.skipped_steps) == (4.0, 1)
    torch.testing.assert_close(
        whole(net.parameters()).double(), whole(reference.parameters()), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(state_of(mine).double(), state_of(plain), rtol=1e-5, atol=1e-6)


def _two(rank: int) -> None:
    for make in (adamw, momentum, amsgrad):
        for norm in (None, 0.05):
            train(rank, 2, make, norm)
    checkpoint(rank)


@pytest.mark.slow("ranks under Inductor")
def test_two_ranks_follow_one_process() -> None:
    on_each_rank(_two)


def _four(rank: int) -> None:
    train(rank, 4, adamw, 0.05)  # rank 3 has no row of `fc2`
    tensor_parallel(rank)
    replicated_and_sharded(rank)
    on_parts_of_a_mesh(rank)


@pytest.mark.slow("ranks under Inductor")
def test_four_ranks() -> None:
    on_each_rank(_four, ranks=4)


def _inductor(rank: int) -> None:
    train(rank, 2, adamw, 0.05, emit="inductor")


@pytest.mark.slow("ranks under Inductor")
def test_inductor() -> None:
    on_each_rank(_inductor)


# -- checkpoints -----------------------------------------------------------------------------------


def checkpoint(rank: int) -> None:
    """The state is as plain AdamW keeps it: it is saved, and goes on in either kind."""
    start = Net()
    data = torch.randn(4, 7, 6, generator=torch.Generator().manual_seed(2 + rank))

    def go_on(net: nn.Module, optimizer: torch.optim.Optimizer, batches: torch.Tensor) -> Any:
        for batch in batches:
            optimizer.zero_grad()
            net(batch).square().mean().backward()
            optimizer.step()
        return whole(net.parameters())

    def made(kind: type, of: nn.Module = start) -> Any:
        net = copy.deepcopy(of)
        fully_shard(net)
        plain = adamw(net.parameters())
        if kind is not MPOptimizer:
            return net, plain
        scale = LossScale.dynamic(init_scale=8.0)
        return net, MPOptimizer(plain, emit="eager", loss_scale=scale, max_grad_norm=100.0)

    net, optimizer = made(MPOptimizer)
    go_on(net, optimizer, data[:2])
    weight = net.fc1.weight
    entry = optimizer.state[weight]["exp_avg"]
    assert isinstance(entry, DTensor)
    assert entry.placements == weight.placements
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(net.state_dict())
    wanted = go_on(net, optimizer, data[2:])
    for kind in (MPOptimizer, torch.optim.AdamW):
        other, resumed = made(kind)
        other.load_state_dict(weights)
        theirs = {k: v for k, v in saved.items() if kind is MPOptimizer or k != "loss_scale"}
        resumed.load_state_dict(copy.deepcopy(theirs))  # it keeps the tensors that it is given
        torch.testing.assert_close(go_on(other, resumed, data[2:]), wanted, rtol=1e-5, atol=1e-7)


# -- meshes ----------------------------------------------------------------------------------------


def _distributed(net: nn.Module, mesh: Any, placements: dict[str, tuple[Any, ...]]) -> None:
    """Make each parameter a DTensor."""
    for name, parameter in list(net.named_parameters()):
        owner, _, last = name.rpartition(".")
        sharded = distribute_tensor(parameter.detach(), mesh, placements[name])
        setattr(net.get_submodule(owner), last, nn.Parameter(sharded))


def follows(net: nn.Module, reference: nn.Module, norm: float | None, make: Make = adamw) -> None:
    """Two steps on gradients made by hand; the second overflows on one rank, the third does not."""
    scale = LossScale.dynamic(init_scale=8.0)
    mine = MPOptimizer(make(net.parameters()), emit="eager", loss_scale=scale, max_grad_norm=norm)
    plain = make(reference.parameters())
    generator = torch.Generator().manual_seed(3)
    for step in range(3):
        for p, r in zip(net.parameters(), reference.parameters(), strict=True):
            r.grad = torch.randn(r.shape, generator=generator)
            p.grad = r.grad.clone()
            if isinstance(p, DTensor):
                p.grad = distribute_tensor(r.grad, p.device_mesh, p.placements)
                if p.placements == (Replicate(),):  # as under sequence parallelism
                    p.grad = DTensor.from_local(r.grad / 4, p.device_mesh, [Partial()])
        if step == 1 and dist.get_rank() == 2:
            next(g for p in net.parameters() if isinstance(g := p.grad, DTensor)).to_local().fill_(
                torch.nan
            )
        mine.step()
        assert bool(mine.skipped) == (step == 1)
        if step != 1:
            if norm is not None:
                wanted = nn.utils.clip_grad_norm_(reference.parameters(), norm)
                torch.testing.assert_close(mine.grad_norm, wanted)
            plain.step()
    assert scale.value == 4.0
    torch.testing.assert_close(whole(net.parameters()), whole(reference.parameters()))


BY_ROW = {"fc1.weight": Shard(0), "fc1.bias": Shard(0), "fc2.weight": Shard(1),
          "fc2.bias": Replicate()}  # fmt: skip


def tensor_parallel(rank: int) -> None:
    """Column- and row-wise, one parameter whole on each rank; and with plain parameters beside."""
    mesh = init_device_mesh("cpu", (4,))
    net = Net()
    reference = copy.deepcopy(net)
    _distributed(net, mesh, {name: (placement,) for name, placement in BY_ROW.items()})
    begun = copy.deepcopy(reference)
    follows(net, reference, norm=0.5)
    net, reference = copy.deepcopy(begun), copy.deepcopy(begun)
    _distributed(net, mesh, {name: (placement,) for name, placement in BY_ROW.items()})
    follows(net, reference, norm=0.5, make=MakesState)
    net, reference = copy.deepcopy(begun), copy.deepcopy(begun)
    _distributed(net.fc1, mesh, {"weight": (Shard(0),), "bias": (Shard(0),)})
    with pytest.raises(MPCompileError, match="max_grad_norm needs the norm over all processes"):
        MPOptimizer(adamw(net.parameters()), max_grad_norm=1.0)
    follows(net, reference, norm=None)


def replicated_and_sharded(rank: int) -> None:
    """HSDP; and FSDP over tensor parallelism."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    net = Net()
    reference = copy.deepcopy(net)
    fully_shard(net, mesh=mesh)
    follows(net, reference, norm=0.5)
    net = copy.deepcopy(reference)
    _distributed(net, mesh, {name: (Shard(0), placement) for name, placement in BY_ROW.items()})
    follows(net, reference, norm=0.5)


def on_parts_of_a_mesh(rank: int) -> None:
    """A parameter on one row of the mesh beside one on all of it: flags agree on the whole mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    net = Net()
    reference = copy.deepcopy(net)
    _distributed(net.fc1, mesh["data"], {"weight": (Shard(0),), "bias": (Shard(0),)})
    _distributed(net.fc2, mesh, {"weight": (Shard(0), Shard(1)), "bias": (Shard(0), Replicate())})
    with pytest.raises(MPCompileError, match="max_grad_norm needs the norm over all processes"):
        MPOptimizer(adamw(net.parameters()), max_grad_norm=1.0)
    follows(net, reference, norm=None)
    net = copy.deepcopy(reference)
    _distributed(net.fc1, mesh["data"], {"weight": (Shard(0),), "bias": (Shard(0),)})
    _distributed(net.fc2, mesh["tensor"], {"weight": (Shard(0),), "bias": (Shard(0),)})
    with pytest.raises(MPCompileError, match="of which neither contains the other"):
        MPOptimizer(adamw(net.parameters()))


# -- what is refused -------------------------------------------------------------------------------


class Normalised(AsWritten):
    """Divides each gradient by its own norm, as LAMB and LARS do."""

    def update(self, group: dict[str, Any], p: Any, state: dict[str, Any]) -> None:
        p.add_(p.grad / p.grad.norm(), alpha=-group["lr"])


class ByPosition(AsWritten):
    def update(self, group: dict[str, Any], p: Any, state: dict[str, Any]) -> None:
        p.sub_(p.grad * torch.arange(p.shape[-1], dtype=p.dtype))


class WholeState(AsWritten):
    """Its state is a plain tensor of the whole parameter's shape."""

    def update(self, group: dict[str, Any], p: Any, state: dict[str, Any]) -> None:
        state.setdefault("seen", torch.zeros(p.shape))
        p.sub_(p.grad)


REFUSED = (Normalised, ByPosition, WholeState, torch.optim.Muon, torch.optim.Adafactor)


@pytest.fixture
def mesh(group: None) -> Any:
    """A mesh of this process alone; a step over it is judged as over several."""
    return init_device_mesh("cpu", (1,))


def sharded(mesh: Any) -> nn.Parameter:
    parameter = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    return parameter


def test_a_step_that_is_not_elementwise_is_refused(mesh: Any) -> None:
    for cls in REFUSED:
        optimizer = MPOptimizer(cls([sharded(mesh)]), emit="eager")  # type: ignore[arg-type]
        if cls is WholeState:
            optimizer.step()  # as plain torch does it: it makes the state
        with pytest.raises(MPCompileError, match="parameters are sharded over processes, and its"):
            optimizer.step()


def test_the_multi_tensor_form_is_elementwise(mesh: Any) -> None:
    """As on CUDA: the one of AdamW is, one with a norm is not."""

    class Clipped(AsWritten):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                gradients = [p.grad for p in group["params"]]
                norms = torch._foreach_norm(gradients)
                torch._foreach_div_(gradients, norms)
                torch._foreach_sub_(group["params"], gradients)

    def prove(optimizer: torch.optim.Optimizer) -> None:
        members = [Member(0, p) for p in optimizer.param_groups[0]["params"]]
        initialise_state(optimizer, members)
        strides = [m.param.stride() for m in members]
        graph = trace(optimizer, members, strides=strides, foreach=True).graph.graph
        assert any("_foreach_" in str(node.target) for node in graph.nodes)
        refuse_mixing(graph, members)

    for make in (adamw, momentum, amsgrad):
        prove(make([sharded(mesh), sharded(mesh)]))
    with pytest.raises(CannotRewrite, match="is not elementwise"):
        prove(Clipped([sharded(mesh), sharded(mesh)]))


def test_a_partial_parameter_is_refused(mesh: Any) -> None:
    partial = nn.Parameter(DTensor.from_local(torch.ones(4), mesh, [Partial()]))
    with pytest.raises(MPCompileError, match="a sum of one part on each rank"):
        MPOptimizer(adamw([partial]))


def test_a_plain_gradient_of_a_sharded_parameter_is_refused(mesh: Any) -> None:
    parameter = sharded(mesh)
    parameter.grad = torch.ones(4, 4)
    with pytest.raises(MPCompileError, match="is no DTensor of the same mesh"):
        MPOptimizer(adamw([parameter]), emit="eager").step()
