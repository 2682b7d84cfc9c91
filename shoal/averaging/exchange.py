"""The bytes of a round: parts go out of flat memory, are summed, and the averages come back into flat memory.

Counted per round of N bytes, n members with equal spans: each member seals, sends, receives and opens 2(n-1)/n N,
writes its span once and reads it n times, and hashes N. Results are opened where they belong. Nothing else is done per
byte.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from blake3 import blake3

from shoal.compression import CodecPlan, NoCompression
from shoal.flat import bytes_of, is_finite
from shoal.p2p.identity import PeerID
from shoal.p2p.leases import Leases, Target
from shoal.swarm.protocol.book import Book, RuleBroken
from shoal.swarm.protocol.contribution import Fault, SendTo
from shoal.swarm.protocol.messages import Begin, Carries, Part, Repair, Result, Source, name_of
from shoal.swarm.protocol.plan import chunk_table


def compute_serially() -> None:
    """Have torch use one thread for what the calling thread computes, and change nothing for other threads.

    For the reactor: a chunk is too small to be worth a parallel region, and the trainer has the cores. (4 peers on 2
    cores, 25M float32: 1.4 s a round with torch's default, 0.58 s so.) `torch.set_num_threads` sets the calling
    thread's number and the default of threads to come; a thread of no other use puts the default back.
    """
    default = torch.get_num_threads()
    torch.set_num_threads(1)
    restore = threading.Thread(target=torch.set_num_threads, args=(default,), name="shoal-threads")
    restore.start()
    restore.join()


class Exchange:
    """One member's side of the all-reduce of one round.

    Args:
        book: what is owed to whom.
        inputs: flat 1-D CPU tensors, only read.
        outputs: of the same sizes and dtypes; hold the average when `book.complete`.
        codecs: of all elements; equal at all members.
        send: sends a message with buffers to members.
        fault: told of a member that broke a rule, with the reason.
    """

    def __init__(
        self,
        book: Book,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        codecs: CodecPlan,
        send: SendTo,
        fault: Fault,
    ) -> None:
        self.book = book
        self._inputs, self._outputs = inputs, outputs
        self._codecs = [codecs.codec_of(chunk.buffer, chunk.start, chunk.stop) for chunk in book.chunks]
        self._send, self._fault = send, fault
        self._started = False
        self._leases = Leases()  # where the output waits for what others send; who opens this names it
        self._targets: dict[int, Target] = {}  # of chunks that others are to send as they are
        self._payloads: dict[int, dict[bytes, memoryview]] = {}
        self.progressed = 0  # grows with everything that arrives

    @classmethod
    def of(
        cls,
        me: bytes,
        begin: Begin,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        codecs: CodecPlan,
        send: SendTo,
        fault: Fault,
    ) -> Exchange:
        """The exchange of the round that `begin` describes. Raises RuleBroken if its plan does not fit the vector."""
        try:
            chunks = chunk_table([tensor.numel() for tensor in inputs], begin.chunk_elements)
        except ValueError as error:
            raise RuleBroken(str(error)) from error
        if begin.starts[-1] != len(chunks):
            raise RuleBroken(f"BEGIN divides {begin.starts[-1]} chunks; the vector has {len(chunks)}")
        return cls(Book(me, begin, chunks), inputs, outputs, codecs, send, fault)

    def start(self, weight: float, leases: Leases) -> None:
        """Send the first parts, and reduce what is ready. Before this, the input is not read, nor the output written.
        `weight` is what the input weighs, which may be another than in BEGIN."""
        self.book.weights[self.book.me] = weight
        self._started, self._leases = True, leases
        self._await_results()
        self._reduce(self.book.put_out(()))
        self._send_parts()

    def part(self, sender: bytes, part: Part, buffers: Sequence[memoryview]) -> None:
        """A member's part of one of my chunks has come. Raises RuleBroken if it does not belong here."""
        chunk = part.chunk
        if len(buffers) > 1:
            raise RuleBroken(f"a part with {len(buffers)} payloads")
        if sender in self.book.weights and bool(buffers) != (part.weight > 0):
            raise RuleBroken(f"chunk {chunk} {'has' if buffers else 'lacks'} a payload, against its weight")
        if not self.book.part_arrived(sender, chunk, part.plan, part.weight):
            return
        if buffers:
            self._check_size(chunk, buffers[0])
            # As long as this peer's user lets it wait, its parts must not take the memory in which chunks come.
            payload = buffers[0] if self._started else memoryview(bytearray(buffers[0]))
            self._payloads.setdefault(chunk, {})[sender] = payload
        self.progressed += 1
        if self.book.is_ready(chunk):
            self._reduce([chunk])

    def result(self, sender: bytes, result: Result, buffers: Sequence[memoryview]) -> None:
        """The average of a chunk has come. Raises RuleBroken if it does not belong here."""
        chunk = result.chunk
        if self.book.result_arrived(sender, chunk, result.plan):
            if len(buffers) != 1:
                raise RuleBroken(f"a result with {len(buffers)} payloads")
            self._check_size(chunk, buffers[0])
            self.progressed += 1
            in_place, out = self._stop_waiting(chunk), self._slice(self._outputs, chunk)
            if not in_place:
                out.copy_(self._codecs[chunk].decode(buffers[0], out.dtype, out.numel()))
            self._received(chunk, out)
        self._send_parts()

    def put_out(self, keys: Sequence[bytes]) -> None:
        """Go on without these members."""
        self.progressed += 1
        self._reduce(self.book.put_out(keys))

    def repair(self, repair: Repair) -> list[Source]:
        """Follow a repair; returns what is to be fetched. Raises RuleBroken if it does not fit the round."""
        self.progressed += 1
        fetches, ready = self.book.repair(repair)
        for source in repair.sources:
            self._stop_waiting(source.chunk)
        self._await_results()
        self._reduce(ready)
        self._send_parts()
        return fetches

    def await_fetched(self, chunk: int, holder: bytes, leases: Leases) -> None:
        """That holder is about to be asked for a chunk; until it has come, its memory waits in `leases`."""
        self._leases = leases
        self._stop_waiting(chunk)
        self._await(chunk, holder, Carries.FETCHED)

    def fetched(self, chunk: int, digest: bytes, data: memoryview) -> None:
        """A chunk has come from a holder. Raises RuleBroken if it is not the one with that digest."""
        in_place, out = self._stop_waiting(chunk), bytes_of(self._slice(self._outputs, chunk))
        if data.nbytes != out.nbytes or blake3(out if in_place else data).digest() != digest:
            raise RuleBroken(f"chunk {chunk} is not the one that was committed")
        if not in_place:
            out[:] = data
        self.progressed += 1
        self.book.received(chunk, digest)

    def close(self) -> None:
        """Nothing is written into the output any more, by whatever still comes."""
        for chunk in list(self._targets):
            self._stop_waiting(chunk)

    def chunk_bytes(self, chunk: int) -> memoryview:
        """The average of a chunk that is here, uncompressed."""
        return bytes_of(self._slice(self._outputs, chunk))

    # -- inside

    def _slice(self, tensors: Sequence[torch.Tensor], chunk: int) -> torch.Tensor:
        span = self.book.chunks[chunk]
        return tensors[span.buffer][span.start : span.stop]

    def _name(self, carries: Carries, chunk: int) -> bytes:
        return name_of(self.book.begin.round, carries, chunk)

    def _await(self, chunk: int, source: bytes, carries: Carries) -> None:
        """Have a chunk opened where it belongs, if it comes as it is. (Of a bool, a byte may be wrong.)"""
        out = self._slice(self._outputs, chunk)
        if out.dtype is not torch.bool:
            self._targets[chunk] = self._leases.register(self._name(carries, chunk), PeerID(source), bytes_of(out))

    def _await_results(self) -> None:
        for chunk, owner in self.book.awaited.items() if self._started else ():
            if isinstance(self._codecs[chunk], NoCompression) and chunk not in self._targets:
                self._await(chunk, owner, Carries.RESULT)

    def _stop_waiting(self, chunk: int) -> bool:
        """A chunk has come, or comes from somebody else. Nobody writes it any more; whether it was opened in place."""
        target = self._targets.pop(chunk, None)
        if target is None:
            return False
        self._leases.withdraw([target])
        return target.filled

    def _check_size(self, chunk: int, data: memoryview) -> None:
        span = self.book.chunks[chunk]
        expected = self._codecs[chunk].encoded_nbytes(span.stop - span.start, self._outputs[span.buffer].dtype)
        if data.nbytes != expected:
            raise RuleBroken(f"chunk {chunk} came as {data.nbytes} bytes instead of {expected}")

    def _send_parts(self) -> None:
        for owner, chunk in self.book.next_parts() if self._started else ():
            weight = self.book.weights[self.book.me]
            payload = [self._codecs[chunk].encode(self._slice(self._inputs, chunk))] if weight > 0 else []
            message = Part(self.book.begin.round, chunk, self.book.plan, weight)
            self._send([owner], message, payload, self._name(Carries.PART, chunk) if payload else b"")

    def _reduce(self, chunks: Sequence[int]) -> None:
        for chunk in chunks if self._started else ():
            out, codec = self._slice(self._outputs, chunk), self._codecs[chunk]
            contributions = self._contributions(chunk)
            _weighted_mean(contributions, out)
            if not is_finite(out):
                finite = {key: pair for key, pair in contributions.items() if is_finite(pair[0])}
                for key in contributions:
                    if key not in finite:
                        self._fault(key, f"its chunk {chunk} has values that are not finite (NaN or infinity)")
                _weighted_mean(finite, out)
            encoded = codec.encode(out)
            if codec.lossy:
                out.copy_(codec.decode(encoded, out.dtype, out.numel()))
            self._payloads.pop(chunk, None)
            self.book.reduced(chunk)
            live = [k for k in self.book.keys if k != self.book.me and k not in self.book.out and self.book.receives[k]]
            message = Result(self.book.begin.round, chunk, self.book.plan)
            self._send(live, message, [encoded], self._name(Carries.RESULT, chunk))
            if self.book.receives[self.book.me]:
                self._received(chunk, out)

    def _contributions(self, chunk: int) -> dict[bytes, tuple[torch.Tensor, float]]:
        """(tensor, weight) by member, in member order, so that the sum does not depend on the order of arrival."""
        payloads = self._payloads.get(chunk, {})
        mine = self._slice(self._inputs, chunk)
        contributions = {}
        for key in self.book.keys:
            weight = self.book.weights[key]
            if key == self.book.me and weight > 0 and self.book.receives[key]:
                contributions[key] = (mine, weight)
            elif key in payloads:
                decoded = self._codecs[chunk].decode(payloads[key], mine.dtype, mine.numel())
                contributions[key] = (decoded, weight)
        return contributions

    def _received(self, chunk: int, out: torch.Tensor) -> None:
        self.book.received(chunk, blake3(bytes_of(out)).digest())


def _weighted_mean(contributions: dict[bytes, tuple[torch.Tensor, float]], out: torch.Tensor) -> None:
    """Write the weighted mean into `out`, summed in order, in float32 (float64 for float64); of none, zeros."""
    total = sum(weight for _, weight in contributions.values())
    accumulator = out if out.dtype in (torch.float32, torch.float64) else torch.empty_like(out, dtype=torch.float32)
    if not contributions:
        accumulator.zero_()
    for number, (tensor, weight) in enumerate(contributions.values()):
        if number == 0:
            accumulator.copy_(tensor).mul_(weight / total) if tensor.dtype != accumulator.dtype else torch.mul(
                tensor, weight / total, out=accumulator
            )
        else:
            accumulator.add_(tensor, alpha=weight / total)
    if accumulator is not out:
        out.copy_(accumulator)
