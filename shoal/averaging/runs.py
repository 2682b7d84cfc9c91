"""The runs of one averager: its own, and those that it joins for one round only, which are the runs of group bits
(Moshpit SGD), and those of a second round of the same group."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable

from shoal.dht.dht import DHT
from shoal.swarm.directory import DHTDirectory, Directory
from shoal.swarm.protocol.messages import Begin, Terms
from shoal.swarm.protocol.rates import Measured
from shoal.swarm.protocol.rules import Rules
from shoal.swarm.protocol.tip import Tip
from shoal.swarm.protocol.view import Member
from shoal.swarm.swarm import Place, Swarm


class Runs:
    """The runs of one averager, and those that the peer has joined for one round each. Until `forget`, the peer still
    tells members that missed the round of such a run what its result was.

    Args:
        dht: this peer's `DHT`.
        rules: the rules of rounds.
        terms: returns the options that must be equal in a run.
        place: returns the options that this peer chooses for itself.

    Attributes:
        rules: as given.
    """

    def __init__(self, dht: DHT, rules: Rules, terms: Callable[[], Terms], place: Callable[[], Place]) -> None:
        self._dht, self.rules, self._terms, self._place = dht, rules, terms, place
        self._measured = Measured()  # shared by all of these runs
        self._past: list[Swarm] = []
        self._tips: dict[str, Tip] = {}  # by run: the tip at which this peer left it; it may join again

    def swarm(self, run_id: str, directory: Directory | None = None, rules: Rules | None = None) -> Swarm:
        """Make this peer's part in the run of that name.

        Args:
            directory: lists the members of the run; by default in the DHT.
            rules: the rules of its rounds, if they are others.
        """
        dht, listed = self._dht, directory or DHTDirectory(self._dht.dht_node, run_id)
        addresses, rules = dht.dht_node.visible_addresses(), rules or self.rules
        return Swarm(dht.node, addresses, listed, run_id, self._terms(), rules, self._place(), self._measured)

    @contextlib.asynccontextmanager
    async def joined(
        self, run_id: str, rules: Rules | None = None, members: Iterable[Member] | None = None
    ) -> AsyncIterator[Swarm]:
        """A context in which this peer is in that run. If the DHT lists the run, the peer continues from the tip at
        which it left the run the last time.

        Args:
            rules: see `swarm`.
            members: the members of the run, if they know each other; None: the DHT lists them.

        Yields:
            This peer's `Swarm` of the run.
        """
        directory = DHTDirectory(self._dht.dht_node, run_id) if members is None else Directory()
        swarm = self.swarm(run_id, directory, rules)
        await swarm.start(tip=self._tips.get(run_id), members=members or ())
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
