"""Training together: the optimizer that users hold, and its parts. It uses every room below it.

What this room promises to its users:

- N peers that split one batch end where one process with that batch ends, to float rounding, and bit-identical to each
  other on machines that compute alike;
- `step` raises only errors that the caller can mend; it deals with errors of the network and logs them;
- a peer that is late, or has fallen out of step, downloads the state and continues; a step that fails changes nothing.

How to read it: `optimizer.py` is the public face, and `settings.py` checks its arguments. `epoch.py` goes from epoch to
epoch: it accumulates (`accumulator.py`), reports samples (`progress.py`), joins the round that ends the epoch
(`epoch_round.py`) and steps the state (`state.py`). The parameters of the state live in flat memory, possibly on the
host (`host_copy.py`). Peers vote on the options of the parameter groups (`group_options.py`). `run.py` is this peer's
part in the run, `vitals.py` publishes this peer's health, and `faults.py` counts faults. With `outer=DiLoCo(…)`
(`diloco.py`), peers average how far their models have moved (`drift.py`) instead of gradients.

A cluster is a peer of many ranks. Rank 0 leads its calls (`speaker.py`), and the other ranks follow (`follower.py`).
Where ranks carry strands, each rank keeps, averages and downloads its own strands (`strand_*.py`).

`grad_averager.py`, `power_sgd_averager.py`, `state_averager.py` and `progress_tracker.py` are for users who train
without an `Optimizer`. They share the accumulator, the state and the progress with it. `_torch.py` has the private
names of torch.
"""

from __future__ import annotations

from shoal.optim.epoch_scheduler import EpochScheduler
from shoal.optim.grad_averager import GradientAverager
from shoal.optim.grad_scaler import GradScaler
from shoal.optim.optimizer import Optimizer
from shoal.optim.power_sgd_averager import PowerSGDGradientAverager
from shoal.optim.progress import PerformanceEMA
from shoal.optim.progress_tracker import ProgressTracker
from shoal.optim.reports import DownloadReport, EpochReport, ReachabilityReport
from shoal.optim.state_averager import TrainingStateAverager

__all__ = [
    "DownloadReport",
    "EpochReport",
    "EpochScheduler",
    "GradScaler",
    "GradientAverager",
    "Optimizer",
    "PerformanceEMA",
    "PowerSGDGradientAverager",
    "ProgressTracker",
    "ReachabilityReport",
    "TrainingStateAverager",
]
