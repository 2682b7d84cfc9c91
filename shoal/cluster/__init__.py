"""The ranks of a process group as one peer of a run.

`gang` promises that every rank hears of a rank that is lost, by its name, within seconds. `whole` has the parameters of
a sharded model in one piece at rank 0. `cluster` is what users make; `optim` has the optimizers of rank 0 and of the
others.
"""

from __future__ import annotations

from shoal.cluster.cluster import Cluster
from shoal.cluster.gang import ClusterError

__all__ = ["Cluster", "ClusterError"]
