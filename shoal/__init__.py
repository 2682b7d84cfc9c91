"""Shoal: train with the PyTorch optimizer that you already use on whatever machines you have.

Importing this package starts nothing: no thread, no process, no socket. Each public name is imported when it is first
used, so a program that needs no torch, such as a DHT node, does not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal import compression as compression
    from shoal import outer as outer
    from shoal.averaging.averager import DecentralizedAverager as DecentralizedAverager
    from shoal.averaging.control import AveragingStage as AveragingStage
    from shoal.averaging.control import RoundReport as RoundReport
    from shoal.averaging.control import StepControl as StepControl
    from shoal.cluster.cluster import Cluster as Cluster
    from shoal.cluster.ties import ClusterError as ClusterError
    from shoal.dht.dht import DHT as DHT
    from shoal.dht.records import ValueWithExpiration as ValueWithExpiration
    from shoal.dht.records import get_dht_time as get_dht_time
    from shoal.flat.contiguous import ContiguousParams as ContiguousParams
    from shoal.flat.together import Together as Together
    from shoal.functional.qhm_optimizer import QHM as QHM
    from shoal.functional.registry import functional_optim_map as functional_optim_map
    from shoal.functional.registry import register_functional_optimizer as register_functional_optimizer
    from shoal.optim.diloco import DiLoCo as DiLoCo
    from shoal.optim.epoch_scheduler import EpochScheduler as EpochScheduler
    from shoal.optim.grad_averager import GradientAverager as GradientAverager
    from shoal.optim.grad_scaler import GradScaler as GradScaler
    from shoal.optim.optimizer import Optimizer as Optimizer
    from shoal.optim.power_sgd_averager import PowerSGDGradientAverager as PowerSGDGradientAverager
    from shoal.optim.progress_tracker import ProgressTracker as ProgressTracker
    from shoal.optim.reports import DownloadReport as DownloadReport
    from shoal.optim.reports import EpochReport as EpochReport
    from shoal.optim.reports import ForkReport as ForkReport
    from shoal.optim.reports import ReachabilityReport as ReachabilityReport
    from shoal.optim.state_averager import TrainingStateAverager as TrainingStateAverager
    from shoal.optim.trace import Trace as Trace
    from shoal.optim.tree import travels as travels
    from shoal.p2p.identity import PeerID as PeerID
    from shoal.p2p.multiaddr import Multiaddr as Multiaddr
    from shoal.remote.optimizer import DistributedOptimizer as DistributedOptimizer
    from shoal.sharding.join import Join as Join
    from shoal.sharding.join import Joinable as Joinable
    from shoal.sharding.join import JoinHook as JoinHook
    from shoal.sharding.zero import ZeroRedundancyOptimizer as ZeroRedundancyOptimizer
    from shoal.swarm.protocol.errors import AveragingError as AveragingError

__version__ = "0.1.0"

_HOMES = {
    "AveragingError": "shoal.swarm.protocol.errors",
    "AveragingStage": "shoal.averaging.control",
    "Cluster": "shoal.cluster.cluster",
    "ClusterError": "shoal.cluster.ties",
    "ContiguousParams": "shoal.flat.contiguous",
    "DHT": "shoal.dht.dht",
    "DecentralizedAverager": "shoal.averaging.averager",
    "DiLoCo": "shoal.optim.diloco",
    "DistributedOptimizer": "shoal.remote.optimizer",
    "DownloadReport": "shoal.optim.reports",
    "EpochReport": "shoal.optim.reports",
    "EpochScheduler": "shoal.optim.epoch_scheduler",
    "ForkReport": "shoal.optim.reports",
    "GradScaler": "shoal.optim.grad_scaler",
    "GradientAverager": "shoal.optim.grad_averager",
    "Join": "shoal.sharding.join",
    "JoinHook": "shoal.sharding.join",
    "Joinable": "shoal.sharding.join",
    "Multiaddr": "shoal.p2p.multiaddr",
    "Optimizer": "shoal.optim.optimizer",
    "PeerID": "shoal.p2p.identity",
    "ReachabilityReport": "shoal.optim.reports",
    "PowerSGDGradientAverager": "shoal.optim.power_sgd_averager",
    "ProgressTracker": "shoal.optim.progress_tracker",
    "QHM": "shoal.functional.qhm_optimizer",
    "RoundReport": "shoal.averaging.control",
    "StepControl": "shoal.averaging.control",
    "Together": "shoal.flat.together",
    "Trace": "shoal.optim.trace",
    "TrainingStateAverager": "shoal.optim.state_averager",
    "ValueWithExpiration": "shoal.dht.records",
    "ZeroRedundancyOptimizer": "shoal.sharding.zero",
    "functional_optim_map": "shoal.functional.registry",
    "get_dht_time": "shoal.dht.records",
    "register_functional_optimizer": "shoal.functional.registry",
    "travels": "shoal.optim.tree",
}
_ROOMS = (
    "averaging", "cluster", "compression", "dht", "flat", "functional", "health", "integrations", "membership",
    "monitor", "optim", "outer", "p2p", "remote", "sharding", "simulation"
)  # fmt: skip
__all__ = ["__version__", "compression", "outer", *_HOMES]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"shoal.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
