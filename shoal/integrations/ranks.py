"""The processes of a framework that are one peer together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import distributed as dist

import shoal

Clusters = shoal.Cluster | Callable[[], shoal.Cluster]
"""What the user gives as `cluster=`: a function that makes a cluster when the framework's process group is there, or a
cluster."""
MAKES = "lambda: shoal.Cluster(strands=8)"
SPEAKS = "lambda: shoal.Cluster(strands=1)"


class LaunchedRanks:
    """This process and those that are one peer with it. All of them make each call at once.

    Args:
        cluster: of them; None: this process is a peer by itself.

    Attributes:
        cluster: as given.
        size: how many they are.
        speaks: whether this process is the first of them, which others of the run see.
    """

    def __init__(self, cluster: shoal.Cluster | None = None) -> None:
        self.cluster = cluster
        self.size = 1 if cluster is None else cluster.size
        self.speaks = cluster is None or cluster.rank == 0

    @classmethod
    def of(cls, given: Clusters | None, count: int, what: str) -> LaunchedRanks:
        """The processes of a framework, one or many. A single process makes its cluster, too, and carries all strands.
        With `strands=1` there is nothing to share, and it is a peer without a cluster.

        Args:
            given: by the user.
            count: how many processes the framework has, or how many devices get one each.
            what: where that was asked for.

        Raises:
            ValueError: for several where no cluster is given, and for a cluster of others than those.
        """
        if given is None:
            if count > 1:
                raise ValueError(several(what, count))
            return cls()
        cluster = given if isinstance(given, shoal.Cluster) else given()
        if not isinstance(cluster, shoal.Cluster):
            raise ValueError(f"cluster= made a {type(cluster).__name__}: give cluster={MAKES}")
        if cluster.size != count:
            raise ValueError(
                f"{cluster!r} has {cluster.size} of the {count} processes of {what}, which reduces gradients over all: "
                f"give cluster={MAKES}, which takes all of them"
            )
        return cls(None if cluster.size == cluster.strands == 1 else cluster)

    def seed(self, dht: shoal.DHT | None) -> int:
        """A seed that differs between peers, and not between the ranks of one: it follows from torch's seed and the
        peer's identity at rank 0. Peers that are seeded alike, for the same first parameters, would otherwise draw the
        same batches; ranks share out one order of the data.

        Raises:
            ValueError: at all ranks, if one that is in the run has no DHT, or the identity of another.
        """
        known = [(torch.initial_seed(), b"" if dht is None else dht.peer_id.key)]
        if self.cluster is not None and self.cluster.group is not None:
            mine, known = known[0], known * self.size
            dist.all_gather_object(known, mine, group=self.cluster.group)
        seed, keys = known[0][0], [key for _, key in known]
        if not keys[0]:
            raise ValueError("dht=None, and this process is in the run (of a cluster, rank 0): give a shoal.DHT")
        if self.cluster is not None and self.cluster.strands > 1:
            self._check(keys)
        return (seed + int.from_bytes(keys[0][:4])) % 2**32

    def _check(self, keys: Sequence[bytes]) -> None:
        """Raises ValueError if a rank that carries strands has no DHT (b""), or the identity of another."""
        without = ", ".join(str(rank) for rank, key in enumerate(keys) if not key)
        if without:
            raise ValueError(
                f"dht=None at rank {without} of {self.cluster!r}, where each rank is in the run with its own strands: "
                f"give a shoal.DHT in every process, or cluster={SPEAKS}, with which rank 0 speaks for all"
            )
        for rank, key in enumerate(keys):
            if (first := keys.index(key)) < rank:
                raise ValueError(
                    f"ranks {first} and {rank} of this cluster have one identity, and each is a peer of its strands: "
                    "give each process an identity_path= of its own"
                )

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
        f"a peer of a run is one process on one device, and {what} asks for {count}: give cluster={MAKES} at all peers "
        "of the run, and a shoal.DHT in every process: the processes of a launcher are one peer then; or give "
        f"cluster={SPEAKS}, with which rank 0 alone needs a DHT; or start one process for each device without a "
        "launcher, each with a shoal.DHT of its own, and let the run be what connects them"
    )
