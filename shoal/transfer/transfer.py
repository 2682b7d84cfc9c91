"""The download of a state: a newcomer downloads it from several donors at once, and verifies every chunk.

`swarm/protocol/download.py` decides which donor to ask for which chunk. `donor.py` is the other side.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import torch
from blake3 import blake3
from torch import Tensor

from shoal.compression import Codec, CodecPlan, CodecSpan, NoCompression, codec_by_name
from shoal.flat import Layout, bytes_of
from shoal.flat.allocation import empty, memory_for
from shoal.p2p.errors import P2PError, PeerLost, Refused
from shoal.p2p.identity import PeerID
from shoal.p2p.leases import Expected, Leases
from shoal.p2p.node import Node, Reply, Service
from shoal.p2p.transport import Movement
from shoal.swarm.protocol.download import DownloadPlan
from shoal.swarm.protocol.errors import AveragingError
from shoal.swarm.protocol.line import agreed, line_to
from shoal.swarm.protocol.tip import Tip
from shoal.transfer.donor import Chunk, GetChunk, GetManifest, Offer, Withheld, chunk_name, now, transfer_service
from shoal.transfer.manifest import BufferShape, Manifest, choose

OFFER_SECONDS: Final = 15.0  # do not wait longer for the offers of donors
# How often offers are asked for again because the swarm does not wait for this peer. Each time costs a donor a
# snapshot.
MAX_STALE: Final = 5
STOOD_STILL: Final = 2.0  # if the download wakes up later than it wanted by so many seconds, its process was stopped

Reserve = Callable[[Tip, Sequence[PeerID], int], Awaitable[bool]]


class DownloadFailed(AveragingError):
    """No state was downloaded. The message names every donor with the reason."""

    lacks_memory = False  # whether the reason is that this peer has no memory for it


class NoMemoryForState(DownloadFailed):
    """This peer has no memory to receive the state, or to load it. Nothing has changed."""

    lacks_memory = True


class NothingShared(DownloadFailed):
    """There are no donors, or none of them shares a state. A retry does not help."""


class NothingWanted(DownloadFailed):
    """Donors offered states, but none that is `wanted`."""


@dataclass(frozen=True, slots=True)
class Downloaded:
    """A state that was downloaded, complete and verified.

    Attributes:
        manifest: the manifest of the state. The caller interprets `manifest.tip` and `manifest.layout`.
        buffers: a 1-D CPU tensor for each entry of `manifest.buffers`.
        lossy: whether a lossy codec may have changed the buffers.
        scalars: the rest of the state, as the donors encoded it.
        chunks_from: how many chunks each donor has sent.
        dropped: the donors that offered or sent nothing usable, each with the reason.
        nbytes: the size of all chunks as they were sent, in bytes.
        seconds: the time from the first request to the last chunk.
        line: the lineages that lead to the state, its own last, as far as all donors of the state agree; may be empty.
    """

    manifest: Manifest
    buffers: list[Tensor]
    lossy: bool
    scalars: bytes
    chunks_from: dict[PeerID, int]
    dropped: dict[PeerID, str]
    nbytes: int
    seconds: float
    line: tuple[bytes, ...] = ()

    def tensors(self) -> list[Tensor]:
        """The tensors of the layout, as views of the buffers.

        Raises:
            ValueError: if the layout from the donors is invalid, or does not fit the buffers.
        """
        layout = Layout.from_wire(msgspec.msgpack.decode(self.manifest.layout))
        if [(b.numel, b.dtype) for b in layout.buffers] != [(b.numel(), b.dtype) for b in self.buffers]:
            raise ValueError("the state's layout does not describe its buffers")
        return [self.buffers[entry.buffer][entry.span.slice].view(entry.shape) for entry in layout.entries]


async def download_state(
    node: Node,
    service_name: str,
    donors: Iterable[PeerID],
    *,
    timeout: float,
    rng: random.Random,
    relayed: Collection[PeerID] = (),
    max_nbytes: int = 1 << 36,
    wanted: Callable[[Tip], bool] = lambda tip: True,
    reserve: Reserve | None = None,
) -> Downloaded:
    """Download the state that most of `donors` hold, from all of its holders at once.

    Every chunk is verified. A donor that is lost, refuses, is too slow or sends something other than it offered is
    dropped, and other donors send its chunks. If all holders of a state fail, the download starts again with the next
    state. If donors give priorities, only states of the highest priority are considered.

    Args:
        node: the node of this peer; it must know the donors' addresses.
        service_name: the name of the donors' `StateDonor` service.
        donors: the peers to ask. This peer itself is ignored.
        timeout: give up after this many seconds without any progress.
        rng: draws the order in which donors are asked.
        relayed: donors that are asked for chunks only if no other donor of the state is left.
        max_nbytes: the size in memory of the largest state that is accepted, in bytes; 64 GiB by default.
        wanted: returns whether the caller can use a state with that tip; by default all.
        reserve: called with the tip of a state, its holders and its size as it is sent, in bytes, before the first
            request for a chunk. If it returns False, offers are asked for again, at most `MAX_STALE` times.

    Returns:
        The complete, verified state.

    Raises:
        DownloadFailed: if no donor is left, if nothing has arrived for `timeout` seconds, or if the node is closed. The
            message names every donor with the reason.
        NoMemoryForState: if there is no memory for the state.
        NothingShared: if there are no donors, or none of them shares its state.
        NothingWanted: if donors offer states, but none is `wanted`.
    """
    others = sorted(set(donors) - {node.peer_id})
    rng.shuffle(others)
    service = transfer_service(service_name)
    return await _Download(node, service, others, timeout, max_nbytes, wanted, reserve, frozenset(relayed)).run()


class _Fetch:
    """The chunks of one state, as they arrive.

    Attributes:
        parts: memory for the parts of the state: one tensor for the scalars, and one for each buffer.
    """

    def __init__(self, manifest: Manifest, donors: Iterable[PeerID], leases: Leases) -> None:
        self.manifest, self.id, self.chunks = manifest, manifest.id, manifest.chunks
        shapes = (BufferShape("uint8", manifest.scalars_nbytes), *manifest.buffers)
        with memory_for(f"{_title(manifest)}, {manifest.nbytes} bytes", NoMemoryForState):
            self.parts = [empty(shape.numel, getattr(torch, shape.dtype)) for shape in shapes]
        self.codecs = _codecs_of(manifest)
        self._sizes = _sent_sizes(manifest)
        self.plan = DownloadPlan(manifest.chunk_digests, self._sizes, donors)
        self.nbytes = 0
        self.expected = Expected(leases)

    def go_on_with(self, donors: Iterable[PeerID]) -> None:
        """All donors have failed. Fetch what is missing from these."""
        before, have = self.plan, set(range(len(self.chunks))) - self.plan.missing
        self.plan = DownloadPlan(self.manifest.chunk_digests, self._sizes, donors, have=have)
        self.plan.chunks_from.update(before.chunks_from)

    def _place(self, number: int) -> tuple[Tensor, Codec]:
        """The memory for a chunk, and its codec."""
        chunk = self.chunks[number]
        codec = self.codecs.codec_of(chunk.buffer, chunk.start, chunk.stop)
        return self.parts[chunk.buffer][chunk.start : chunk.stop], codec

    def expect(self, donor: PeerID, number: int) -> None:
        """This peer is about to ask that donor for that chunk. If the chunk is uncompressed, let it be received
        directly into the memory for it, from that donor only."""
        out, codec = self._place(number)
        if number not in self.plan.missing:
            return  # a late donor has just sent it, and nothing may overwrite it
        if isinstance(codec, NoCompression) and out.dtype is not torch.bool:  # a byte may be no valid bool
            with suppress(ValueError):  # another download has registered this chunk; receive it into separate memory
                self.expected.expect(number, chunk_name(self.id, number), donor, bytes_of(out))

    def take(self, donor: PeerID, number: int, reply: Reply) -> None:
        """Keep the chunk with that number if `reply` contains it and it is correct."""
        in_place = self.expected.stop(number, donor)
        self.expected.stop(number)  # so that another donor's chunk does not overwrite a verified one
        if not isinstance(reply.body, Chunk) or len(reply.buffers) != 1:
            self.plan.donor_failed(donor, f"sent no chunk when asked for number {number}")
            return
        payload, (out, codec) = memoryview(reply.buffers[0]), self._place(number)
        if payload.nbytes != self._sizes[number]:
            self.plan.donor_failed(donor, f"sent chunk {number} with a wrong size")
        # A donor may send two chunks with one name. So the one in memory need not be the one in the reply: hash that.
        elif self.plan.received(donor, number, blake3(bytes_of(out) if in_place else payload).digest(), now()):
            self.nbytes += payload.nbytes
            if not in_place:
                out.copy_(codec.decode(payload, out.dtype, out.numel()))


@dataclass(eq=False)
class _Download:
    """One call of `download_state`."""

    node: Node
    service: Service
    donors: list[PeerID]
    timeout: float
    max_nbytes: int
    wanted: Callable[[Tip], bool]
    reserve: Reserve | None
    relayed: frozenset[PeerID]
    _patience: asyncio.Timeout = field(init=False)  # ends the download when nothing has arrived for `timeout` seconds
    _offers: dict[PeerID, tuple[Manifest, float]] = field(init=False, default_factory=dict)  # (manifest, priority)
    _lines: dict[PeerID, tuple[bytes, ...]] = field(init=False, default_factory=dict)
    _dropped: dict[PeerID, str] = field(init=False, default_factory=dict)
    _withheld: set[PeerID] = field(init=False, default_factory=set)
    _unwanted: set[PeerID] = field(init=False, default_factory=set)
    _parted: set[PeerID] = field(init=False, default_factory=set)  # whose state or connection was lost meanwhile
    _fetch: _Fetch | None = field(init=False, default=None)
    _movements: dict[PeerID, Movement] = field(init=False, default_factory=dict)
    _lack: NoMemoryForState | None = field(init=False, default=None)  # raised while something arrived
    _changed: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _tasks: set[asyncio.Task[None]] = field(init=False, default_factory=set)
    _start: float = field(init=False, default_factory=now)
    _waiting_until: float = field(init=False, default=0.0)  # how long to wait for offers

    async def run(self) -> Downloaded:
        """See `download_state`."""
        try:
            with memory_for("a state", NoMemoryForState):
                return await self._run()
        finally:
            for task in self._tasks:
                task.cancel()
            if self._fetch is not None:
                self._fetch.expected.close()
                self._fetch.parts.clear()  # an error may hold the rest of this object for long

    async def _run(self) -> Downloaded:
        try:
            async with asyncio.timeout(self.timeout) as self._patience:
                stale = 0  # how often offers were given up
                self._ask_offers()
                while True:
                    manifest, holders = await self._choice()
                    reserve = self.reserve if stale < MAX_STALE else None
                    if reserve is not None and not await reserve(manifest.tip, holders, sum(_sent_sizes(manifest))):
                        stale += 1
                        self._ask_offers()
                    elif (downloaded := await self._download(manifest, holders)) is not None:
                        return downloaded
                    elif not self._offers and self._parted and stale < MAX_STALE:
                        stale += 1  # this process was stopped, or away from the network: the donors may be there still
                        self._ask_offers(again=manifest.tip)
        except TimeoutError:
            raise DownloadFailed(f"no part of a state has arrived for {self.timeout:g} s. {self._story()}") from None

    def _story(self) -> str:
        """How far the download has come, and what is known of each donor, for an error message."""
        missing, dropped = "", self._dropped
        if self._fetch is not None:
            manifest, plan = self._fetch.manifest, self._fetch.plan
            missing = f"{len(plan.missing)} of {len(self._fetch.chunks)} chunks of {_title(manifest)} are missing. "
            dropped = dropped | plan.dropped
        known = {donor: f"offers {_title(manifest)}" for donor, (manifest, _) in self._offers.items()} | dropped
        donors = "; ".join(f"{donor!r}: {known.get(donor, 'has not answered')}" for donor in self.donors)
        return missing + (donors or "There was nobody to ask")

    # -- which state

    def _ask_offers(self, again: Tip | None = None) -> None:
        """Ask all donors for offers, except those that were dropped. With `again`, ask those that are `_parted`, too,
        for that state."""
        self._offers.clear()
        self._waiting_until = now() + OFFER_SECONDS
        for donor in self._parted if again is not None else ():
            self._dropped.pop(donor, None)
        self._parted.clear()
        for donor in self.donors:
            if donor not in self._dropped:
                self._begin(self._ask_offer, donor, again)

    async def _ask_offer(self, donor: PeerID, again: Tip | None) -> None:
        try:
            reply = await self.node.call_for_buffers(donor, self.service, GetManifest(again), timeout=self.timeout)
            if isinstance(reply.body, Withheld):
                self._withheld.add(donor)
                raise ValueError("this peer does not share its state")
            if not isinstance(reply.body, Offer) or len(reply.buffers) != 1:
                raise ValueError("sent no manifest when asked for it")
            manifest = Manifest.decode(memoryview(reply.buffers[0]))
            for name in manifest.codecs:
                codec_by_name(name)
            if not self.wanted(manifest.tip):
                self._unwanted.add(donor)
                raise ValueError(f"{_title(manifest)} is not newer than this peer's state")
            if manifest.nbytes > self.max_nbytes:
                raise ValueError(
                    f"offers a state of {manifest.nbytes} bytes, more than the {self.max_nbytes} allowed here: "
                    f"max_state_bytes={manifest.nbytes} would do"
                )
        except (P2PError, TimeoutError, ValueError) as error:
            self._dropped[donor] = str(error) or "did not answer in time"
        else:
            self._offers[donor] = manifest, reply.body.priority
            self._lines[donor] = line_to(manifest.tip, reply.body.line)
            if self._fetch is not None and self._fetch.id == manifest.id and donor not in self.relayed:
                self._fetch.plan.add_donor(donor)

    async def _choice(self) -> tuple[Manifest, list[PeerID]]:
        """Wait for offers. Returns the state that most donors of the highest priority offer, and all of its holders."""
        while not self._can_choose():
            await self._event(self._waiting_until if now() < self._waiting_until else None)
        if self._withheld.issuperset(self.donors):
            raise NothingShared(f"nobody shares a state. {self._story()}")
        if not self._offers and self._unwanted:
            raise NothingWanted(f"nobody offers a newer state. {self._story()}")
        if not self._offers:
            raise DownloadFailed(f"nobody can give a state. {self._story()}")
        best = max(priority for _, priority in self._offers.values())
        manifest = choose([manifest for manifest, priority in self._offers.values() if priority == best])
        return manifest, self._holders(manifest)

    def _holders(self, manifest: Manifest) -> list[PeerID]:
        """All donors that offer that state."""
        holders = {donor for donor, (offer, _) in self._offers.items() if offer.id == manifest.id}
        return [donor for donor in self.donors if donor in holders]

    def _can_choose(self) -> bool:
        """Whether to choose a state now: the missing answers cannot change the choice, or the time for them is over. If
        only relayed donors have answered, the download still waits for others."""
        left = len(self.donors) - len(self._dropped)
        most = max(Counter(manifest.id for manifest, _ in self._offers.values()).values(), default=0)
        priorities = {priority for _, priority in self._offers.values()}
        if (self._offers or self._unwanted) and now() >= self._waiting_until:
            return True  # others have answered
        is_settled = 2 * most > left and len(priorities) == 1
        return len(self._offers) == left or (is_settled and bool(self._offers.keys() - self.relayed))

    # -- its chunks

    async def _download(self, manifest: Manifest, holders: Sequence[PeerID]) -> Downloaded | None:
        """Fetch that state. Returns None if all of its holders have failed."""
        direct = [donor for donor in holders if donor not in self.relayed]
        if self._fetch is not None and self._fetch.id == manifest.id:
            self._fetch.go_on_with(direct or holders)
        else:
            self._fetch = None  # first, because its memory may be needed
            self._fetch = _Fetch(manifest, direct or holders, self.node.transport.leases)
        fetch, plan = self._fetch, self._fetch.plan
        while plan.missing and not plan.failed:
            self._look_who_sends(plan)
            for donor, chunk in plan.next_requests(now()):
                self._begin(self._ask_chunk, fetch, donor, chunk)
            await self._event(check := plan.next_check())
            if check is not None and now() > check + STOOD_STILL:
                plan.stood_still(now())
            if plan.failed:
                for donor in self._holders(manifest):
                    plan.add_donor(donor)
        self._dropped |= plan.dropped
        for donor in plan.dropped:
            del self._offers[donor]
        if plan.failed:
            fetch.expected.close()
            return None
        buffers, lossy, scalars = fetch.parts[1:], fetch.codecs.lossy, bytes(bytes_of(fetch.parts[0]))
        seconds = now() - self._start
        line = agreed([self._lines[donor] for donor, (offer, _) in self._offers.items() if offer.id == manifest.id])
        return Downloaded(
            manifest, buffers, lossy, scalars, plan.chunks_from, self._dropped, fetch.nbytes, seconds, line
        )

    def _look_who_sends(self, plan: DownloadPlan) -> None:
        """Tell the plan which donors are sending: a donor whose chunk is on its way over a slow line is not silent."""
        for donor in plan.owing:
            moved = self.node.transport.moved(donor)
            if self._movements.setdefault(donor, Movement(moved)).goes_on(moved):
                plan.is_sending(donor, now())
                self._progressed()

    async def _ask_chunk(self, fetch: _Fetch, donor: PeerID, chunk: int) -> None:
        plan = fetch.plan
        try:
            fetch.expect(donor, chunk)
            request = GetChunk(fetch.id, chunk)
            reply = await self.node.call_for_buffers(donor, self.service, request, timeout=self.timeout)
        except (P2PError, TimeoutError) as error:
            if isinstance(error, PeerLost | Refused):
                self._parted.add(donor)
            plan.donor_failed(donor, str(error) or "did not answer in time")
        else:
            fetch.take(donor, chunk, reply)
            self._progressed()

    # -- time

    def _progressed(self) -> None:
        if not self._patience.expired():
            self._patience.reschedule(now() + self.timeout)

    def _begin(self, ask: Callable[..., Coroutine[Any, Any, None]], *given: Any) -> None:
        task = self.node.spawn(self._asked(ask, *given))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self._changed.set())

    async def _asked(self, ask: Callable[..., Coroutine[Any, Any, None]], *given: Any) -> None:
        """Ask, and note if there was no memory for the answer. That ends the download, for it is no fault of a
        donor."""
        try:
            with memory_for("a part of a state", NoMemoryForState):
                await ask(*given)
        except NoMemoryForState as error:
            self._lack = error

    async def _event(self, until: float | None) -> None:
        """Wait until a task has ended, or until that time; None: no limit."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._changed.wait()
        self._changed.clear()
        if self._lack is not None:
            raise self._lack
        if self.node.closed:
            raise DownloadFailed("this node was closed during the download")


def _codecs_of(manifest: Manifest) -> CodecPlan:
    """The codecs of all parts of a state."""
    codecs = {name: codec_by_name(name) for name in manifest.codecs}
    spans = [CodecSpan(0, 0, manifest.scalars_nbytes, NoCompression())]
    spans += [CodecSpan(1 + buffer, start, stop, codecs[name]) for buffer, start, stop, name in manifest.spans]
    return CodecPlan(tuple(spans), 1 + len(manifest.buffers))


def _sent_sizes(manifest: Manifest) -> list[int]:
    """The size of each chunk as it is sent, in bytes."""
    codecs, dtypes = _codecs_of(manifest), [torch.uint8, *(getattr(torch, each.dtype) for each in manifest.buffers)]
    return [
        codecs.codec_of(part, start, stop).encoded_nbytes(stop - start, dtypes[part])
        for part, start, stop in ((chunk.buffer, chunk.start, chunk.stop) for chunk in manifest.chunks)
    ]


def _title(manifest: Manifest) -> str:
    return f"the state of epoch {manifest.tip.epoch} ({manifest.id.hex()[:8]})"
