"""Downloading a state: the newcomer takes it from several donors at once, and checks every chunk.

It drives `download.py`, which decides whom to ask for what; `donor.py` is the other side.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import torch
from blake3 import blake3
from torch import Tensor

from shoal.compression import CodecPlan, CodecSpan, NoCompression, codec_by_name
from shoal.flat.allocation import empty
from shoal.flat.memory_views import bytes_of
from shoal.p2p.errors import P2PError
from shoal.p2p.identity import PeerID
from shoal.p2p.leases import Leases, Target
from shoal.p2p.node import Node, Reply, Service
from shoal.p2p.transport import Movement
from shoal.swarm.protocol.errors import AveragingError
from shoal.swarm.protocol.tip import Tip
from shoal.transfer.donor import (
    Chunk,
    EncodedState,
    GetChunk,
    GetManifest,
    Offer,
    Snapshot,
    StateDonor,
    Withheld,
    chunk_name,
    encoded,
    transfer_service,
)
from shoal.transfer.download import DownloadPlan
from shoal.transfer.manifest import Manifest, StateChunk, choose

__all__ = [
    "DownloadFailed",
    "Downloaded",
    "EncodedState",
    "NothingShared",
    "NothingWanted",
    "Snapshot",
    "StateDonor",
    "download_state",
    "encoded",
]

OFFER_SECONDS: Final = 15.0  # after so long, donors that have offered nothing are not waited for
MAX_STALE: Final = 5  # choices that are given up because the swarm goes on without waiting; a snapshot costs its donor


class DownloadFailed(AveragingError):
    """No state was downloaded. The text names every donor with what was wrong with it."""


class NothingShared(DownloadFailed):
    """There is nobody to ask, or nobody of them shares a state: asking again does not help."""


class NothingWanted(DownloadFailed):
    """States were offered, but none that is `wanted`."""


@dataclass(frozen=True, slots=True)
class Downloaded:
    """A state that was downloaded, complete and verified.

    Attributes:
        manifest: what it is; `manifest.tip` and `manifest.layout` are meant for the caller.
        buffers: as many 1-D CPU tensors as `manifest.buffers` lists.
        lossy: whether they may differ from the donors', because of how they were sent.
        scalars: as the donors gave them.
        chunks_from: how many chunks came from each donor.
        dropped: donors that offered or sent nothing usable, each with its reason.
        nbytes: of the chunks as they were sent.
        seconds: from the first question to the last chunk.
    """

    manifest: Manifest
    buffers: list[Tensor]
    lossy: bool
    scalars: bytes
    chunks_from: dict[PeerID, int]
    dropped: dict[PeerID, str]
    nbytes: int
    seconds: float


def _now() -> float:
    return asyncio.get_running_loop().time()


async def download_state(
    node: Node,
    service_name: str,
    donors: Iterable[PeerID],
    *,
    timeout: float,
    rng: random.Random,
    max_nbytes: int = 1 << 36,
    wanted: Callable[[Tip], bool] = lambda tip: True,
    reserve: Callable[[Tip, Sequence[PeerID]], Awaitable[bool]] | None = None,
) -> Downloaded:
    """Download the state that most of `donors` hold, from all that hold it at once.

    Every chunk is verified. A donor that is lost, refuses, is too slow or sends something else than it offered is left
    out, and others send what it owed; if all that hold one state fail, the next state is tried, from the beginning.
    Donors may give their states priorities; then that of most of those with the highest is downloaded.

    Args:
        node: this peer's node; it must know the donors' addresses.
        service_name: of the donors' `StateDonor`.
        donors: whom to ask; this peer itself is left out.
        timeout: seconds without any progress.
        rng: draws the order in which donors are asked.
        max_nbytes: offers of states that need more memory are not taken.
        wanted: whether a state of that tip is of any use.
        reserve: called with the tip of a state, and with those who hold it, before its first chunk is asked for. If it
            returns false, newer states are asked for, at most `MAX_STALE` times.

    Raises DownloadFailed, which names every donor and its reason, if no donor is left or nothing has come for so long;
    `NothingShared` if there is none, or all say that they do not share their states; `NothingWanted` if none is
    `wanted` of those that are offered.
    """
    others = sorted(set(donors) - {node.peer_id})
    rng.shuffle(others)
    download = _Download(node, transfer_service(service_name), others, timeout, max_nbytes, wanted, reserve)
    try:
        async with asyncio.timeout(timeout) as download.patience:
            return await download.run()
    except TimeoutError:
        raise DownloadFailed(f"nothing of a state has come for {timeout:g} s. {download.story()}") from None


class _Fetch:
    """The chunks of one state, as they come in."""

    def __init__(self, manifest: Manifest, donors: Iterable[PeerID], leases: Leases) -> None:
        self.manifest, self._leases = manifest, leases
        self._targets: dict[int, Target] = {}  # of chunks that come as they are
        self.id = manifest.id
        self._chunks = manifest.chunks
        self.plan = DownloadPlan(manifest.chunk_digests, donors)
        try:
            self.buffers = [empty(b.numel, getattr(torch, b.dtype)) for b in manifest.buffers]
        except (RuntimeError, OSError) as error:  # what torch and the kernel raise when there is no memory
            raise DownloadFailed(f"there is no memory for {_title(manifest)}, {manifest.nbytes} bytes") from error
        self.scalars = bytearray(manifest.scalars_nbytes)
        self.nbytes = 0
        self.codecs = _codecs_of(manifest)

    def expect(self, donor: PeerID, number: int) -> None:
        """That donor is about to be asked for that chunk: it is opened where it belongs, if it comes as it is. What
        another one still brings is not."""
        chunk = self._chunks[number]
        self._stop_waiting(number)
        if chunk.buffer is not None:
            out = self.buffers[chunk.buffer][chunk.start : chunk.stop]
            codec = self.codecs.codec_of(chunk.buffer, chunk.start, chunk.stop)
            if isinstance(codec, NoCompression) and out.dtype is not torch.bool and len(out):
                self._targets[number] = self._leases.register(chunk_name(self.id, number), donor, bytes_of(out))

    def _stop_waiting(self, number: int) -> bool:
        """Nobody writes that chunk any more; whether it was opened in place."""
        target = self._targets.pop(number, None)
        if target is None:
            return False
        self._leases.withdraw([target])
        return target.filled

    def close(self) -> None:
        """Nobody writes the state any more."""
        for number in list(self._targets):
            self._stop_waiting(number)

    def take(self, donor: PeerID, number: int, reply: Reply) -> None:
        """Keep the chunk with that number if `reply` brings it."""
        target = self._targets.get(number)
        in_place = target is not None and target.source == donor and self._stop_waiting(number)
        if not isinstance(reply.body, Chunk) or len(reply.buffers) != 1:
            self.plan.donor_failed(donor, f"sent no chunk when asked for number {number}")
            return
        payload, chunk = memoryview(reply.buffers[0]), self._chunks[number]
        if payload.nbytes != self._payload_nbytes(chunk):
            self.plan.donor_failed(donor, f"sent chunk {number} with a wrong size")
        elif self.plan.received(donor, number, blake3(payload).digest(), _now()):
            self.nbytes += payload.nbytes
            if chunk.buffer is None:
                self.scalars[chunk.start : chunk.stop] = payload
            elif not in_place:
                out = self.buffers[chunk.buffer][chunk.start : chunk.stop]
                codec = self.codecs.codec_of(chunk.buffer, chunk.start, chunk.stop)
                out.copy_(codec.decode(payload, out.dtype, out.numel()))

    def _payload_nbytes(self, chunk: StateChunk) -> int:
        numel = chunk.stop - chunk.start
        if chunk.buffer is None:
            return numel
        codec = self.codecs.codec_of(chunk.buffer, chunk.start, chunk.stop)
        return codec.encoded_nbytes(numel, self.buffers[chunk.buffer].dtype)


class _Download:
    """One call of `download_state`."""

    def __init__(
        self,
        node: Node,
        service: Service,
        donors: list[PeerID],
        timeout: float,
        max_nbytes: int,
        wanted: Callable[[Tip], bool],
        reserve: Callable[[Tip, Sequence[PeerID]], Awaitable[bool]] | None,
    ) -> None:
        self._node = node
        self._wanted, self._reserve = wanted, reserve
        self._stale = 0  # choices that were given up
        self.patience: asyncio.Timeout | None = None  # ends the download when nothing has come for so long
        self._movements: dict[PeerID, Movement] = {}
        self._service = service
        self._donors = donors
        self._timeout = timeout
        self._max_nbytes = max_nbytes
        self._offers: dict[PeerID, Manifest] = {}  # of donors that are not dropped
        self._priorities: dict[PeerID, float] = {}  # of those offers
        self._dropped: dict[PeerID, str] = {}
        self._withheld: set[PeerID] = set()
        self._unwanted: set[PeerID] = set()
        self._fetch: _Fetch | None = None
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._start = self._waiting_until = _now()

    def story(self) -> str:
        """How far it came, and what is known of each donor: for the text of an error."""
        missing, dropped = "", self._dropped
        if self._fetch is not None:
            manifest, plan = self._fetch.manifest, self._fetch.plan
            missing = f"{plan.missing} of {len(manifest.chunks)} chunks of {_title(manifest)} are missing. "
            dropped = dropped | plan.dropped
        known = {donor: f"offers {_title(manifest)}" for donor, manifest in self._offers.items()} | dropped
        donors = "; ".join(f"{donor!r}: {known.get(donor, 'has not answered')}" for donor in self._donors)
        return missing + (donors or "There was nobody to ask")

    async def run(self) -> Downloaded:
        """See `download_state`."""
        try:
            self._ask_offers(self._donors)
            while True:
                while not self._can_choose():
                    await self._event(self._waiting_until if _now() < self._waiting_until else None)
                if self._withheld.issuperset(self._donors):
                    raise NothingShared(f"nobody shares a state. {self.story()}")
                if not self._offers and self._unwanted:
                    raise NothingWanted(f"nobody offers a newer state. {self.story()}")
                if not self._offers:
                    raise DownloadFailed(f"nobody can give a state. {self.story()}")
                manifest, holders = self._choose()
                if not await self._is_reserved(manifest.tip, holders):
                    self._ask_offers([donor for donor in self._donors if donor not in self._dropped])
                elif (downloaded := await self._download(manifest, holders)) is not None:
                    return downloaded
        finally:
            for task in self._tasks:
                task.cancel()
            if self._fetch is not None:
                self._fetch.close()

    def _ask_offers(self, donors: Sequence[PeerID]) -> None:
        self._offers.clear()
        self._waiting_until = _now() + OFFER_SECONDS
        for donor in donors:
            self._begin(self._ask_offer(donor))

    def _can_choose(self) -> bool:
        """Whether what is not known yet can't change the choice, or is not worth waiting for."""
        left = len(self._donors) - len(self._dropped)
        holders = Counter(manifest.id for manifest in self._offers.values())
        return (
            len(self._offers) == left
            or (2 * max(holders.values(), default=0) > left and len(set(self._priorities.values())) == 1)
            or (bool(self._offers) and _now() >= self._waiting_until)
        )

    def _choose(self) -> tuple[Manifest, list[PeerID]]:
        """That of most of the offers with the highest priority, and all that hold it."""
        best = max(self._priorities[donor] for donor in self._offers)
        id = choose({donor: offer for donor, offer in self._offers.items() if self._priorities[donor] == best})
        holders = [donor for donor in self._donors if donor in self._offers and self._offers[donor].id == id]
        return self._offers[holders[0]], holders

    async def _is_reserved(self, tip: Tip, holders: Sequence[PeerID]) -> bool:
        if self._reserve is None or self._stale == MAX_STALE or await self._reserve(tip, holders):
            return True
        self._stale += 1
        return False

    async def _download(self, manifest: Manifest, holders: Sequence[PeerID]) -> Downloaded | None:
        """Fetch that state; None if all that offer it failed."""
        fetch = self._fetch = _Fetch(manifest, holders, self._node.transport.leases)
        while not fetch.plan.done and not fetch.plan.failed:
            self._look_who_sends(fetch)
            for donor, chunk in fetch.plan.next_requests(_now()):
                self._begin(self._ask_chunk(fetch, donor, chunk))
            await self._event(fetch.plan.next_check())
        self._dropped |= fetch.plan.dropped
        for donor in fetch.plan.dropped:
            del self._offers[donor]
        if fetch.plan.failed:
            fetch.close()
            self._fetch = None
            return None
        return Downloaded(
            manifest=fetch.manifest,
            buffers=fetch.buffers,
            lossy=fetch.codecs.lossy,
            scalars=bytes(fetch.scalars),
            chunks_from=fetch.plan.chunks_from,
            dropped=self._dropped,
            nbytes=fetch.nbytes,
            seconds=_now() - self._start,
        )

    def _look_who_sends(self, fetch: _Fetch) -> None:
        """A chunk that is under way on a slow line is no silence."""
        for donor in fetch.plan.owing:
            moved = self._node.transport.moved(donor)
            movement = self._movements.setdefault(donor, Movement(moved))
            if movement.goes_on(moved):
                fetch.plan.is_sending(donor, _now())
                self._gets_on()

    def _gets_on(self) -> None:
        if self.patience is not None and not self.patience.expired():
            self.patience.reschedule(_now() + self._timeout)

    async def _ask_offer(self, donor: PeerID) -> None:
        try:
            reply = await self._node.call_for_buffers(donor, self._service, GetManifest(), timeout=self._timeout)
            if isinstance(reply.body, Withheld):
                self._withheld.add(donor)
                raise ValueError("this peer does not share its state")
            if not isinstance(reply.body, Offer) or len(reply.buffers) != 1:
                raise ValueError("sent no manifest when asked for it")
            manifest = Manifest.decode(memoryview(reply.buffers[0]))
            for name in manifest.codecs:
                codec_by_name(name)
            if not self._wanted(manifest.tip):
                self._unwanted.add(donor)
                raise ValueError(f"{_title(manifest)} is not newer than what is here")
            if manifest.nbytes > self._max_nbytes:
                raise ValueError(f"offers a state of {manifest.nbytes} bytes, more than the {self._max_nbytes} allowed")
        except (P2PError, TimeoutError, ValueError) as error:
            self._dropped[donor] = str(error) or "did not answer in time"
        else:
            self._offers[donor], self._priorities[donor] = manifest, reply.body.priority
            if self._fetch is not None and self._fetch.id == manifest.id:
                self._fetch.plan.add_donor(donor)

    async def _ask_chunk(self, fetch: _Fetch, donor: PeerID, chunk: int) -> None:
        try:
            fetch.expect(donor, chunk)
            request = GetChunk(fetch.id, chunk)
            reply = await self._node.call_for_buffers(donor, self._service, request, timeout=self._timeout)
        except (P2PError, TimeoutError) as error:
            fetch.plan.donor_failed(donor, str(error) or "did not answer in time")
        else:
            fetch.take(donor, chunk, reply)
            self._gets_on()

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._node.spawn(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._changed.set()

    async def _event(self, until: float | None) -> None:
        """Wait until a task has ended, at most until `until`."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._changed.wait()
        self._changed.clear()
        if self._node.closed:
            raise DownloadFailed("this node was closed during the download")


def _codecs_of(manifest: Manifest) -> CodecPlan:
    """How the buffers are sent."""
    by_name = {name: codec_by_name(name) for name in manifest.codecs}
    spans = (CodecSpan(buffer, start, stop, by_name[name]) for buffer, start, stop, name in manifest.spans)
    return CodecPlan(tuple(spans), len(manifest.buffers))


def _title(manifest: Manifest) -> str:
    return f"the state of epoch {manifest.tip.epoch} ({manifest.id.hex()[:8]})"
