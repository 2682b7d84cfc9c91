"""The modes in which trainers of the chaos train."""

from __future__ import annotations

import functools
from typing import Any

import shoal
from tests.soak.promises import LEAST_SHARE

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "power_sgd": {"grad_averager_factory": functools.partial(shoal.PowerSGDGradientAverager, averager_rank=1)},
    "delayed": {"delay_grad_averaging": True},
}
"""By name, the arguments of the optimizer."""

LEAST_SHARES = dict.fromkeys(MODES, LEAST_SHARE) | {"power_sgd": 0.5}
"""By name, the share of the epochs that a run makes at least. A stopped member holds up each of PowerSGD's two rounds,
and the round of the run."""
