"""Training together: the optimizer that users hold, and what it is made of. Leans on every room below it.

What this room promises to its users:

- N peers that split one batch end where one process with that batch ends, to float rounding, and bit-identical to each
  other on machines that compute alike;
- `step` may raise only what is the caller's to mend; what goes wrong on the network is dealt with and logged;
- a peer that is late, or has fallen out of step, downloads the state and goes on; a step that failed changes nothing.

How to read it: `optimizer.py` is the public face, `settings.py` its options, `assembly.py` what they ask for. From step
to step: `epochs.py` counts (`progress.py`) what `accumulation.py` has, has `update.py` end the epoch, at once or in the
background, and `handover.py` download the state where others are past it; `assistant.py` is a step of who trains
nothing. `vector.py` says what a round averages: `gradients.py` (or `own_gradients.py`) and `shared.py`; `replica.py` is
this peer's state (`state.py`), which may be on the host (`offload.py`); `run.py` is its part in the run.
`grad_averager.py`, `power_sgd_averager.py`, `state_averager.py` and
`progress_tracker.py` are for those who train without an `Optimizer`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.optim.epoch_scheduler import EpochScheduler as EpochScheduler
    from shoal.optim.grad_averager import GradientAverager as GradientAverager
    from shoal.optim.grad_scaler import GradScaler as GradScaler
    from shoal.optim.optimizer import Optimizer as Optimizer
    from shoal.optim.performance import PerformanceEMA as PerformanceEMA
    from shoal.optim.power_sgd_averager import PowerSGDGradientAverager as PowerSGDGradientAverager
    from shoal.optim.progress_tracker import ProgressTracker as ProgressTracker
    from shoal.optim.reports import DownloadReport as DownloadReport
    from shoal.optim.reports import EpochReport as EpochReport
    from shoal.optim.reports import ReachabilityReport as ReachabilityReport
    from shoal.optim.state_averager import TrainingStateAverager as TrainingStateAverager

_HOMES = {
    "DownloadReport": "reports",
    "EpochReport": "reports",
    "EpochScheduler": "epoch_scheduler",
    "GradScaler": "grad_scaler",
    "GradientAverager": "grad_averager",
    "Optimizer": "optimizer",
    "PerformanceEMA": "performance",
    "PowerSGDGradientAverager": "power_sgd_averager",
    "ProgressTracker": "progress_tracker",
    "ReachabilityReport": "reports",
    "TrainingStateAverager": "state_averager",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    # Imported when it is used: importing one of the rest must not load all of them.
    if name not in _HOMES:
        raise AttributeError(f"module 'shoal.optim' has no attribute {name!r}")
    return getattr(import_module(f"shoal.optim.{_HOMES[name]}"), name)
