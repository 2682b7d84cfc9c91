"""The ranks of a process group, or of a device mesh, that are one peer together."""

from __future__ import annotations

from typing import Any

from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh


class Cluster:
    """The ranks that train one model together (DDP, FSDP2, tensor parallel) and are one peer of a run.

    >>> torch.distributed.init_process_group()
    >>> model = DistributedDataParallel(model)
    >>> optimizer = shoal.Optimizer(..., params=model.parameters(), cluster=shoal.Cluster(strands=1))

    Make it, and the optimizer, in all of its ranks at once.

    Args:
        group: a process group, or a device mesh (all of its ranks); None: all ranks.
        strands: into how many shares the vector of the run is cut, each carried by one rank. With 1, rank 0 speaks for
            the cluster: it averages and steps the whole model, and sends the others the new parameters. That takes the
            memory and the network of one rank, and works with any placement of DTensors. More are not built yet.

    Attributes:
        group: the process group of exactly its ranks.
        rank, size: of this process, and how many there are.

    Raises:
        ValueError: for `strands` other than 1, for what is no group, in a process that is none of the ranks, and where
            `torch.distributed` is not initialised.
    """

    def __init__(self, group: dist.ProcessGroup | DeviceMesh | None = None, *, strands: int = 1) -> None:
        if type(strands) is not int or strands != 1:
            raise ValueError(f"strands={strands!r}: only strands=1 is built so far: rank 0 speaks for all")
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError("a Cluster needs its process group: call torch.distributed.init_process_group first")
        found: Any = dist.group.WORLD if group is None else group
        if isinstance(group, DeviceMesh):
            found = _group_of(group)
        if not isinstance(found, dist.ProcessGroup):
            raise ValueError(f"group={group!r}: give a process group or a device mesh of which this process is a rank")
        self.group, self.strands = found, strands
        self.rank, self.size = dist.get_rank(found), dist.get_world_size(found)
        if self.rank < 0:
            raise ValueError("this process is not a rank of the group")

    def __repr__(self) -> str:
        return f"shoal.Cluster(rank {self.rank} of {self.size}, strands={self.strands})"


def _group_of(mesh: DeviceMesh) -> Any:
    """The group of all ranks of a mesh."""
    if mesh.ndim == 1:
        return mesh.get_group()
    ranks = sorted(mesh.mesh.flatten().tolist())
    if ranks == list(range(dist.get_world_size())):
        return dist.group.WORLD
    return dist.new_group(ranks, use_local_synchronization=True)
