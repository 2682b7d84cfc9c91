"""What an attack is: what one peer says that knows the protocol and keeps no rule of it.

An attack is a class. A `MemberAttack` is of a peer that is in the run by Hello and, through an optimizer of its own, in
its rounds: what it says passes through `sends` and `asks`, what it hears through `hears`. A `StrangerAttack` is of a
peer that has a connection, and says no Hello in the run unless it chooses to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from shoal.p2p.identity import PeerID

if TYPE_CHECKING:
    from tests.attacks.attacker import Inside, Outside

Normal = Callable[[], Any]


class Attack:
    """What the attacker does.

    Attributes:
        every: seconds between two calls of `again`.
        gained: what it got that it should not get, for the report.
    """

    every = 0.25

    def __init__(self) -> None:
        self.gained: dict[str, float] = {}

    def gain(self, what: str, amount: float = 1) -> None:
        self.gained[what] = self.gained.get(what, 0) + amount


class MemberAttack(Attack):
    """By a member of the run. It is an auxiliary peer, unless it `trains`: then it has few samples of its own."""

    trains = False
    scale = 1.0  # of its gradients

    def __init__(self, inside: Inside) -> None:
        super().__init__()
        self.run = inside

    def sends(self, keys: Sequence[bytes], message: Any) -> Any:
        """What it says instead of this notice; None for nothing."""
        return message

    def asks(self, key: bytes, message: Any) -> Any:
        """What it asks instead."""
        return message

    def sends_bytes(self, keys: Sequence[bytes], message: Any, buffers: Sequence[Any]) -> Sequence[Any]:
        """The buffers that go with a notice."""
        return buffers

    def hears(self, peer: PeerID, message: Any, normal: Normal) -> Any:
        """Its answer; `normal()` is what the protocol asks for."""
        return normal()

    async def at_tip(self) -> None:
        """The run has come to a new tip."""

    async def again(self) -> None:
        """Every `every` seconds."""


class StrangerAttack(Attack):
    """By a peer that is connected, and no member."""

    def __init__(self, outside: Outside) -> None:
        super().__init__()
        self.net = outside

    async def again(self) -> None:
        """Every `every` seconds."""


async def silence() -> None:
    """No answer."""
    await asyncio.sleep(3600)
