"""Runs that a peer joins for one round only: for group bits (Moshpit SGD), and for a second round of the same group."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable

from shoal.swarm.directory import DHTDirectory, Directory
from shoal.swarm.protocol.messages import Begin
from shoal.swarm.protocol.rules import Rules
from shoal.swarm.protocol.tip import Tip
from shoal.swarm.protocol.view import Member
from shoal.swarm.swarm import Swarm


class Runs:
    """The runs that one peer has joined for one round each. Until `forget`, the peer still tells members that missed
    the round of such a run what its result was.

    Args:
        make: makes this peer's `Swarm` of the run with that name.
    """

    def __init__(self, make: Callable[[str, Directory, Rules], Swarm]) -> None:
        self._make = make
        self._past: list[Swarm] = []
        self._tips: dict[str, Tip] = {}  # by run: the tip at which this peer left it; it may join again

    @contextlib.asynccontextmanager
    async def joined(
        self, run_id: str, directory: Directory, rules: Rules, members: Iterable[Member] = ()
    ) -> AsyncIterator[Swarm]:
        """A context in which this peer is in that run. If the DHT lists the run, the peer continues from the tip at
        which it left the run the last time.

        Args:
            run_id, directory, rules: see `Swarm`.
            members: other members that are known to be in the run.

        Yields:
            This peer's `Swarm` of the run.
        """
        swarm = self._make(run_id, directory, rules)
        await swarm.start(tip=self._tips.get(run_id), members=members)
        try:
            yield swarm
        finally:
            swarm.retire()
            self._past.append(swarm)
            if isinstance(directory, DHTDirectory):
                self._tips[run_id] = swarm.tip
                swarm.node.spawn(directory.withdraw(swarm.me))

    def forget(self) -> None:
        """Stop serving the runs of the last rounds, because the memory of their results is about to be written."""
        for swarm in self._past:
            swarm.stop()
        self._past.clear()


def next_bits(bits: str, begin: Begin, me: bytes, target_group_size: int | None) -> str:
    """The group bits of a member after a round: the member's place in the group is appended, and as many bits are
    dropped from the front. So members of one group go to different groups. With groups of M out of M**d peers, all have
    the global average after d rounds.

    Source: Ryabinin et al. 2021, Moshpit SGD (arXiv 2103.03239), algorithm 1. Places are as in hivemind's key manager,
    but the round's name rotates them; they are not drawn at random.
    """
    keys = [member.key for member in begin.members]
    places = max(len(keys), target_group_size or 0)
    width = (places - 1).bit_length()
    if me not in keys or not width:
        return bits
    place = (keys.index(me) + begin.round[0]) % places
    return (bits + f"{place:0{width}b}")[width:]
