"""Clusters: the ranks of a process group that are one peer of a run together.

Users create a `Cluster`. `ties` connect the ranks, and promise that within seconds all ranks learn which rank is lost.
`team` is how they exchange values and decisions, and promises that an error of one is an error of all. `shards` says
how a model lies at the ranks: `whole` holds the parameters of a sharded model in one piece at rank 0; `strands` divides
them among the ranks.
"""

from __future__ import annotations

from shoal.cluster.cluster import Cluster
from shoal.cluster.ties import ClusterError

__all__ = ["Cluster", "ClusterError"]
