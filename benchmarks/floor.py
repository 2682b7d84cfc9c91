"""The floor: the least that an encrypted butterfly all-reduce on ZeroMQ costs, with nothing of Shoal in it.

Each peer owns an even span of the chunks. It sends each chunk to its owner, who sums the contributions in member order
when all have come, hashes the mean and sends it back to all. Send, reduce and receive overlap; at most `WINDOW` chunks
are on their way to one owner. There is no discovery, no flow control beyond that, no failure handling and no commit:
what a library takes longer than this, it takes for those. `benchmarks.costs` counts what the work costs alone.
"""

from __future__ import annotations

import struct
import time

import blake3
import torch
import zmq

from benchmarks.workers.link import bytes_of

CHUNK = 1 << 18  # elements: 1 MiB of float32
WINDOW = 8  # chunks on their way to one owner
TIMEOUT = 30.0  # seconds for one all-reduce
HEADER = struct.Struct("<BBI")  # kind, sender, chunk
CONTRIBUTION, MEAN = 0, 1


class BarePeer:
    """One member; averages `vector` (float32, one-dimensional, on the CPU) in place, sent as float16 if `half`."""

    def __init__(self, vector: torch.Tensor, half: bool) -> None:
        self._vector = vector
        self._memory = bytes_of(vector)
        self._half = half
        self._context = zmq.Context(io_threads=2)
        self._public, self._secret = zmq.curve_keypair()
        self._router = self._socket(zmq.ROUTER)
        self._dealers: dict[int, zmq.Socket[bytes]] = {}
        self._scratch = torch.empty(CHUNK)
        self._chunks = -(-vector.numel() // CHUNK)
        self.bytes_sent = self.bytes_received = 0  # payload of the last all-reduce

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.curve_publickey, socket.curve_secretkey = self._public, self._secret
        socket.sndhwm = socket.rcvhwm = 0  # WINDOW bounds the queues
        socket.linger = 0
        return socket

    def listen(self) -> str:
        """Binds a free port of loopback and returns "endpoint key" for `dial`."""
        self._router.curve_server = True
        self._router.bind("tcp://127.0.0.1:*")
        return f"{self._router.getsockopt_string(zmq.LAST_ENDPOINT)} {self._public.decode()}"

    def dial(self, rank: int, addresses: list[str]) -> None:
        """Connects to all others; `addresses` are what each member's `listen` returned, in member order."""
        self._rank, self._size = rank, len(addresses)
        self._bounds = [round(member * self._chunks / self._size) for member in range(self._size + 1)]
        for member, address in enumerate(addresses):
            if member != rank:
                endpoint, key = address.split()
                dealer = self._socket(zmq.DEALER)
                dealer.curve_serverkey = key.encode()
                dealer.connect(endpoint)
                self._dealers[member] = dealer

    def allreduce(self) -> None:
        """Replaces the vector by the members' mean; all must call it, and none again before all have returned."""
        self._next = {member: self._bounds[member] for member in self._dealers}  # first chunk not yet sent to its owner
        self._parts: dict[int, dict[int, zmq.Frame]] = {}
        self._done = 0
        self.bytes_sent = self.bytes_received = 0
        for _ in range(WINDOW):
            for step in range(1, self._size):  # not all to the same owner first
                self._contribute((self._rank + step) % self._size)
        deadline = time.monotonic() + TIMEOUT
        while self._done < self._chunks:
            if not self._router.poll(max(0, int(1000 * (deadline - time.monotonic())))):
                raise TimeoutError(f"{self._done} of {self._chunks} chunks in {TIMEOUT} s")
            self._drain()

    def _drain(self) -> None:
        """Takes all that is queued: one wake-up then serves many chunks, also when another thread holds the GIL."""
        while True:
            try:
                _, header, frame = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            kind, sender, chunk = HEADER.unpack(header.buffer)
            self.bytes_received += len(frame)
            if kind == CONTRIBUTION:
                parts = self._parts.setdefault(chunk, {})
                parts[sender] = frame
                if len(parts) == self._size - 1:
                    self._reduce(chunk, self._parts.pop(chunk))
            else:
                self._accept(chunk, frame)
                self._contribute(sender)

    def _span(self, chunk: int) -> slice:
        return slice(chunk * CHUNK, min(self._vector.numel(), (chunk + 1) * CHUNK))

    def _encoded(self, chunk: int) -> memoryview | bytearray:
        """The chunk as it travels: the vector's own memory, or a new buffer of float16."""
        span = self._span(chunk)
        if not self._half:
            return self._memory[4 * span.start : 4 * span.stop]
        buffer = bytearray(2 * (span.stop - span.start))
        torch.frombuffer(buffer, dtype=torch.float16).copy_(self._vector[span])
        return buffer

    def _decoded(self, frame: zmq.Frame) -> torch.Tensor:
        return torch.frombuffer(frame.buffer, dtype=torch.float16 if self._half else torch.float32)

    def _send(self, member: int, kind: int, chunk: int, payload: memoryview | bytearray) -> None:
        # Without a copy: the vector's chunk is written again only when its mean has come, so its owner has read it.
        self._dealers[member].send_multipart([HEADER.pack(kind, self._rank, chunk), payload], copy=False)
        self.bytes_sent += len(payload)

    def _contribute(self, owner: int) -> None:
        chunk = self._next[owner]
        if chunk < self._bounds[owner + 1]:
            self._next[owner] = chunk + 1
            self._send(owner, CONTRIBUTION, chunk, self._encoded(chunk))

    def _reduce(self, chunk: int, parts: dict[int, zmq.Frame]) -> None:
        own = self._vector[self._span(chunk)]
        mean = self._scratch[: own.numel()].zero_()
        for member in range(self._size):
            mean.add_(own if member == self._rank else self._decoded(parts[member]), alpha=1 / self._size)
        own.copy_(mean)
        payload = self._encoded(chunk)
        if self._half:
            own.copy_(torch.frombuffer(payload, dtype=torch.float16))  # what the others will hold
        for member in self._dealers:
            self._send(member, MEAN, chunk, payload)
        blake3.blake3(payload).digest()
        self._done += 1

    def _accept(self, chunk: int, frame: zmq.Frame) -> None:
        self._vector[self._span(chunk)].copy_(self._decoded(frame))
        blake3.blake3(frame.buffer).digest()
        self._done += 1

    def close(self) -> None:
        """Closes all sockets at once, whatever they still hold."""
        self._context.destroy(linger=0)
