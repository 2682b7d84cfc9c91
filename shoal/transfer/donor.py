"""What a donor of a state does: it keeps a snapshot for the newcomers that ask, and serves it while the peer trains."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
from blake3 import blake3
from torch import Tensor

from shoal.compression import CodecPlan
from shoal.flat.allocation import forget_spares
from shoal.p2p.errors import Refused
from shoal.p2p.identity import PeerID
from shoal.p2p.node import Node, Reply, Service
from shoal.p2p.sealing import NAME_BYTES
from shoal.swarm.protocol.tip import Digest, Tip
from shoal.transfer.manifest import MAX_CHUNKS, BufferShape, Manifest, StateChunk, state_chunks

MAX_SNAPSHOTS: Final = 2
KEEP_SECONDS: Final = 30.0  # a snapshot of which no chunk was asked for so long is dropped
HASHING_THREADS: Final = 2  # a newcomer waits until all is hashed
CHUNK_NUMBER_BYTES: Final = 4  # of a chunk's name
SPARE_SECONDS: Final = 5.0  # one that is being downloaded is not dropped to make room, unless idle for so long


class GetManifest(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """Which state do you offer?"""


class Offer(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """The manifest of the state is in the buffer. Newcomers that are offered several states prefer those of the highest
    priority."""

    priority: Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)] = 0.0


class GetChunk(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """Send me that chunk of the state whose manifest has this id."""

    manifest: Digest
    chunk: Annotated[int, msgspec.Meta(ge=0, lt=MAX_CHUNKS)]


class Chunk(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """The chunk that was asked for is in the buffer."""


class Withheld(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """The answer to GetManifest of a peer that does not share its state."""


def transfer_service(name: str) -> Service:
    """What newcomers and donors say to each other, under that name."""
    return Service(name, GetManifest | Offer | GetChunk | Chunk | Withheld)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state at one moment, in memory that nobody writes any more.

    Attributes:
        tip: the state's name.
        layout: `Layout.to_wire()` of the buffers as msgpack, at most 1.5 MiB.
        buffers: the flat buffers: 1-D, contiguous, on the CPU.
        scalars: everything else, at most 64 MiB.
        codecs: how the buffers are sent.
    """

    tip: Tip
    layout: bytes
    buffers: Sequence[Tensor]
    scalars: bytes
    codecs: CodecPlan


@dataclass(frozen=True, slots=True)
class EncodedState:
    """A snapshot as it is sent to every newcomer: encoded once.

    Attributes:
        manifest: names the state and the digest of each chunk.
        payloads: of each chunk, by its number. Those that no codec has changed are views of the snapshot's memory;
            what no payload is a view of is not held.
    """

    manifest: Manifest
    payloads: Sequence[memoryview]


@dataclass(slots=True)
class _Held:
    state: EncodedState
    asked: float  # when a chunk of it was last asked for, or it was taken
    readers: set[PeerID]  # to whom it was offered last: who asks for an offer again is done with it


class StateDonor:
    """Serves this peer's state to newcomers.

    A snapshot is taken when somebody asks for the state and none of the current tip is held; those who ask at the same
    time get the same. At most two are held. If both are being downloaded when a third would be due, the newer of them
    is offered, so that nobody's download is cut off.

    Args:
        node: the peer's node.
        service_name: the same at donors and newcomers, and unlike any other service's on the node.
        take_snapshot: makes a consistent copy of the state, encoded (see `encoded`), best in a thread of its own; may
            raise `Refused` with the reason why there is none now.
        current_tip: the name of the state that `take_snapshot` would copy.
        allow: whether newcomers are served at all; may be changed later.
        priority: of this state among those of others, when it is asked for.
    """

    def __init__(
        self,
        node: Node,
        service_name: str,
        take_snapshot: Callable[[], Awaitable[EncodedState]],
        current_tip: Callable[[], Tip],
        allow: bool = True,
        priority: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.allow = allow
        self._node = node
        self._service = transfer_service(service_name)
        self._take_snapshot = take_snapshot
        self._current_tip = current_tip
        self._priority = priority
        self._held: dict[bytes, _Held] = {}  # by the manifest's id, the oldest first
        self._preparing: asyncio.Task[_Held] | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        node.serve(self._service, self._handle)

    def close(self) -> None:
        """Serve nothing more, and let go of the snapshots."""
        self._node.stop_serving(self._service)
        if self._preparing is not None:
            self._preparing.cancel()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for id in list(self._held):
            self._drop(id)
        forget_spares()

    def _drop(self, id: bytes) -> None:
        """Hold that state no more; nor does what is queued of it, to a newcomer who reads nothing."""
        del self._held[id]
        self._node.transport.cancel(chunk_name(id, 0)[:-CHUNK_NUMBER_BYTES])

    def _handle(self, peer: PeerID, message: object, _buffers: object) -> Reply | Coroutine[Any, Any, Reply]:
        if not self.allow and isinstance(message, GetManifest):
            return Reply(Withheld())
        if not self.allow:
            raise Refused("this peer does not share its state")
        if isinstance(message, GetManifest):
            return self._offer(peer)
        if isinstance(message, GetChunk):
            return self._chunk(message)
        raise Refused("not a request")

    async def _offer(self, peer: PeerID) -> Reply:
        for other in self._held.values():
            other.readers.discard(peer)
        held = self._newest()
        if held is None or (held.state.manifest.tip != self._current_tip() and self._make_room()):
            if self._preparing is None:
                self._preparing = self._node.spawn(self._prepare())
            held = await self._prepared(self._preparing)
        held.readers.add(peer)
        return Reply(Offer(self._priority()), [held.state.manifest.encode()])

    async def _prepared(self, task: asyncio.Task[_Held]) -> _Held:
        try:
            return await asyncio.shield(task)  # one that asks and goes away must not end it for the others
        except asyncio.CancelledError:
            if task.cancelled():
                raise Refused("this peer does not share its state any more") from None
            raise

    def _newest(self) -> _Held | None:
        return next(reversed(self._held.values()), None)

    def _make_room(self) -> bool:
        """Whether another snapshot can be held, after dropping one that is not in use if there are too many."""
        if len(self._held) < MAX_SNAPSHOTS:
            return True
        idle = min(self._held, key=lambda id: (bool(self._held[id].readers), self._held[id].asked))
        if self._held[idle].readers and self._held[idle].asked + SPARE_SECONDS > _now():
            return False
        self._drop(idle)
        return True

    async def _prepare(self) -> _Held:
        try:
            held = _Held(await self._take_snapshot(), _now(), set())
            self._held[held.state.manifest.id] = held
            if self._sweeper is None:
                self._sweeper = asyncio.get_running_loop().call_later(KEEP_SECONDS, self._sweep)
            return held
        finally:
            self._preparing = None

    def _sweep(self) -> None:
        for id in [id for id, held in self._held.items() if held.asked + KEEP_SECONDS <= _now()]:
            self._drop(id)
        self._sweeper = None
        if not self._held:
            forget_spares()
        else:
            oldest = min(held.asked for held in self._held.values())
            self._sweeper = asyncio.get_running_loop().call_at(oldest + KEEP_SECONDS, self._sweep)

    def _chunk(self, request: GetChunk) -> Reply:
        held = self._held.get(request.manifest)
        if held is None:
            raise Refused("this state is not held any more: ask for the manifest again")
        payloads = held.state.payloads
        if request.chunk >= len(payloads):
            raise Refused(f"the state has {len(payloads)} chunks, there is no number {request.chunk}")
        held.asked = _now()
        return Reply(Chunk(), [payloads[request.chunk]], chunk_name(request.manifest, request.chunk))


def chunk_name(manifest: bytes, chunk: int) -> bytes:
    """The name under which a chunk of the state with that manifest's id passes (`Transport.send`)."""
    return manifest[: NAME_BYTES - CHUNK_NUMBER_BYTES] + chunk.to_bytes(CHUNK_NUMBER_BYTES)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _payload(snapshot: Snapshot, chunk: StateChunk) -> memoryview:
    if chunk.buffer is None:
        return memoryview(snapshot.scalars)[chunk.start : chunk.stop]
    codec = snapshot.codecs.codec_of(chunk.buffer, chunk.start, chunk.stop)
    return codec.encode(snapshot.buffers[chunk.buffer][chunk.start : chunk.stop])


def _digest(payload: memoryview) -> bytes:
    return blake3(payload).digest()


def encoded(snapshot: Snapshot) -> EncodedState:
    """The snapshot as it is sent. Takes as long as its codecs and blake3 do, so it is not for the reactor's thread.

    Raises ValueError (msgspec.ValidationError) if the snapshot is larger than a manifest can say.
    """
    shapes = tuple(BufferShape(str(b.dtype).removeprefix("torch."), b.numel()) for b in snapshot.buffers)
    payloads = [_payload(snapshot, chunk) for chunk in state_chunks(len(snapshot.scalars), shapes)]
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        digests = b"".join(pool.map(_digest, payloads))
    numbers: dict[str, int] = {}
    runs = tuple(
        (span.stop - span.start, numbers.setdefault(span.codec.name, len(numbers))) for span in snapshot.codecs.spans
    )
    made = Manifest(snapshot.tip, snapshot.layout, tuple(numbers), runs, shapes, len(snapshot.scalars), digests)
    # Decoded, so that bounds are checked here and not by every newcomer.
    return EncodedState(Manifest.decode(made.encode()), payloads)
