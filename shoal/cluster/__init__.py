"""Clusters: the ranks of a process group that are one peer of a run together.

Users create a `Cluster`. `gang` connects the ranks, and promises that within seconds all ranks learn which rank is
lost. `whole` holds the parameters of a sharded model in one piece at rank 0; `strands` divides them among the ranks.
`optim` has the optimizers of rank 0 and of the other ranks.
"""

from __future__ import annotations

from shoal.cluster.cluster import Cluster
from shoal.cluster.ties import ClusterError

__all__ = ["Cluster", "ClusterError"]
