"""The class by which users say which ranks are one peer together."""

from __future__ import annotations

import math
import os
from typing import Any

from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

MOST_STRANDS = 1024


class Cluster:
    """The ranks that train one model together (DDP, FSDP2, HSDP) and are one peer of a run.

    >>> torch.distributed.init_process_group()
    >>> model = DistributedDataParallel(model)
    >>> optimizer = shoal.Optimizer(..., params=model.parameters(), cluster=shoal.Cluster(strands=8))

    Create the cluster, and then the optimizer, in all of its ranks at the same time. A single process also creates a
    `Cluster` if it is a peer of a run whose other peers are clusters.

    Args:
        group: a process group, or a device mesh, whose ranks all belong to the cluster. None (default): all ranks, or
            this process alone if `torch.distributed` is not initialised.
        strands: the number of shares into which the run's vector is cut: from 1 to 1024, a multiple of the number of
            ranks, and the same at all peers of the run; 8 by default. Each rank carries the same number of strands. It
            averages them over its own connections with the ranks of other peers that carry the same strands, steps
            them, and keeps their optimizer state. With `strands=1`, rank 0 averages and steps the whole model, and
            sends the new parameters to the other ranks. That uses the memory and the network of one rank only, but
            works with any placement of DTensors.

    Attributes:
        group: the process group of exactly these ranks; None for a single process.
        strands: as given.
        rank: the rank of this process in the group.
        size: the number of ranks.

    Raises:
        ValueError: if `strands` is out of range or no multiple of the number of ranks; if `group` is no group or mesh,
            or this process is not one of its ranks; or if `torch.distributed` is not initialised although a group is
            given or there are several processes (`WORLD_SIZE` of `torchrun`).
    """

    def __init__(self, group: dist.ProcessGroup | DeviceMesh | None = None, *, strands: int = 8) -> None:
        if type(strands) is not int or not 1 <= strands <= MOST_STRANDS:
            raise ValueError(f"strands={strands!r}: give a whole number from 1 to {MOST_STRANDS}")
        self.group: dist.ProcessGroup | None = None
        self.strands, self.rank, self.size = strands, 0, 1
        is_there = dist.is_available() and dist.is_initialized()
        if not is_there and (group is not None or int(os.environ.get("WORLD_SIZE", "1")) > 1):
            raise ValueError("a Cluster needs its process group: call torch.distributed.init_process_group first")
        if is_there:
            found: Any = dist.group.WORLD if group is None else group
            if isinstance(group, DeviceMesh):
                found = _group_of(group)
            if not isinstance(found, dist.ProcessGroup):
                raise ValueError(
                    f"group={group!r}: give a process group or a device mesh of which this process is a rank"
                )
            self.group, self.rank, self.size = found, dist.get_rank(found), dist.get_world_size(found)
        if self.rank < 0:
            raise ValueError("this process is not a rank of the group")
        if strands > 1 and strands % self.size:
            more = shared_by(self.size, strands)
            raise ValueError(
                f"strands={strands} cannot be shared by {self.size} ranks: give strands={more}, here and at all peers "
                "of the run, or strands=1: then rank 0 speaks for all"
            )

    def __repr__(self) -> str:
        return f"shoal.Cluster(rank {self.rank} of {self.size}, strands={self.strands})"


def shared_by(ranks: int, strands: int) -> int:
    """A number of strands that so many ranks can share, and, if there is one, each cluster that can share `strands`."""
    of_both = math.lcm(strands, ranks)
    return of_both if of_both <= MOST_STRANDS else ranks * -(-strands // ranks)


def _group_of(mesh: DeviceMesh) -> Any:
    """The group of all ranks of a mesh."""
    if mesh.ndim == 1:
        return mesh.get_group()
    ranks = sorted(mesh.mesh.flatten().tolist())
    if ranks == list(range(dist.get_world_size())):
        return dist.group.WORLD
    return dist.new_group(ranks, use_local_synchronization=True)
