"""Serves the parts of a state to newcomers, and downloads those of other peers. With strands, each rank serves its own,
and rank 0 says which rank has which. The ranks of a newcomer download their own strands."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated

import msgspec

from shoal.dht.dht import DHT
from shoal.flat import compute_serially
from shoal.interrupts import finished, result_of
from shoal.p2p.errors import P2PError, PeerUnreachable, Refused
from shoal.p2p.identity import PeerID
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.node import Reply, Service
from shoal.swarm.duties import STATES
from shoal.swarm.gates import gate_of
from shoal.swarm.protocol.errors import AveragingError
from shoal.swarm.protocol.tip import Digest, Tip
from shoal.transfer.donor import EncodedState, Offer, StateDonor
from shoal.transfer.transfer import Downloaded, DownloadFailed, NoMemoryForState, Reserve, download_state

log = logging.getLogger(__name__)

ASK_SECONDS = 10.0  # the time that a peer may take to say which of its ranks carry which strands
MOST = 1024  # the largest number of strands, and of ranks of a cluster
MOST_ADDRESSES = 8  # the largest number of addresses of a rank
MOST_TEXT = 1 << 19  # the most characters of the addresses of a cluster
MOST_ASKED = 16  # the largest number of clusters from which strands are downloaded

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
        """Whether this message says for each of `strands` strands which rank carries it, and all ranks of a cluster
        may get `MOST_ASKED` such messages in one."""
        text = sum(len(address) for rank in self.ranks for address in rank.addresses)
        return len(self.numbers) == strands and max(self.numbers) < len(self.ranks) and text <= MOST_TEXT

    def of(self, strand: int) -> Carrier:
        """The rank that carries a strand."""
        return self.ranks[self.numbers[strand]]


class Donors:
    """Serves the parts of the state that this rank has to newcomers, and downloads parts of other peers' states.

    The state of a run of single processes has one part, and each peer is the donor of it. With strands, each strand is
    a part. Each rank is the donor of its own strands, and rank 0 of a cluster says which rank that is.

    Args:
        dht: the DHT of this rank, which is admitted to the run (`admit_to`).
        run_id: the name of the run.
        count: the number of parts.
        max_nbytes: the largest size of a downloaded part, in bytes.
        relayed: returns the peers that are asked for a part only if nobody else is left; it is called on the reactor.
    """

    def __init__(
        self,
        dht: DHT,
        run_id: str,
        count: int,
        max_nbytes: int,
        relayed: Callable[[], Collection[PeerID]] = tuple,
    ) -> None:
        self._dht, self._run_id, self._count, self._max_nbytes = dht, run_id, count, max_nbytes
        self._relayed, self._gate = relayed, gate_of(dht.node, run_id)
        admit = (lambda peer: None) if self._gate is None else self._gate.admit
        self._service = Service(f"strands/{run_id}", WhoCarries | Carriers, admit=admit)
        self._donors: list[StateDonor] = []
        self._leave_gate: Callable[[], None] = lambda: None
        self._random = random.Random(dht.peer_id.key)

    def _name(self, part: int) -> str:
        return f"state/{self._run_id}" if self._count == 1 else f"strand {part} of {self._count}/{self._run_id}"

    def meet(self, carriers: Carriers) -> None:
        """Meet the other ranks of the cluster. Rank 0 answers the peers that ask which rank carries which strand. The
        others join its DHT, because the user may have given ranks different initial peers, or none."""
        if carriers.ranks[0] == self.me:
            self._say_who_carries(carriers)
            return
        first = carriers.ranks[0]

        async def meet() -> None:
            try:
                await self._dht.dht_node.bootstrap(first.addresses, self._dht.bootstrap_timeout)
            except PeerUnreachable as error:
                log.warning("this rank does not reach rank 0 of its cluster, and knows no peers through it: %s", error)

        self._dht.submit(meet()).result()

    # -- for newcomers

    @property
    def me(self) -> Carrier:
        """This rank, with its addresses."""
        return Carrier(self._dht.peer_id.key, tuple(map(str, self._dht.get_visible_maddrs()))[:MOST_ADDRESSES])

    @property
    def asked_at(self) -> float:
        """The time of the last request for a part, on the loop's clock."""
        return max((donor.asked_at for donor in self._donors), default=float("-inf"))

    def serve(
        self,
        mine: Iterable[int],
        copy: Callable[[int], Awaitable[EncodedState]],
        tip: Callable[[], Tip],
        offer: Callable[[], Offer],
        allow: bool = True,
        asked: Callable[[], None] = lambda: None,
    ) -> None:
        """Serve parts to newcomers. Call this before newcomers meet this peer.

        Args:
            mine: the numbers of the parts that this rank has.
            copy: takes a copy of a part, given its number; see `StateDonor`.
            tip, asked: see `StateDonor`.
            allow: whether to serve newcomers.
            offer: returns what is said of the state: its priority, and the lineages that lead to it.
        """

        async def serve() -> None:
            compute_serially()
            node, gate, offered = self._dht.node, self._gate, offer if allow else lambda: None
            if gate is not None:
                self._leave_gate = gate.enter(lambda key: None, lambda: None)
            for part in mine:
                take = partial(copy, part)
                self._donors.append(StateDonor(node, self._name(part), take, tip, gate, offered, asked))

        self._dht.submit(serve()).result()

    def _say_who_carries(self, carriers: Carriers) -> None:
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

    def stop(self, timeout: float | None = None) -> None:
        """Stop serving newcomers; wait for that at most for `timeout` seconds."""

        async def stop() -> None:
            self._dht.node.stop_serving(self._service)
            for donor in self._donors:
                donor.close()
            self._donors = []
            self._leave_gate()

        if self._dht.is_alive():
            finished(self._dht.reactor.submit(stop()), timeout)

    # -- of other peers

    def who_carries(self, donors: Sequence[PeerID]) -> list[Carriers]:
        """Which ranks of the donors carry the parts of the state. With several parts, the donors are asked.

        Args:
            donors: peers of the run: single processes, or the rank 0 of each cluster.

        Raises:
            DownloadFailed: if no peer answers, with the reason of each.
        """
        if self._count == 1:
            return [Carriers((Carrier(donor.key),), (0,)) for donor in donors]
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

    async def download(
        self,
        part: int,
        donors: Sequence[Carriers],
        timeout: float,
        wanted: Callable[[Tip], bool],
        reserve: Reserve | None = None,
    ) -> Downloaded:
        """Download a part of a state, on the reactor.

        Args:
            part: the number of the part.
            donors: from `who_carries`.
            timeout, wanted, reserve: see `download_state`.

        Raises:
            AveragingError: as `download_state`.
        """
        node, carriers = self._dht.node, [donor.of(part) for donor in donors]
        for carrier in carriers:
            if carrier.addresses and not node.known_addresses(carrier.peer):  # those that a peer itself tells are newer
                node.learn(carrier.peer, _addresses_of(carrier))
        return await download_state(
            node,
            self._name(part),
            [carrier.peer for carrier in carriers],
            timeout=timeout,
            rng=self._random,
            relayed=self._relayed(),
            max_nbytes=self._max_nbytes,
            wanted=wanted,
            reserve=reserve,
        )

    def fetch_all(
        self,
        mine: Sequence[int],
        donors: Sequence[Carriers],
        timeout: float,
        wanted: Callable[[Tip], bool],
        known: Mapping[int, Downloaded],
    ) -> list[Downloaded]:
        """Download several parts of one state at once.

        Args:
            mine: the numbers of the parts.
            donors: from `who_carries`.
            timeout, wanted: see `download_state`.
            known: parts that this rank has already, by number.

        Raises:
            DownloadFailed: if one of them can't be downloaded.
            NoMemoryForState: if the reason is that there is no memory for it.
        """
        found, failed, lacking = dict(known), list[DownloadFailed](), list[DownloadFailed]()
        missing = [part for part in mine if part not in found]
        under_way = [self._dht.submit(self.download(part, donors, timeout, wanted)) for part in missing]
        for part, future in zip(missing, under_way, strict=True):
            try:
                found[part] = result_of(future)
            except NoMemoryForState as error:
                lacking.append(NoMemoryForState(f"strand {part}: {error}"))
            except AveragingError as error:
                failed.append(DownloadFailed(f"strand {part}: {error}"))
        for why in (*lacking, *failed):
            raise why
        return [found[part] for part in mine]


def _addresses_of(carrier: Carrier) -> list[Multiaddr]:
    """The addresses that this version can read: other versions may have more kinds."""
    found = []
    for text in carrier.addresses:
        try:
            found.append(Multiaddr(text))
        except ValueError:
            continue
    return found
