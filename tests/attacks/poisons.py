"""What a member can do in an open run, and a stranger can't in a closed one: nobody ends and nothing stops, and the
parameters are wrong."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from blake3 import blake3
from msgspec.structs import replace

from shoal.p2p.errors import P2PError
from shoal.p2p.identity import PeerID
from shoal.p2p.node import Reply
from shoal.swarm.protocol import messages as msg
from shoal.swarm.protocol.book import root_of
from shoal.swarm.protocol.plan import chunk_table
from shoal.transfer.donor import Chunk, GetChunk, GetManifest, Offer, transfer_service
from shoal.transfer.manifest import Manifest
from tests.attacks import forged
from tests.attacks.attack import MemberAttack, Normal

if TYPE_CHECKING:
    from tests.attacks.attacker import Inside


class CommitOfLies(MemberAttack):
    """5: a COMMIT of a result that nobody has averaged, which the attacker serves."""

    trains = True

    def __init__(self, inside: Inside) -> None:
        super().__init__(inside)
        self._options = b""  # with which it would step, as all do
        self._served: dict[bytes, tuple[msg.Committed, list[bytes]]] = {}

    def asks(self, key: bytes, message: Any) -> Any:
        self._options = message.options if isinstance(message, msg.Join) else self._options
        return message

    async def at_tip(self) -> None:
        if not self._options:
            return  # known from its first JOIN on
        rules, tip = self.run.rules, self.run.tip
        sizes = rules.vector(tip.epoch, False)
        every, largest = self.run.members(), rules.chunk_elements
        begin = forged.whole_begin(tip, self.run.me, every, sizes, largest, self._options)
        spans = chunk_table(sizes, begin.chunk_elements)
        data = [struct.pack("<f", 1e3) * (span.stop - span.start) for span in spans]
        digests = [blake3(chunk).digest() for chunk in data]
        self._served[begin.round] = forged.committed(begin, digests), data
        keys = [self.run.me.key, *self.run.others()]
        message = forged.commit(tip, begin.round, root_of(digests), keys, self.run.members(), samples=1e9)
        self.run.say(self.run.others(), message)

    def hears(self, peer: PeerID, message: Any, normal: Normal) -> Any:
        if isinstance(message, msg.Digests | msg.Fetch) and message.round in self._served:
            committed, data = self._served[message.round]
            if isinstance(message, msg.Digests):
                return committed
            self.gain("chunks taken from it")
            return forged.result(committed.begin, message.chunk, data[message.chunk])
        return normal()


class LaterState(MemberAttack):
    """6: a state of a far later epoch, which the attacker serves."""

    trains, every = True, 0.5

    def __init__(self, inside: Inside) -> None:
        super().__init__(inside)
        self._manifest: Manifest | None = None
        self._chunks: list[bytes] = []

    async def again(self) -> None:
        if self._manifest is None:
            await self._make()
        else:
            self.run.say(self.run.others(), forged.hello(self.run.me, self.run.terms, self._manifest.tip))

    async def _make(self) -> None:
        """What an honest peer serves, but for the tensors."""
        service = transfer_service(forged.STATE_SERVICE.format(run_id=self.run.run_id))
        donor = PeerID(self.run.others()[0])
        with contextlib.suppress(P2PError, TimeoutError):
            reply = await self.run.node.call_for_buffers(donor, service, GetManifest(), timeout=5)
            real = Manifest.decode(bytes(reply.buffers[0]))
            for number in range(len(real.digests) // 32):
                request = GetChunk(real.id, number)
                chunk = await self.run.node.call_for_buffers(donor, service, request, timeout=5)
                data = bytes(chunk.buffers[0])
                is_scalars = number < -(-real.scalars_nbytes // (1 << 20))
                self._chunks.append(data if is_scalars else struct.pack("<f", 1e3) * (len(data) // 4))
            digests = b"".join(blake3(chunk).digest() for chunk in self._chunks)
            tip = forged.better_tip(real.tip, 1_000_003)
            self._manifest = replace(real, tip=tip, digests=digests)
            self.run.serve_instead(service, self._serve)

    def _serve(self, peer: PeerID, message: Any, buffers: Any) -> Any:
        assert self._manifest is not None
        if isinstance(message, GetManifest):
            return Reply(Offer(0.0), [self._manifest.encode()])
        self.gain("chunks taken from it")
        return Reply(Chunk(), [self._chunks[message.chunk]])


class HugeGradients(MemberAttack):
    """15a: gradients times 1e6."""

    trains, scale = True, 1e6


class HugeWeights(MemberAttack):
    """15b: parts that weigh 1e15."""

    trains = True

    def sends(self, keys: Sequence[bytes], message: Any) -> Any:
        return forged.with_weight(message, 1e15) if isinstance(message, msg.Part) and message.weight else message


class LyingReducer(MemberAttack):
    """16a: as reducer, sends something else than the average, the same to all."""

    def sends_bytes(self, keys: Sequence[bytes], message: Any, buffers: Sequence[Any]) -> Sequence[Any]:
        if not isinstance(message, msg.Result):
            return buffers
        return [struct.pack("<f", 1e3) * (len(memoryview(buffer).cast("B")) // 4) for buffer in buffers]


class LiesToOne(LyingReducer):
    """16b: the same, to one peer only."""

    def sends(self, keys: Sequence[bytes], message: Any) -> Any:
        if isinstance(message, msg.Result) and len(keys) > 1:
            for key in keys:  # apart, so that one may be lied to
                self.run.say_with([key], message, self.sends_bytes([key], message, self.run.buffers), self.run.name)
            return None
        return message

    def sends_bytes(self, keys: Sequence[bytes], message: Any, buffers: Sequence[Any]) -> Sequence[Any]:
        is_victim = list(keys) == [min(self.run.others(), default=b"")]
        return super().sends_bytes(keys, message, buffers) if is_victim else buffers
