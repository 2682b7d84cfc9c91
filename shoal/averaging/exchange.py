"""The all-reduce of a round: it sends the parts of flat vectors, sums them, and writes the averages to flat memory.

The work per byte: in a round of N bytes and n members with equal spans, each member encodes, sends, receives and
decodes 2(n-1)/n N bytes, writes its span once and reads it n times, and hashes N bytes. Uncompressed averages are
received directly into the output. With error feedback, each member also adds its residual to its part, and decodes the
part that it sends: see `residual`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import torch
from blake3 import blake3

from shoal.averaging.residual import Errors, Residual
from shoal.compression import Codec, CodecPlan, NoCompression
from shoal.flat import BufferSpec, FlatBuffer, Layout, bytes_of, is_finite
from shoal.p2p.identity import PeerID
from shoal.p2p.leases import Expected, Leases
from shoal.swarm.protocol.book import Book, RuleBroken, require
from shoal.swarm.protocol.contribution import Fault, Outcome, SendTo
from shoal.swarm.protocol.messages import Begin, Carries, Part, Repair, Result, Source, name_of
from shoal.swarm.protocol.plan import ChunkSpan, chunk_table

Flat = Sequence[torch.Tensor]


class Exchange:
    """One member's side of the all-reduce of one round.

    Args:
        vectors: the vectors that the round averages, concatenated. Their inputs are only read; their outputs hold the
            average when `book.complete`.
        me: the key of this member.
        begin: describes the round.
        send: sends a message with buffers to members.
        fault: called with the key of a member that broke a rule, and the reason.

    Attributes:
        book: who owes which chunk to whom.
        progressed: a counter that grows with everything that arrives.
        encoded: see `BytesExchange`.

    Raises:
        RuleBroken: if the plan of the round does not fit the vector.
    """

    def __init__(self, vectors: Sequence[Vector], me: bytes, begin: Begin, send: SendTo, fault: Fault) -> None:
        self._inputs = [flat for vector in vectors for flat in vector.inputs.flat]
        self._outputs = [flat for vector in vectors for flat in vector.outputs.flat]
        try:
            chunks = chunk_table([tensor.numel() for tensor in self._inputs], begin.chunk_elements)
        except ValueError as error:
            raise RuleBroken(str(error)) from error
        divided = f"BEGIN divides {begin.starts[-1]} chunks; the vector has {len(chunks)}"
        require(begin.starts[-1] == len(chunks), divided)
        self.book, self.progressed = Book(me, begin, chunks), 0
        codecs = sum((vector.codecs for vector in vectors), CodecPlan((), 0))
        self._codecs = self._result_codecs = _codecs_of(codecs, chunks)
        if codecs.results is not codecs:
            self._result_codecs = _codecs_of(codecs.results, chunks)
        self._errors = Errors([residual for vector in vectors for residual in vector.residuals], self.book)
        self._send, self._fault = send, fault
        self._started = False
        self._expected = Expected(Leases())  # output memory into which chunks are received directly
        self._payloads: dict[int, dict[bytes, memoryview]] = {}
        self.encoded: dict[int, bytes] | None = None
        for vector in vectors:
            vector.opened(self._errors)

    def start(self, weight: float, leases: Leases) -> None:
        """Send the first parts, and reduce the chunks that are ready. Before this call the input is not read, and the
        output is not written.

        Args:
            weight: the weight of the input; it may differ from the one in BEGIN.
            leases: the table in which output memory is registered for chunks that are to arrive.
        """
        self.book.weights[self.book.me] = weight
        self._started, self._expected.leases = True, leases
        self._expect_results()
        self._reduce(self.book.put_out(()))
        self._send_parts()

    def part(self, sender: bytes, part: Part, buffers: Sequence[memoryview]) -> None:
        """Another member's part of one of this peer's chunks has arrived.

        Raises:
            RuleBroken: if the part breaks the rules of the round.
        """
        chunk = part.chunk
        require(len(buffers) <= 1, f"a part with {len(buffers)} payloads")
        if sender in self.book.weights and bool(buffers) != (part.weight > 0):
            raise RuleBroken(f"chunk {chunk} {'has' if buffers else 'lacks'} a payload, against its weight")
        if not self.book.part_arrived(sender, chunk, part.plan, part.weight):
            return
        if buffers:
            self._check_size(chunk, buffers[0], self._codecs[chunk])
            # The user may delay `start` for long. Until then parts are copied, so that they do not occupy the memory
            # into which chunks are received.
            payload = buffers[0] if self._started else memoryview(bytearray(buffers[0]))
            self._payloads.setdefault(chunk, {})[sender] = payload
        self.progressed += 1
        if self.book.is_ready(chunk):
            self._reduce([chunk])

    def result(self, sender: bytes, result: Result, buffers: Sequence[memoryview]) -> None:
        """The average of a chunk has arrived.

        Raises:
            RuleBroken: if the result breaks the rules of the round.
        """
        chunk = result.chunk
        if self.book.result_arrived(sender, chunk, result.plan):
            require(len(buffers) == 1, f"a result with {len(buffers)} payloads")
            self._check_size(chunk, buffers[0], self._result_codecs[chunk])
            self.progressed += 1
            in_place, out = self._expected.stop(chunk), self._slice(self._outputs, chunk)
            if not in_place:
                out.copy_(self._decoded(chunk, buffers[0], f"the result of chunk {chunk} can't be decoded"))
                self._keep_encoded(chunk, buffers[0])
            self._received(chunk, out)
        self._send_parts()

    def put_out(self, keys: Sequence[bytes]) -> None:
        """Continue without these members."""
        self._reduce(self.book.put_out(keys))

    def repair(self, repair: Repair) -> list[Source]:
        """Follow a REPAIR, the coordinator's new plan after a loss.

        Returns:
            The chunks to fetch.

        Raises:
            RuleBroken: if it does not fit the round.
        """
        fetches, ready = self.book.repair(repair)
        for source in repair.sources:
            self._expected.stop(source.chunk)
        self._expect_results()
        self._reduce(ready)
        self._send_parts()
        return fetches

    def await_fetched(self, chunk: int, holder: bytes, leases: Leases) -> None:
        """Register the output memory of a chunk in `leases`: this peer is about to ask that holder for the chunk."""
        self._expected.leases = leases
        self._expect(chunk, holder, Carries.FETCHED)

    def fetched(self, chunk: int, digest: bytes, data: memoryview) -> None:
        """A chunk that this peer has asked a holder for has arrived.

        Args:
            chunk: its number.
            digest: the digest that the chunk must have.
            data: the bytes of the chunk, or the result as its reducer has encoded it. Their sizes differ.

        Raises:
            RuleBroken: if it does not have that digest.
        """
        if self.encoded is not None:
            self.encoded.pop(chunk, None)  # of an earlier version of the chunk
        values, wrong = self._slice(self._outputs, chunk), f"chunk {chunk} is not the one that was committed"
        if data.nbytes != bytes_of(values).nbytes:
            data = bytes_of(torch.empty_like(values).copy_(self._decoded(chunk, data, wrong)))
        in_place, out = self._expected.stop(chunk), bytes_of(values)
        # If two holders were asked because the first was late, the output memory may have received the other's bytes.
        in_place = in_place and blake3(out).digest() == digest
        if data.nbytes != out.nbytes or not (in_place or blake3(data).digest() == digest):
            raise RuleBroken(wrong)
        if not in_place:
            out[:] = data
        self.progressed += 1
        self.book.received(chunk, digest)

    def _decoded(self, chunk: int, payload: memoryview, wrong: str) -> torch.Tensor:
        """The average of a chunk, from its encoded form. Raises RuleBroken, which says `wrong`, if it has none."""
        out, codec = self._slice(self._outputs, chunk), self._result_codecs[chunk]
        try:
            return codec.decode(payload, out.dtype, out.numel())
        except ValueError as error:
            raise RuleBroken(f"{wrong}: {error}") from error

    def _keep_encoded(self, chunk: int, payload: memoryview) -> None:
        """Keep that payload for the redo log, if it is wanted and the payload differs from the chunk's own bytes."""
        if self.encoded is not None and payload.nbytes != self.chunk_bytes(chunk).nbytes:
            self.encoded[chunk] = bytes(payload)

    def close(self) -> None:
        """Stop: chunks that still arrive are not written to the output."""
        self._expected.close()

    def chunk_bytes(self, chunk: int) -> memoryview:
        """The average of a chunk that this member holds, uncompressed."""
        return bytes_of(self._slice(self._outputs, chunk))

    # -- inside

    def _slice(self, tensors: Flat, chunk: int) -> torch.Tensor:
        span = self.book.chunks[chunk]
        return tensors[span.buffer][span.start : span.stop]

    def _name(self, carries: Carries, chunk: int) -> bytes:
        return name_of(self.book.begin.round, carries, chunk)

    def _expect(self, chunk: int, source: bytes, carries: Carries) -> None:
        """Let an uncompressed chunk be received directly into the output, from that peer only."""
        out = self._slice(self._outputs, chunk)
        if out.dtype is not torch.bool:  # a byte may be no valid bool
            self._expected.expect(chunk, self._name(carries, chunk), PeerID(source), bytes_of(out))

    def _expect_results(self) -> None:
        for chunk, owner in self.book.awaited.items() if self._started else ():
            if isinstance(self._result_codecs[chunk], NoCompression) and chunk not in self._expected:
                self._expect(chunk, owner, Carries.RESULT)

    def _check_size(self, chunk: int, data: memoryview, codec: Codec) -> None:
        span = self.book.chunks[chunk]
        expected = codec.encoded_nbytes(span.stop - span.start, self._outputs[span.buffer].dtype)
        require(data.nbytes == expected, f"chunk {chunk} came as {data.nbytes} bytes instead of {expected}")

    def _send_parts(self) -> None:
        for owner, chunk in self.book.next_parts() if self._started else ():
            weight = self.book.weights[self.book.me]
            payload = [self._encoded(chunk, owner)] if weight > 0 else []
            message = Part(self.book.begin.round, chunk, self.book.plan, weight)
            self._send([owner], message, payload, self._name(Carries.PART, chunk) if payload else b"")

    def _encoded(self, chunk: int, reducer: bytes) -> memoryview:
        """This member's part of a chunk, encoded for that reducer."""
        part, codec = self._part(chunk), self._codecs[chunk]
        if not self._errors.keeps(chunk):
            return codec.encode(part)
        narrow = part.to(self._slice(self._inputs, chunk).dtype)
        encoded = codec.encode(narrow)
        decoded = codec.decode(encoded, narrow.dtype, narrow.numel())
        # Not in place: the payload may share the part's memory.
        self._errors.sent(chunk, part - decoded, reducer)
        return encoded

    def _part(self, chunk: int) -> torch.Tensor:
        """This member's part of a chunk, before it is encoded."""
        mine = self._slice(self._inputs, chunk)
        return self._errors.corrected(chunk, mine) if self._errors.keeps(chunk) else mine

    def _reduce(self, chunks: Sequence[int]) -> None:
        book = self.book
        for chunk in chunks if self._started else ():
            out, codec = self._slice(self._outputs, chunk), self._result_codecs[chunk]
            contributions = self._contributions(chunk)
            keeps = self._errors.keeps(chunk)
            mean = torch.empty_like(out, dtype=_wide(out.dtype)) if keeps else out
            _weighted_mean(contributions, mean)
            if not is_finite(mean):
                finite = {key: pair for key, pair in contributions.items() if is_finite(pair[0])}
                for key in [key for key in contributions if key not in finite]:
                    self._fault(key, f"its chunk {chunk} has values that are not finite (NaN or infinity)")
                contributions = finite
                _weighted_mean(contributions, mean)
            if mean is not out:
                out.copy_(mean)
            encoded = codec.encode(out)
            if codec.lossy:
                out.copy_(codec.decode(encoded, out.dtype, out.numel()))
            self._keep_encoded(chunk, encoded)
            self._payloads.pop(chunk, None)
            book.reduced(chunk)
            message = Result(book.begin.round, chunk, book.plan)
            self._send(book.recipients(), message, [encoded], self._name(Carries.RESULT, chunk))
            if book.receives[book.me]:
                self._received(chunk, out)
            if keeps and book.me in contributions:
                weights = [weight for _, weight in contributions.values()]
                self._errors.reduced(chunk, mean.sub_(out), book.digests[chunk], book.weights[book.me], weights)

    def _contributions(self, chunk: int) -> dict[bytes, tuple[torch.Tensor, float]]:
        """(tensor, weight) by member, in member order, so that the sum does not depend on the order of arrival."""
        book, codec, mine = self.book, self._codecs[chunk], self._slice(self._inputs, chunk)
        tensors: dict[bytes, torch.Tensor] = {}
        for key, payload in self._payloads.get(chunk, {}).items():
            if key in book.parted:
                continue
            try:
                tensors[key] = codec.decode(payload, mine.dtype, mine.numel())
            except ValueError as error:
                self._fault(key, f"its chunk {chunk} can't be decoded: {error}")
        if book.weights[book.me] > 0 and book.receives[book.me]:
            tensors[book.me] = self._part(chunk)
        return {key: (tensors[key], book.weights[key]) for key in book.keys if key in tensors}

    def _received(self, chunk: int, out: torch.Tensor) -> None:
        self.book.received(chunk, blake3(bytes_of(out)).digest())


def _weighted_mean(contributions: dict[bytes, tuple[torch.Tensor, float]], out: torch.Tensor) -> None:
    """Write the weighted mean into `out`. The sum is in order, in float32 (float64 for float64). Without contributions
    the mean is 0."""
    total = sum(weight for _, weight in contributions.values())
    accumulator = out if out.dtype is _wide(out.dtype) else torch.empty_like(out, dtype=torch.float32)
    if not contributions:
        accumulator.zero_()
    for number, (tensor, weight) in enumerate(contributions.values()):
        if number > 0:
            accumulator.add_(tensor, alpha=weight / total)
        elif tensor.dtype == accumulator.dtype:
            torch.mul(tensor, weight / total, out=accumulator)  # one pass instead of two
        else:
            accumulator.copy_(tensor).mul_(weight / total)
    if accumulator is not out:
        out.copy_(accumulator)


def _codecs_of(plan: CodecPlan, chunks: Sequence[ChunkSpan]) -> list[Codec]:
    return [plan.codec_of(chunk.buffer, chunk.start, chunk.stop) for chunk in chunks]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are summed."""
    return torch.float64 if dtype is torch.float64 else torch.float32


class Vector:
    """A vector that rounds average, or a section of one. Inputs and outputs are separate memory, so a round that fails
    changes no input. Memory is allocated on first use.

    Args:
        layout: the layout of the vector, on the host.
        codecs: how the tensors are encoded.
        pinned: allocate the inputs in page-locked memory, which a GPU can access directly.
        error_feedback: the share of the residual that is added to this peer's next parts: over 0 and at most 1, or None
            for no error feedback (see `residual`). The residual takes 4 bytes per element of host memory from the
            first round on, and as much again from the first part of a round until `settle` or the next round. The
            caller calls `settle` after each round whose result it uses.

    Attributes:
        layout, codecs, error_feedback: as given.
        sizes: the number of elements of each flat buffer.

    Raises:
        ValueError: if `error_feedback` is out of range.
    """

    def __init__(
        self, layout: Layout, codecs: CodecPlan, *, pinned: bool = False, error_feedback: float | None = None
    ) -> None:
        is_number = isinstance(error_feedback, int | float) and not isinstance(error_feedback, bool)
        if error_feedback is not None and not (is_number and 0 < error_feedback <= 1):
            raise ValueError(f"error_feedback={error_feedback!r}: give a number over 0 and at most 1, or None for none")
        self.layout, self.sizes, self.codecs, self._pinned = layout, layout.sizes, codecs, pinned
        self.error_feedback = error_feedback
        self._errors: Errors | None = None  # of the last round, with error feedback

    @cached_property
    def inputs(self) -> FlatBuffer:
        """The inputs of this peer."""
        return FlatBuffer(self.layout, pinned=self._pinned)

    @cached_property
    def outputs(self) -> FlatBuffer:
        """The average."""
        return FlatBuffer(self.layout)

    @cached_property
    def residuals(self) -> list[Residual | None]:
        """The residual of each flat buffer; None without error feedback, and for a buffer that is not of floating
        point."""
        beta = self.error_feedback

        def of(buffer: BufferSpec) -> Residual | None:
            if beta is None or not buffer.dtype.is_floating_point:
                return None
            return Residual(torch.zeros(buffer.numel, dtype=torch.float32, device="cpu"), beta)

        return list(map(of, self.layout.buffers))

    def read_from(self, memory: FlatBuffer) -> None:
        """Take that memory for the inputs, if it has the layout of the vector."""
        if memory.layout == self.layout:
            self.inputs = memory

    def use_local(self) -> None:
        """Take this peer's inputs as the average, because there was no round."""
        for output, mine in zip(self.outputs.flat, self.inputs.flat, strict=True):
            output.copy_(mine)

    def opened(self, errors: Errors) -> None:
        """A round of this vector has begun, which leaves these errors. The vector forgets those of the round before,
        unless it was the same round, which this peer has missed."""
        if self.error_feedback is not None:
            earlier, self._errors = self._errors, errors
            if earlier is not None and earlier.round == errors.round:
                errors.take_over(earlier)

    def settle(self, outcome: Outcome) -> None:
        """The result of that round is used. With error feedback, the errors of the round become the residual."""
        errors, self._errors = self._errors, None
        if errors is not None and errors.round == outcome.begin.round:
            errors.settle()


def encoded_bytes(parts: Iterable[Vector]) -> float:
    """The encoded size of an element of these vectors in bytes, on average over all elements, and over parts and
    results. 4 if there are no elements."""
    nbytes = elements = 0
    for part in parts:
        for span in (*part.codecs.spans, *part.codecs.results.spans):
            count, dtype = span.stop - span.start, part.layout.buffers[span.buffer].dtype
            nbytes, elements = nbytes + span.codec.encoded_nbytes(count, dtype), elements + count
    return nbytes / elements if elements else 4.0
