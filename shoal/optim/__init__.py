"""Training together: the optimizer that users hold, and its parts. It uses every room below it.

What this room promises to its users:

- N peers that split one batch end where one process with that batch ends, to float rounding, and bit-identical to each
  other on machines that compute alike;
- `step` raises only errors that the caller can mend; it deals with errors of the network and logs them;
- a peer that is late, or has fallen out of step, downloads the state and continues; a step that fails changes nothing.

How to read it: `optimizer.py` is the public face, `settings.py` checks its arguments, and `choice.py` makes its parts.
`epoch.py` goes from epoch to epoch: it accumulates, ends the epoch with the others, steps the state (`state.py`), and
continues from a state of others (`donors.py`). `pilot.py` asks the run (`run.py`) and decides, without tensors. Three
interfaces hide the modes from them: `work.py` is what a rank brings (gradients, local steps, a drift), `rounds.py` says
in which rounds that is averaged, and `pieces.py` which tensors are stepped. `terms.py` is what peers compare when they
meet. Peers vote on the options of the parameter groups (`group_options.py`). `vitals.py` publishes this peer's health,
and `faults.py` counts faults. `trace.py` writes what it does into a file.

A cluster is a peer of many ranks, which all run this code. `ranks.py` is what they do together in each call. Rank 0
decides for all, by `shoal.cluster.team`. Where ranks carry strands, each keeps, averages and downloads its own.

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
from shoal.optim.trace import Trace

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
    "Trace",
    "TrainingStateAverager",
]
