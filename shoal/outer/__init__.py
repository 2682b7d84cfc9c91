"""Outer optimizers: they step the parameters that all peers of a run have in common, with the mean result of their
inner steps.

`shoal.DiLoCo(optimizer=…)` takes them. Each uses only operations that every processor rounds alike.
"""

from __future__ import annotations

from shoal.outer.exact_sgd import ExactSGD as ExactSGD
from shoal.outer.rules import SGD as SGD
from shoal.outer.rules import Nesterov as Nesterov
from shoal.outer.rules import OuterRule as OuterRule
