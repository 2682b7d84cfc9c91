"""The processes of a framework that are one peer together."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import distributed as dist

import shoal

Clusters = shoal.Cluster | Callable[[], shoal.Cluster]
"""What the user gives as `cluster=`: a function that makes a cluster when the framework's process group is there, or a
cluster."""
MAKES = "lambda: shoal.Cluster(strands=1)"


class Ranks:
    """This process and those that are one peer with it. All of them make each call at once.

    Args:
        cluster: of them; None: this process is a peer by itself.

    Attributes:
        cluster: as given.
        size: how many they are.
        speaks: whether this process is the one that is in the run, for all of them.
    """

    def __init__(self, cluster: shoal.Cluster | None = None) -> None:
        self.cluster = cluster
        self.size = 1 if cluster is None else cluster.size
        self.speaks = cluster is None or cluster.rank == 0

    @classmethod
    def of(cls, given: Clusters | None, count: int, what: str) -> Ranks:
        """The processes of a framework. With one, `given` is not used: a script may be started with one or many.

        Args:
            given: by the user.
            count: how many processes the framework has, or how many devices get one each.
            what: where that was asked for.

        Raises:
            ValueError: for several where no cluster is given, and for a cluster of others than those.
        """
        if count <= 1:
            return cls()
        if given is None:
            raise ValueError(several(what, count))
        cluster = given if isinstance(given, shoal.Cluster) else given()
        if not isinstance(cluster, shoal.Cluster):
            raise ValueError(f"cluster= made a {type(cluster).__name__}: give cluster={MAKES}")
        if cluster.size != count:
            raise ValueError(
                f"{cluster!r} has {cluster.size} of the {count} processes of {what}, which reduces gradients over all: "
                f"give cluster={MAKES}, which takes all of them"
            )
        return cls(cluster)

    def seed(self, dht: shoal.DHT | None) -> int:
        """A seed that differs between peers, and not between the ranks of one: it follows from torch's seed and the
        peer's identity at rank 0. Peers that are seeded alike, for the same first parameters, would otherwise draw the
        same batches; ranks share out one order of the data.

        Raises:
            ValueError: at all ranks, if rank 0 has no DHT.
        """
        found = [-1]
        if self.speaks and dht is not None:
            found = [(torch.initial_seed() + int.from_bytes(dht.peer_id.key[:4])) % 2**32]
        group = None if self.cluster is None else self.cluster.group
        if group is not None:
            dist.broadcast_object_list(found, dist.get_global_rank(group, 0), group=group)
        if found[0] < 0:
            raise ValueError("dht=None, and this process is in the run (of a cluster, rank 0): give a shoal.DHT")
        return found[0]

    def of_first(self, number: int) -> int:
        """That number of rank 0."""
        return self._reduced(number if self.speaks else 0)

    def total(self, number: int) -> int:
        """The sum of that number over the ranks."""
        return self._reduced(number)

    def _reduced(self, number: int) -> int:
        if self.cluster is None or self.cluster.group is None:
            return number
        is_nccl = "nccl" in dist.get_backend(self.cluster.group)  # which sends the memory of GPUs only
        tensor = torch.tensor(number, device="cuda" if is_nccl else "cpu")
        dist.all_reduce(tensor, group=self.cluster.group)
        return int(tensor.item())


def several(what: str, count: int) -> str:
    """Why several processes, or devices, of one framework are refused, and the ways out.

    Args:
        what: where they were asked for.
        count: how many they are.
    """
    return (
        f"a peer of a run is one process on one device, and {what} asks for {count}: give cluster={MAKES} to all "
        "processes of a launcher, which are one peer then; or start one process for each device without a launcher, "
        "each with a shoal.DHT of its own, and let the run be what connects them"
    )
