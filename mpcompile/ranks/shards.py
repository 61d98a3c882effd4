"""Parameters that several processes hold together: DTensors, as FSDP2 and tensor parallelism make.

Each rank holds a *local* tensor of a DTensor: a shard, or a whole replica. Here stands how they
lie, which process groups together connect all ranks that hold a part, and small collectives by
which ranks decide alike.

All ranks must call these, in the same order. They are called where data-parallel training is
collective anyway: in an optimizer's step, in a forward that exchanges shards, in a reduction.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..errors import MPCompileError
from ..torch_inside.distributed import LOCAL


def is_distributed() -> bool:
    """Whether the process works with others: else nothing is sharded, and torch is not asked."""
    return dist.is_available() and dist.is_initialized()


@dataclass(frozen=True)
class Ranks:
    """The ranks that train something together; false if there are no others.

    Attributes:
        groups: the process groups that connect them.
        device: the kind of device whose tensors the groups exchange; None without groups.
    """

    groups: tuple[dist.ProcessGroup, ...] = ()
    device: torch.device | None = None

    def __bool__(self) -> bool:
        return bool(self.groups)

    def __add__(self, others: Ranks) -> Ranks:
        groups = tuple(dict.fromkeys((*self.groups, *others.groups)))
        return Ranks(groups, others.device if others else self.device)

    def all_max(self, numbers: torch.Tensor) -> torch.Tensor:
        """The elementwise maximum over these ranks of flags or small counts: any shape, an integer
        dtype or bool. On the groups' device; without groups the tensor itself.
        """
        if not self:
            return numbers
        found = numbers.to(self.device, torch.int32, copy=True)
        for group in self.groups:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        return found.to(numbers.dtype)

    def least(self, numbers: Sequence[float]) -> list[float]:
        """For each number, of which each rank has as many, the least that one of them has; waits
        for the device.
        """
        found = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        for group in self.groups:
            dist.all_reduce(found, dist.ReduceOp.MIN, group=group)
        return [float(number) for number in found.tolist()]


def is_sharded(tensor: torch.Tensor) -> bool:
    # DTensor is there if something in this process has imported it (the import takes a while).
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor: of a DTensor its local tensor, else the tensor itself."""
    # Each step asks this of each tensor: an attribute is found faster than the class.
    held: Any = getattr(tensor, LOCAL, None)
    if held is None:
        return tensor
    wait = getattr(held, "wait", None)  # an AsyncCollectiveTensor: still on its way
    mine: torch.Tensor = held if wait is None else wait()
    return mine


def ranks_of(tensors: Iterable[torch.Tensor]) -> Ranks:
    """The ranks that hold parts of the DTensors among these."""
    # Each step asks this of each parameter: see `local`.
    found = dict.fromkeys(getattr(t, "device_mesh", None) for t in tensors)
    meshes = [mesh for mesh in found if mesh is not None]
    if not meshes:
        return Ranks()
    groups = [group for mesh in meshes for group in mesh.get_all_groups()]
    distinct = {group.group_name: group for group in groups}
    return Ranks(tuple(distinct.values()), torch.device(meshes[0].device_type))


@dataclass(frozen=True)
class Layout:
    """How a DTensor lies on its ranks; equal layouts put equal indices on equal ranks.

    Attributes:
        mesh: its DeviceMesh.
        placements: one for each dimension of the mesh.
        shape: of the whole tensor.
    """

    mesh: Any
    placements: tuple[Any, ...]
    shape: tuple[int, ...]

    @property
    def replicas(self) -> int:
        """On how many ranks of the mesh each element lies."""
        pairs = zip(self.mesh.shape, self.placements, strict=True)
        return math.prod(size for size, placement in pairs if placement.is_replicate())


def layout_of(tensor: torch.Tensor) -> Layout | None:
    """How a tensor lies on its ranks, or None for a plain tensor."""
    if not is_sharded(tensor):
        return None
    sharded: Any = tensor
    return Layout(sharded.device_mesh, tuple(sharded.placements), tuple(sharded.shape))


def place_gradient(parameter: torch.Tensor) -> None:
    """Give a DTensor parameter's gradient the placements of the parameter, if it has others: under
    sequence parallelism the gradient of a replicated weight arrives as one part of a sum on each
    rank. All ranks that hold the parameter must call this.

    Raises:
        MPCompileError: the gradient is a plain tensor, or lies on another mesh.
    """
    gradient: Any = parameter.grad
    layout = layout_of(parameter)
    if layout is None or gradient is None:
        return
    if not is_sharded(gradient) or gradient.device_mesh != layout.mesh:
        raise MPCompileError(
            f"the gradient of a DTensor parameter of shape {layout.shape} is no DTensor of the "
            "same mesh; let autograd make it, or use distribute_tensor()"
        )
    if tuple(gradient.placements) != layout.placements:
        with torch.no_grad():
            parameter.grad = gradient.redistribute(placements=layout.placements)


@dataclass(frozen=True)
class Connected:
    """The ranks that hold parts of some parameters, and how they reach each other.

    Attributes:
        groups: names of process groups: a sum over one after the other is one over all ranks.
        device: the kind of device whose tensors the groups exchange.
        countable: whether each parameter's `Layout.replicas` says how often its elements lie on
            these ranks. Not so for plain tensors, and for parameters on a part of the mesh.
    """

    groups: tuple[str, ...]
    device: str
    countable: bool

    def sum(self, vector: torch.Tensor) -> torch.Tensor:
        """The sum of a vector over all these ranks, each of which must call this."""
        functional = torch.ops._c10d_functional  # there only if torch was built with distributed
        home, vector = vector.device, vector.to(self.device)  # FSDP may keep parameters on the host
        for group in self.groups:
            vector = functional.wait_tensor(functional.all_reduce(vector, "sum", group))
        return vector.to(home)


def connect(parameters: Iterable[torch.Tensor], name: str) -> Connected | None:
    """The ranks that hold parts of these parameters, or None if no parameter is a DTensor.

    Args:
        name: who asks, for errors.

    Raises:
        MPCompileError: a parameter is one part of a sum on each rank (`Partial`), or they lie on
            meshes of which none contains the others.
    """
    layouts = [layout_of(parameter) for parameter in parameters]
    sharded = [layout for layout in layouts if layout is not None]
    if not sharded:
        return None
    for layout in sharded:
        if any(placement.is_partial() for placement in layout.placements):
            raise MPCompileError(
                f"{name}: a parameter of shape {layout.shape} is placed as {layout.placements}: a "
                "sum of one part on each rank; redistribute() it to Shard or Replicate"
            )
    meshes = list(dict.fromkeys(layout.mesh for layout in sharded))
    widest = max(meshes, key=lambda mesh: int(mesh.size()))
    for mesh in meshes:
        if not _ranks(mesh) <= _ranks(widest) or mesh.device_type != widest.device_type:
            raise MPCompileError(
                f"{name}: its parameters lie on {mesh} and on {widest}, of which neither contains "
                "the other, so no rank knows of all overflows; make one optimizer for each"
            )
    countable = len(sharded) == len(layouts) and len(meshes) == 1
    return Connected(_groups(widest), widest.device_type, countable)


def _ranks(mesh: Any) -> frozenset[int]:
    return frozenset(mesh.mesh.flatten().tolist())


def _groups(mesh: Any) -> tuple[str, ...]:
    """Names of the groups that connect all ranks of a mesh: one, if there is one over all."""
    is_whole = mesh.size() == dist.get_world_size()
    groups: list[Any] = [dist.group.WORLD] if is_whole else mesh.get_all_groups()
    return tuple(group.group_name for group in groups)
