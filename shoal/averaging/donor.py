"""What a donor of a state does: it keeps a snapshot for the newcomers that ask, and serves it while the peer trains."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
from blake3 import blake3
from torch import Tensor

from shoal.averaging.manifest import MAX_CHUNKS, BufferShape, Manifest, StateChunk, state_chunks
from shoal.averaging.tip import Digest, Tip
from shoal.compression import CodecPlan
from shoal.p2p.errors import Refused
from shoal.p2p.identity import PeerID
from shoal.p2p.node import Node, Reply, Service

MAX_SNAPSHOTS: Final = 2
KEEP_SECONDS: Final = 30.0  # a snapshot of which no chunk was asked for so long is dropped
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


@dataclass(slots=True)
class _Held:
    snapshot: Snapshot
    manifest: Manifest
    chunks: list[StateChunk]
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
        take_snapshot: makes a consistent copy of the state; may raise `Refused` with the reason why there is none now.
        current_tip: the name of the state that `take_snapshot` would copy.
        allow: whether newcomers are served at all; may be changed later.
        priority: of this state among those of others, when it is asked for.
    """

    def __init__(
        self,
        node: Node,
        service_name: str,
        take_snapshot: Callable[[], Awaitable[Snapshot]],
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
        self._held.clear()

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
        for snapshot in self._held.values():
            snapshot.readers.discard(peer)
        held = self._newest()
        if held is None or (held.snapshot.tip != self._current_tip() and self._make_room()):
            if self._preparing is None:
                self._preparing = self._node.spawn(self._prepare())
            held = await self._prepared(self._preparing)
        held.readers.add(peer)
        return Reply(Offer(self._priority()), [held.manifest.encode()])

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
        del self._held[idle]
        return True

    async def _prepare(self) -> _Held:
        try:
            snapshot = await self._take_snapshot()
            manifest = await describe(snapshot)
            held = _Held(snapshot, manifest, manifest.chunks, _now(), set())
            self._held[manifest.id] = held
            if self._sweeper is None:
                self._sweeper = asyncio.get_running_loop().call_later(KEEP_SECONDS, self._sweep)
            return held
        finally:
            self._preparing = None

    def _sweep(self) -> None:
        self._held = {id: held for id, held in self._held.items() if held.asked + KEEP_SECONDS > _now()}
        self._sweeper = None
        if self._held:
            oldest = min(held.asked for held in self._held.values())
            self._sweeper = asyncio.get_running_loop().call_at(oldest + KEEP_SECONDS, self._sweep)

    def _chunk(self, request: GetChunk) -> Reply:
        held = self._held.get(request.manifest)
        if held is None:
            raise Refused("this state is not held any more: ask for the manifest again")
        if request.chunk >= len(held.chunks):
            raise Refused(f"the state has {len(held.chunks)} chunks, there is no number {request.chunk}")
        held.asked = _now()
        return Reply(Chunk(), [_payload(held.snapshot, held.chunks[request.chunk])])


def _now() -> float:
    return asyncio.get_running_loop().time()


def _payload(snapshot: Snapshot, chunk: StateChunk) -> memoryview:
    if chunk.buffer is None:
        return memoryview(snapshot.scalars)[chunk.start : chunk.stop]
    codec = snapshot.codecs.codec_of(chunk.buffer, chunk.start, chunk.stop)
    return codec.encode(snapshot.buffers[chunk.buffer][chunk.start : chunk.stop])


async def describe(snapshot: Snapshot) -> Manifest:
    """The manifest of a snapshot. Lets the loop run after each chunk.

    Raises ValueError (msgspec.ValidationError) if the snapshot is larger than a manifest can say.
    """
    shapes = tuple(BufferShape(str(b.dtype).removeprefix("torch."), b.numel()) for b in snapshot.buffers)
    digests = bytearray()
    for chunk in state_chunks(len(snapshot.scalars), [shape.numel for shape in shapes]):
        digests += blake3(_payload(snapshot, chunk)).digest()
        await asyncio.sleep(0)
    numbers: dict[str, int] = {}
    runs = tuple(
        (span.stop - span.start, numbers.setdefault(span.codec.name, len(numbers))) for span in snapshot.codecs.spans
    )
    made = Manifest(snapshot.tip, snapshot.layout, tuple(numbers), runs, shapes, len(snapshot.scalars), bytes(digests))
    return Manifest.decode(made.encode())  # so that bounds are checked here and not by every newcomer
