"""The modes in which trainers of the chaos train."""

from __future__ import annotations

import functools
from typing import Any

import shoal

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "power_sgd": {"grad_averager_factory": functools.partial(shoal.PowerSGDGradientAverager, averager_rank=1)},
    "delayed": {"delay_grad_averaging": True},
}
"""By name, the arguments of the optimizer."""
