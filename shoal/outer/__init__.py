"""Outer optimizers: they step what all peers of a run hold in common, with the mean of what their inner steps did.

`shoal.DiLoCo(optimizer=…)` takes them. Each is made of operations that every processor rounds alike.
"""

from __future__ import annotations

from shoal.outer.exact_sgd import ExactSGD as ExactSGD
from shoal.outer.rules import SGD as SGD
from shoal.outer.rules import Nesterov as Nesterov
from shoal.outer.rules import OuterRule as OuterRule
