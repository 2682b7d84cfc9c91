"""How the ranks of a peer make a call of the optimizer together: what they bring to a step, and what they share after a
call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any, TypeVar

import msgspec
from torch import Tensor

from shoal.cluster.question import Question
from shoal.cluster.shards import Shards
from shoal.cluster.team import Alone, Team
from shoal.cluster.ties import ClusterError
from shoal.swarm.protocol.loss import Loss, mean_of
from shoal.swarm.protocol.tip import Tip

T = TypeVar("T")


class Brings(msgspec.Struct, array_like=True, frozen=True):
    """What a rank brings to a step.

    Attributes:
        samples: the number of its samples.
        loss: the loss of these, or None.
        gradients: which of its parameters have a gradient, see `Shards`.
        digest: the digest of the other gradients, if ranks compare them, else b"".
        is_ahead: whether what it steps is newer than the model, because an error has ended the call before.
        tip: the name of its part of the state; None if it has none.
    """

    samples: int
    loss: Loss | None
    gradients: bytes
    digest: bytes
    is_ahead: bool
    tip: Tip | None


class Told(msgspec.Struct, array_like=True, frozen=True):
    """What rank 0 tells the others at the end of a call.

    Attributes:
        tip: the name of the state whose parameters all ranks have after the call.
        is_changed: whether the model gets other parameters now.
        options: for each parameter group, the numbers that a scheduler or a vote may have changed.
        value: what the call returns at all ranks.
    """

    tip: Tip
    is_changed: bool
    options: list[dict[str, float]]
    value: bool


class JointStep(msgspec.Struct, array_like=True, frozen=True):
    """A step of all ranks: their samples, the mean loss of these, and whether a rank `is_ahead`."""

    samples: int
    loss: Loss | None
    is_ahead: bool


STEP = Question("step", Brings, JointStep, may_wait=True)
REACHED = Question("reached", bool, bool)
TOLD = Question("told", NoneType, Told, may_wait=True)
LOADED = Question("loaded", NoneType, bool)


class Ranks:
    """The ranks of this peer.

    Args:
        team: the ranks.
        shards: how the model's parameters lie at this rank.
        extras: the extra tensors, which all ranks hold.

    Attributes:
        team, shards: as given.
        have_state: whether this rank has a part of the state.
        tip: the tip of the model's parameters, as rank 0 has told it last.
    """

    def __init__(self, team: Team, shards: Shards, extras: Sequence[Tensor]) -> None:
        self.team, self.shards, self._extras = team, shards, extras
        self.have_state = shards.are_here
        self.tip = Tip(0, bytes(32), 0.0)
        self._are_told = False  # whether the other ranks have the parameters of that tip
        self._is_compared = False

    def act(self, act: Callable[[], T]) -> T:
        """Do something at all ranks that have a part of the state."""
        return act() if self.shards.are_everywhere else self.team.at_first(act)

    def bring(self, samples: int, loss: Loss | None, tip: Tip | None = None) -> JointStep:
        """Reach a step together.

        Args:
            samples, loss: those of this rank.
            tip: the name of its part of the state, if each rank has one.

        Raises:
            ValueError: at all ranks, if they have different gradients.
            ClusterError: if they have parts of different states.
        """
        digest = self.shards.digest() if samples and not self._is_compared else b""
        brings = Brings(samples, loss, self.shards.gradients, digest, self.shards.is_ahead, tip)
        step = self.team.decided(STEP, self._summed, brings)
        if step.is_ahead:
            self._spread()
        self._is_compared |= samples > 0
        return step

    def _summed(self, brought: Sequence[Brings]) -> JointStep:
        names, mine = self.team.names, brought[0]
        for rank, each in enumerate(brought):
            if each.gradients != mine.gradients:
                raise ValueError(
                    f"{names[0]} and {names[rank]} have gradients of other parameters: the ranks of a cluster make the "
                    "same calls of `backward` and `zero_grad`"
                )
        for rank, each in enumerate(brought):
            if mine.digest and each.digest not in (b"", mine.digest):
                raise ValueError(
                    f"{names[0]} and {names[rank]} have other gradients: wrap the model in DistributedDataParallel, or "
                    "reduce the gradients before `step`"
                )
        for rank, each in enumerate(brought):
            if each.tip != mine.tip and each.tip is not None and mine.tip is not None:
                raise ClusterError(
                    f"{names[rank]} has the state of epoch {each.tip.epoch}, and {names[0]} that of epoch "
                    f"{mine.tip.epoch}, because an error has ended a step of one of them: load a state at all ranks, "
                    "by load_state_dict or load_state_from_peers"
                )
        samples = sum(each.samples for each in brought)
        loss = mean_of((each.loss, each.samples) for each in brought)
        return JointStep(samples, loss, any(each.is_ahead for each in brought))

    def reach(self) -> None:
        """Reach another call together."""
        if self.team.decided(REACHED, any, self.shards.is_ahead):
            self._spread()

    def _spread(self) -> None:
        """The model gets at all ranks what is stepped."""
        with self.team.collectives():
            self.shards.spread(self._extras)

    def gather(self, gather: Callable[[], object]) -> None:
        """Gather something from the model at all ranks, which have reached the call."""
        if not self.shards.gathers_alone:
            with self.team.collectives():
                gather()

    def forget(self) -> None:
        """The model's parameters were set in another way: the other ranks get them with the end of the next call."""
        self._are_told = False

    @property
    def of_state(self) -> Team:
        """The ranks that have a part of the state: all, or rank 0 alone."""
        return self.team if self.shards.are_everywhere else Alone()

    def tell(
        self, tip: Callable[[], Tip], groups: Sequence[dict[str, Any]], *, moves: bool = False, value: bool = False
    ) -> bool:
        """End a call: all ranks get the tip, the numbers in the groups and, if they have changed, the parameters.

        Args:
            tip: returns the tip of the parameters; called at rank 0.
            groups: the parameter groups of this rank.
            moves: whether the parameters may have changed even if the tip has not.
            value: what the call returns.

        Returns:
            What it returns at rank 0.
        """

        def follow(told: Told) -> None:
            for group, options in zip(groups, told.options, strict=False):
                group.update(options)

        told = self.team.decided(TOLD, lambda _: self._told(tip(), groups, moves, value), then=follow)
        if told.is_changed:
            self._spread()
        self.tip, self._are_told = told.tip, True
        return told.value

    def _told(self, tip: Tip, groups: Sequence[Mapping[str, Any]], moves: bool, value: bool) -> Told:
        options = [{name: value for name, value in group.items() if type(value) is float} for group in groups]
        return Told(tip, moves or not self._are_told or tip != self.tip or self.shards.is_ahead, options, value)
