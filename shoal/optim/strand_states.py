"""Sends and downloads the state of a run in strands. Each rank serves its own strands to newcomers, and rank 0 says
which rank has which strand. The ranks of a newcomer download their own strands."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Annotated

import msgspec

from shoal.averaging.exchange import compute_serially
from shoal.dht.dht import DHT
from shoal.interrupts import result_of
from shoal.optim.state import for_newcomer
from shoal.p2p.errors import P2PError, PeerUnreachable, Refused
from shoal.p2p.identity import PeerID
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.node import Reply, Service
from shoal.swarm.duties import STATES
from shoal.swarm.gates import gate_of
from shoal.swarm.protocol.tip import Digest, Tip
from shoal.transfer.donor import Offer, Snapshot, StateDonor
from shoal.transfer.transfer import Downloaded, DownloadFailed, Reserve, download_state

log = logging.getLogger(__name__)

ASK_SECONDS = 10.0  # the time that a peer may take to say which of its ranks carry which strands
MOST = 1024  # the largest number of strands, and of ranks of a cluster
MOST_ADDRESSES = 8  # the largest number of addresses of a rank
MOST_ASKED = 16  # the largest number of peers from which strands are downloaded

Count = Annotated[int, msgspec.Meta(ge=0, lt=MOST)]
Address = Annotated[str, msgspec.Meta(max_length=256)]


class Carrier(msgspec.Struct, array_like=True, frozen=True):
    """A rank that carries strands, and the addresses on which it listens."""

    key: Digest
    addresses: Annotated[tuple[Address, ...], msgspec.Meta(max_length=MOST_ADDRESSES)] = ()

    @property
    def peer(self) -> PeerID:
        """The peer id of the rank."""
        return PeerID(self.key)


class WhoCarries(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """Asks rank 0 of a cluster which rank carries which strand."""


class Carriers(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """The ranks of a cluster, and for each strand the number of the rank that carries it."""

    ranks: Annotated[tuple[Carrier, ...], msgspec.Meta(min_length=1, max_length=MOST)]
    numbers: Annotated[tuple[Count, ...], msgspec.Meta(min_length=1, max_length=MOST)]

    def fits(self, strands: int) -> bool:
        """Whether this message says for each of `strands` strands which rank carries it."""
        return len(self.numbers) == strands and max(self.numbers) < len(self.ranks)


class StrandStates:
    """A rank's part in sending and downloading strands.

    Args:
        dht: the DHT of this rank, which is admitted to the run (`admit_to`).
        run_id: the name of the run.
        count: the number of strands.
        max_nbytes: the largest size of a downloaded strand, in bytes.
    """

    def __init__(self, dht: DHT, run_id: str, count: int, max_nbytes: int) -> None:
        self._dht, self._run_id, self._count, self._max_nbytes = dht, run_id, count, max_nbytes
        self._gate = gate_of(dht.node, run_id)
        admit = (lambda peer: None) if self._gate is None else self._gate.admit
        self._service = Service(f"strands/{run_id}", WhoCarries | Carriers, admit=admit)
        self._carriers: Carriers | None = None  # at rank 0
        self._donors: list[StateDonor] = []
        self._leave_gate: Callable[[], None] = lambda: None
        self._random = random.Random(dht.peer_id.key)

    def _name(self, strand: int) -> str:
        return f"strand {strand} of {self._count}/{self._run_id}"

    def meet(self, first: Carrier) -> None:
        """At other ranks: join the DHT of rank 0 (`first`), because the user may have given ranks different initial
        peers, or none."""

        async def meet() -> None:
            try:
                await self._dht.dht_node.bootstrap(first.addresses, self._dht.bootstrap_timeout)
            except PeerUnreachable as error:
                log.warning("this rank does not reach rank 0 of its cluster, and knows no peers through it: %s", error)

        self._dht.submit(meet()).result()

    # -- strands for newcomers

    @property
    def me(self) -> Carrier:
        """This rank, with its addresses."""
        return Carrier(self._dht.peer_id.key, tuple(map(str, self._dht.get_visible_maddrs()))[:MOST_ADDRESSES])

    @property
    def asked_at(self) -> float:
        """The time of the last request for a strand, on the loop's clock."""
        return max((donor.asked_at for donor in self._donors), default=float("-inf"))

    def give(
        self,
        mine: Iterable[int],
        copy: Callable[[int], Snapshot],
        tip: Callable[[], Tip],
        line: Callable[[], bytes],
        allow: bool,
    ) -> None:
        """Serve the strands of this rank to newcomers.

        Args:
            mine: the numbers of the strands.
            copy: takes a snapshot of a strand, given its number.
            tip, allow: see `StateDonor`.
            line: returns the lineages of the state, see `Offer`.
        """

        async def give() -> None:
            compute_serially()
            node, gate = self._dht.node, self._gate
            if gate is not None:
                self._leave_gate = gate.enter(lambda key: None, lambda: None)
            for strand in mine:
                take = partial(for_newcomer, partial(copy, strand))
                donor = StateDonor(node, self._name(strand), take, tip, allow, gate, lambda: Offer(line=line()))
                self._donors.append(donor)

        self._dht.submit(give()).result()

    def say_who_carries(self, carriers: Carriers) -> None:
        """At rank 0: answer the peers that ask which rank carries which strand."""

        def answer(peer: PeerID, message: object, _buffers: object) -> Reply:
            if self._gate is not None:
                self._gate.require(peer, *STATES)
            if not isinstance(message, WhoCarries):
                raise Refused("not a request")
            return Reply(carriers)

        async def say() -> None:
            self._dht.node.mates.update(carrier.peer for carrier in carriers.ranks)
            self._dht.node.serve(self._service, answer)

        self._dht.submit(say()).result()

    def stop(self) -> None:
        """Stop serving newcomers."""

        async def stop() -> None:
            self._dht.node.stop_serving(self._service)
            for donor in self._donors:
                donor.close()
            self._donors = []
            self._leave_gate()

        if self._dht.is_alive():
            self._dht.submit(stop()).result()

    # -- strands of other clusters

    def who_carries(self, donors: Sequence[PeerID]) -> list[Carriers]:
        """Ask other clusters which of their ranks carry which strands.

        Args:
            donors: the rank 0 of each cluster.

        Raises:
            DownloadFailed: if no cluster answers, with the reason of each.
        """
        failed: dict[PeerID, str] = {}

        async def ask(donor: PeerID) -> Carriers | None:
            try:
                said = await self._dht.node.call(donor, self._service, WhoCarries(), Carriers, timeout=ASK_SECONDS)
            except (P2PError, TimeoutError) as error:
                failed[donor] = str(error) or "did not answer in time"
                return None
            if said.fits(self._count):
                return said
            failed[donor] = f"does not say who carries each of {self._count} strands"
            return None

        asked = self._random.sample(list(donors), min(len(donors), MOST_ASKED))

        async def ask_all() -> list[Carriers | None]:
            return await asyncio.gather(*map(ask, asked))

        found = [said for said in result_of(self._dht.submit(ask_all())) if said is not None]
        if not found:
            reasons = "; ".join(f"{donor!r}: {reason}" for donor, reason in failed.items())
            raise DownloadFailed(f"no peer says who carries its strands. {reasons or 'There was nobody to ask'}")
        return found

    def begin(
        self,
        strand: int,
        carriers: Sequence[Carrier],
        timeout: float,
        wanted: Callable[[Tip], bool],
        reserve: Reserve | None = None,
    ) -> Future[Downloaded]:
        """Begin to download a strand from the ranks that carry it, see `download_state`."""

        async def download() -> Downloaded:
            node = self._dht.node
            for carrier in carriers:
                if not node.known_addresses(carrier.peer):  # addresses that the peer itself has told are newer
                    node.learn(carrier.peer, _addresses_of(carrier))
            return await download_state(
                node,
                self._name(strand),
                [carrier.peer for carrier in carriers],
                timeout=timeout,
                rng=self._random,
                max_nbytes=self._max_nbytes,
                wanted=wanted,
                reserve=reserve,
            )

        return self._dht.submit(download())


def _addresses_of(carrier: Carrier) -> list[Multiaddr]:
    """The addresses that this version can read: other versions may have more kinds."""
    found = []
    for text in carrier.addresses:
        try:
            found.append(Multiaddr(text))
        except ValueError:
            continue
    return found
