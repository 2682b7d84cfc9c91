"""The result of the round that ends an epoch, before the step; and the cost of rounds before it."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.swarm.protocol.loss import Loss
from shoal.swarm.protocol.tip import Tip


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step at the end of an epoch is made with, beside the averages.

    Attributes:
        tip: the name of the state after the step.
        options: the options of the parameter groups with which the step is made; b"": those in the groups.
        loss: the run's loss, which the step gets from its closure; None if there is none.
        with_state: whether the state itself was averaged.
        norm: the norm of the average; None if it is not limited.
        factor: the factor that scales the average down to the limit of its norm.
    """

    tip: Tip
    options: bytes = b""
    loss: Loss | None = None
    with_state: bool = False
    norm: float | None = None
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of rounds before the round of the run: the bytes sent and received at this rank, and the seconds."""

    sent: int = 0
    received: int = 0
    seconds: float = 0.0
