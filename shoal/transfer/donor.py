"""The donor of a state: it takes a snapshot for newcomers, and serves it while the peer trains."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import msgspec
from blake3 import blake3
from torch import Tensor

from shoal.compression import CodecPlan
from shoal.flat import FlatBuffer, Layout
from shoal.flat.allocation import forget_spares, memory_for
from shoal.p2p.errors import Refused
from shoal.p2p.identity import PeerID
from shoal.p2p.node import Node, Reply, Service
from shoal.p2p.sealing import NAME_BYTES
from shoal.swarm.duties import STATES
from shoal.swarm.gate import Gate
from shoal.swarm.protocol.line import MAX_OFFERED
from shoal.swarm.protocol.tip import DIGEST_BYTES, Digest, Tip
from shoal.transfer.manifest import MAX_CHUNKS, BufferShape, Manifest, state_chunks

log = logging.getLogger(__name__)

MAX_SNAPSHOTS: Final = 2
MAX_TOLD: Final = 8  # a donor warns of at most so many reasons why its state can't be sent
KEEP_SECONDS: Final = 30.0  # a snapshot is dropped if nobody has asked for a chunk of it for this long
HASHING_THREADS: Final = 2  # more than one, since a newcomer waits until all chunks are hashed
CHUNK_NUMBER_BYTES: Final = 4  # bytes of a chunk's number in its name
SPARE_SECONDS: Final = 5.0  # a snapshot with readers makes room for another one only if it was idle for this long


class GetManifest(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """Asks the donor which state it offers.

    Attributes:
        tip: the state that the newcomer wants, because it has parts of it. Without it, or if the donor has no snapshot
            of that state, the donor offers its present state.
    """

    tip: Tip | None = None


class Offer(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """The answer to GetManifest. The manifest of the state is in the buffer.

    Attributes:
        priority: newcomers prefer the states of the highest priority.
        line: the last lineages of the donor (`Line.to_wire`). It is not part of the manifest, which names the state,
            because two donors of one state may remember lines of different lengths.
    """

    priority: Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)] = 0.0
    line: Annotated[bytes, msgspec.Meta(max_length=MAX_OFFERED * DIGEST_BYTES)] = b""


class GetChunk(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """Asks for a chunk of the state whose manifest has the id `manifest`."""

    manifest: Digest
    chunk: Annotated[int, msgspec.Meta(ge=0, lt=MAX_CHUNKS)]


class Chunk(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """The answer to GetChunk. The chunk is in the buffer."""


class Withheld(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """The answer to GetManifest of a peer that does not share its state."""


def transfer_service(name: str, gate: Gate | None = None) -> Service:
    """The service of that name, for messages between newcomers and donors. In a closed run, with the run's gate."""
    admit = (lambda peer: None) if gate is None else gate.admit
    return Service(name, GetManifest | Offer | GetChunk | Chunk | Withheld, admit=admit)


@dataclass(frozen=True, slots=True)
class FrozenState:
    """A state at one moment, in memory that nobody writes to any more.

    Attributes:
        tip: the name of the state.
        layout: `Layout.to_wire()` of the buffers as msgpack, at most 1.5 MiB.
        buffers: the flat buffers: 1-D contiguous CPU tensors.
        scalars: everything else in the state, encoded, at most 64 MiB.
        codecs: the codecs in which the buffers are sent.
    """

    tip: Tip
    layout: bytes
    buffers: Sequence[Tensor]
    scalars: bytes
    codecs: CodecPlan

    @classmethod
    def of(cls, tip: Tip, memory: FlatBuffer, scalars: Any, codecs: CodecPlan) -> FrozenState:
        """The state with these tensors and plain data."""
        layout = msgspec.msgpack.encode(memory.layout.to_wire())
        return cls(tip, layout, memory.flat, msgspec.msgpack.encode(scalars), codecs)


class Copies(tuple[Tensor, ...]):
    """Copies of tensors in flat memory, of which a snapshot needs no other copy.

    Attributes:
        memory: the flat memory, on the host.
    """

    memory: FlatBuffer

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Copies:
        """Copy these tensors."""
        memory = FlatBuffer(Layout.of(tensors).on("cpu"), recycled=True)
        memory.copy_from(tensors)
        copies = cls(memory.views())
        copies.memory = memory
        return copies


@dataclass(frozen=True, slots=True)
class EncodedState:
    """A snapshot, encoded once for all newcomers.

    Attributes:
        manifest: the name of the state, and the digest of each chunk.
        payloads: the payload of each chunk, by its number. Uncompressed payloads are views of the snapshot's memory.
            Memory without such views is released.
    """

    manifest: Manifest
    payloads: Sequence[memoryview]


@dataclass(slots=True)
class _Held:
    state: EncodedState
    asked: float  # when it was taken, or a chunk of it was last asked for
    readers: set[PeerID] = field(default_factory=set)  # the peers whose last offer was this snapshot
    timer: asyncio.TimerHandle = field(init=False)  # drops the snapshot when it is idle


class Unsendable(Refused):
    """The state has something that can't be sent."""


class StateDonor:
    """Serves this peer's state to newcomers.

    The donor takes a snapshot when a newcomer asks for the state and it has no snapshot of the current tip. Newcomers
    that ask at the same time get the same snapshot. The donor keeps at most two. If both are being downloaded when a
    third one is needed, it offers the newer of the two instead, so that no download is cut off.

    Args:
        node: the node of this peer.
        service_name: the name of the service, the same at donors and newcomers.
        take_snapshot: makes a consistent, encoded copy of the state (see `encoded`), preferably in a thread of its own.
            It may raise `Refused` with the reason why there is none now, or `Unsendable`, which a warning tells once.
        current_tip: returns the name of the state that `take_snapshot` would copy. If it returns None, the state has no
            name, and no snapshot is offered twice.
        gate: the gate of a closed run. Only members that may train get its state.
        offered: returns what to say of the state: its priority, and its lineages. By default it has neither. None: this
            peer does not share its state now.
        asked: called each time that a newcomer asks for the state or a chunk of it.

    Attributes:
        asked_at: when a newcomer last asked for the state or a chunk of it, on the loop's clock.
    """

    def __init__(
        self,
        node: Node,
        service_name: str,
        take_snapshot: Callable[[], Awaitable[EncodedState]],
        current_tip: Callable[[], Tip | None],
        gate: Gate | None = None,
        offered: Callable[[], Offer | None] = Offer,
        asked: Callable[[], None] = lambda: None,
    ) -> None:
        self._gate, self._offered, self._asked = gate, offered, asked
        self.asked_at = float("-inf")
        self._node, self._service = node, transfer_service(service_name, gate)
        self._take_snapshot, self._current_tip = take_snapshot, current_tip
        self._held: dict[bytes, _Held] = {}  # by the manifest's id, the oldest first
        self._preparing: asyncio.Task[_Held] | None = None
        self._told: set[str] = set()  # the reasons that warnings have told
        node.serve(self._service, self._handle)

    def close(self) -> None:
        """Stop serving, and release the snapshots."""
        self._node.stop_serving(self._service)
        if self._preparing is not None:
            self._preparing.cancel()
        for id in list(self._held):
            self._drop(id)
        forget_spares()

    def _handle(self, peer: PeerID, message: object, _buffers: object) -> Reply | Coroutine[Any, Any, Reply]:
        if self._gate is not None:
            self._gate.require(peer, *STATES)
        self.asked_at = now()
        self._asked()
        match message:
            case GetManifest():
                return self._offer(peer, message.tip) if self._offered() else Reply(Withheld())
            case GetChunk() if self._offered():
                return self._chunk(message)
        raise Refused("not a request" if self._offered() else "this peer does not share its state")

    async def _offer(self, peer: PeerID, wanted: Tip | None) -> Reply:
        for other in self._held.values():  # a peer that asks for an offer again does not read the last one any more
            other.readers.discard(peer)
        newest = next(reversed(self._held.values()), None)
        held = next((held for held in self._held.values() if held.state.manifest.tip == wanted), newest)
        is_old = held is not None and held.state.manifest.tip not in (wanted, self._current_tip())
        if held is None or (is_old and self._make_room()):
            if self._preparing is None:
                self._preparing = self._node.spawn(self._prepare())
            preparing = self._preparing
            await asyncio.wait([preparing])  # unlike `await preparing`, this does not cancel it for other newcomers
            if preparing.cancelled():
                raise Refused("this peer does not share its state any more")
            held = preparing.result()
        held.readers.add(peer)
        offer = self._offered()
        return Reply(Withheld()) if offer is None else Reply(offer, [held.state.manifest.encode()])

    def _make_room(self) -> bool:
        """If the donor has two snapshots, drop one that is not in use. Returns whether there is room for another
        one."""
        if len(self._held) < MAX_SNAPSHOTS:
            return True
        id, idle = min(self._held.items(), key=lambda item: (bool(item[1].readers), item[1].asked))
        if idle.readers and idle.asked + SPARE_SECONDS > now():
            return False
        self._drop(id)
        return True

    async def _prepare(self) -> _Held:
        try:
            with memory_for("a copy of this peer's state", _refusal):
                taken = _Held(await self._take_snapshot(), now())
            id = taken.state.manifest.id
            held = self._held.setdefault(id, taken)
            held.asked = taken.asked
            if held is taken:
                self._drop_when_idle(id)
            return held
        except Unsendable as error:
            if str(error) not in self._told and len(self._told) < MAX_TOLD:
                self._told.add(str(error))
                log.warning("a newcomer can't have this peer's state: %s", error)
            raise
        finally:
            self._preparing = None

    def _drop_when_idle(self, id: bytes) -> None:
        held = self._held[id]
        if (until := held.asked + KEEP_SECONDS) > now():
            held.timer = asyncio.get_running_loop().call_at(until, self._drop_when_idle, id)
            return
        self._drop(id)
        if not self._held:
            forget_spares()

    def _drop(self, id: bytes) -> None:
        """Release a snapshot, and drop its chunks that are queued for newcomers."""
        self._held.pop(id).timer.cancel()
        self._node.transport.cancel(chunk_name(id, 0)[:-CHUNK_NUMBER_BYTES])

    def _chunk(self, request: GetChunk) -> Reply:
        held = self._held.get(request.manifest)
        if held is None:
            raise Refused("this state is not held any more: ask for the manifest again")
        payloads = held.state.payloads
        if request.chunk >= len(payloads):
            raise Refused(f"the state has {len(payloads)} chunks, there is no number {request.chunk}")
        held.asked = now()
        return Reply(Chunk(), [payloads[request.chunk]], chunk_name(request.manifest, request.chunk))


def _refusal(why: str) -> Refused:
    log.warning("a newcomer can't have this peer's state: %s", why)
    return Refused(why)


def chunk_name(manifest: bytes, chunk: int) -> bytes:
    """The name under which a chunk of a state is sent (see `Transport.send`). `manifest` is the id of its manifest."""
    return manifest[: NAME_BYTES - CHUNK_NUMBER_BYTES] + chunk.to_bytes(CHUNK_NUMBER_BYTES)


def now() -> float:
    """The time of the event loop."""
    return asyncio.get_running_loop().time()


def encoded(snapshot: FrozenState) -> EncodedState:
    """Encode a snapshot. This encodes and hashes the whole state, so do not call it in the reactor's thread.

    Raises:
        ValueError: if the snapshot exceeds a bound of manifests (msgspec.ValidationError), or if its codecs are for
            parts and results.
    """
    if snapshot.codecs.results is not snapshot.codecs:
        raise ValueError("a state has no parts and results: give load_state_compression one compression for both")
    shapes = tuple(BufferShape(str(b.dtype).removeprefix("torch."), b.numel()) for b in snapshot.buffers)
    payloads = []
    for chunk in state_chunks(len(snapshot.scalars), shapes):
        buffer, start, stop = chunk.buffer - 1, chunk.start, chunk.stop
        if chunk.buffer == 0:
            payloads.append(memoryview(snapshot.scalars)[start:stop])
        else:
            payloads.append(snapshot.codecs.codec_of(buffer, start, stop).encode(snapshot.buffers[buffer][start:stop]))
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        digests = b"".join(pool.map(lambda payload: blake3(payload).digest(), payloads))
    numbers: dict[str, int] = {}
    runs = tuple(
        (span.stop - span.start, numbers.setdefault(span.codec.name, len(numbers))) for span in snapshot.codecs.spans
    )
    made = Manifest(snapshot.tip, snapshot.layout, tuple(numbers), runs, shapes, len(snapshot.scalars), digests)
    # Decoding checks the bounds, so that the donor fails and not every newcomer.
    return EncodedState(Manifest.decode(made.encode()), payloads)
