"""What users name as the outer optimizer, before there are parameters to make it of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from shoal.outer.exact_sgd import ExactSGD


@dataclass(frozen=True)
class OuterRule:
    """Makes an outer optimizer of parameters, as a function `params -> optimizer` does.

    Args:
        lr: the learning rate, over 0.
        momentum: from 0 to less than 1.

    Raises:
        ValueError: for other numbers.
    """

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name, value in (("lr", self.lr), ("momentum", self.momentum)):
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number or not (value > 0 if name == "lr" else 0 <= value < 1):
                wanted = "a number over 0" if name == "lr" else "a number from 0 to less than 1"
                raise ValueError(f"shoal.outer.{type(self).__name__}({name}={value!r}): give {wanted}")

    def __call__(self, params: Any) -> ExactSGD:
        return ExactSGD(params, float(self.lr), float(self.momentum), self.nesterov)


@dataclass(frozen=True)
class SGD(OuterRule):
    """The mean of what the peers did, times `lr`: with 1.0, the anchor becomes the mean of the peers' models."""


@dataclass(frozen=True)
class Nesterov(OuterRule):
    """Nesterov's momentum, the outer optimizer of DiLoCo (arXiv 2311.08105), with its values as the defaults."""

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: ClassVar[bool] = True
