"""The outer optimizers that users name, before there are parameters to make one for."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any, ClassVar

from shoal.outer.exact_sgd import ExactSGD


@dataclass(frozen=True)
class OuterRule:
    """Makes an outer optimizer of parameters: call it with `params`.

    Args:
        lr: the learning rate, greater than 0. Default: 1.0.
        momentum: from 0 to less than 1. Default: 0.

    Raises:
        ValueError: if a number is out of its range.
    """

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name, value in (("lr", self.lr), ("momentum", self.momentum)):
            is_number = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number or not (value > 0 if name == "lr" else 0 <= value < 1):
                wanted = "a number over 0" if name == "lr" else "a number from 0 to less than 1"
                raise ValueError(f"shoal.outer.{type(self).__name__}({name}={value!r}): give {wanted}")
            object.__setattr__(self, name, float(value))  # of numpy's numbers, too

    def __call__(self, params: Any) -> ExactSGD:
        return ExactSGD(params, float(self.lr), float(self.momentum), self.nesterov)


@dataclass(frozen=True)
class SGD(OuterRule):
    """Plain SGD: adds the mean of the peers' updates, times `lr`. With `lr` 1.0 the anchor becomes the mean of the
    peers' models.

    Args:
        lr: the learning rate, greater than 0. Default: 1.0.
        momentum: from 0 to less than 1. Default: 0.

    Raises:
        ValueError: if a number is out of its range.
    """


@dataclass(frozen=True)
class Nesterov(OuterRule):
    """Nesterov's momentum, the outer optimizer of DiLoCo (arXiv 2311.08105). The defaults are the values of that paper.

    Args:
        lr: the learning rate, greater than 0. Default: 0.7.
        momentum: from 0 to less than 1. Default: 0.9.

    Raises:
        ValueError: if a number is out of its range.
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: ClassVar[bool] = True
