"""The measure of what travels between peers: blocking sockets in threads, each chunk sealed with AES-256-GCM.

One connection for each pair, one key that everybody knows. There is no discovery, no handshake, no flow control, no
failure handling, no digest and no commit: what a library takes longer than this, it takes for those.
"""

from __future__ import annotations

import itertools
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from functools import partial
from queue import Empty, SimpleQueue

import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from benchmarks.workers.link import bytes_of

CHUNK = 1 << 18  # elements: 1 MiB of float32
PART, RESULT = 0, 1
_HEADER = struct.Struct("<BI")  # kind, number of the chunk
_NONCE = struct.Struct("<IQ")  # rank of the sender, how many frames it has sealed before
_TAG_BYTES = 16

Arrival = tuple[int, int, int, memoryview]  # kind, number of the chunk, rank of the sender, the memory that it is in


def _receive(connection: socket.socket, memory: memoryview | bytearray) -> bool:
    """Fills the memory; False if the connection ends before."""
    return connection.recv_into(memory, len(memory), socket.MSG_WAITALL) == len(memory)


def _start(targets: Iterable[Callable[[], None]]) -> list[threading.Thread]:
    threads = [threading.Thread(target=target) for target in targets]
    for thread in threads:
        thread.start()
    return threads


class SealedPeer:
    """One of the peers that share a vector.

    Args:
        vector: float32, one-dimensional, on the CPU; of equal length everywhere.
        chunk: elements that are sent at a time.
        one_owner: whether the first peer owns all of the vector, for `broadcast`, or each peer an even span of it.
    """

    def __init__(self, vector: torch.Tensor, chunk: int = CHUNK, one_owner: bool = False) -> None:
        self._vector, self._memory = vector, bytes_of(vector)
        self._chunk, self._one_owner = chunk, one_owner
        self._cipher = AESGCM(bytes(32))
        self._sealed = itertools.count()  # next() of a count is atomic
        self._scratch: SimpleQueue[memoryview] = SimpleQueue()
        self._arrivals: SimpleQueue[Arrival] = SimpleQueue()
        self._connections: dict[int, socket.socket] = {}
        self._locks: dict[int, threading.Lock] = {}
        self._readers: list[threading.Thread] = []

    def listen(self) -> int:
        """Listens on loopback; returns the port."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        return int(self._listener.getsockname()[1])

    def connect(self, rank: int, ports: list[int]) -> None:
        """Dials those before `rank` and accepts those after it; `ports` are what each peer's `listen` returned."""
        self._rank, self._peers = rank, len(ports)
        length = self._vector.numel()
        width = length if self._one_owner else -(-length // self._peers)
        self._spans = [(min(i * width, length), min((i + 1) * width, length)) for i in range(self._peers)]
        for other in range(rank):
            self._connections[other] = socket.create_connection(("127.0.0.1", ports[other]))
            self._connections[other].sendall(bytes([rank]))
        for _ in range(rank + 1, self._peers):
            accepted, _address = self._listener.accept()
            self._connections[accepted.recv(1)[0]] = accepted
        for other, connection in self._connections.items():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._locks[other] = threading.Lock()
            self._readers.append(threading.Thread(target=self._read, args=(other, connection), daemon=True))
            self._readers[-1].start()

    def all_reduce(self) -> None:
        """Replaces the vector by the peers' mean; all must call it."""
        means: dict[int, SimpleQueue[int]] = {other: SimpleQueue() for other in self._connections}

        def send_parts(owner: int) -> None:
            for number in self._chunks(owner):
                self._send(owner, PART, owner, number)

        def send_means(other: int) -> None:
            for _ in self._chunks(self._rank):
                self._send(other, RESULT, self._rank, means[other].get())

        senders = _start(partial(send, other) for send in (send_parts, send_means) for other in self._connections)
        parts: dict[int, dict[int, memoryview]] = {number: {} for number in self._chunks(self._rank)}
        left = sum(len(self._chunks(owner)) for owner in range(self._peers))
        while left:
            kind, number, sender, memory = self._arrivals.get()
            if kind == PART:
                parts[number][sender] = memory
                if len(parts[number]) < self._peers - 1:
                    continue
                self._reduce(number, parts.pop(number))
                for queue in means.values():
                    queue.put(number)
            left -= 1
        for thread in senders:
            thread.join()

    def broadcast(self) -> None:
        """Replaces the vector by the first peer's, who is the one owner; all must call it."""
        if self._rank > 0:
            for _ in self._chunks(0):
                self._arrivals.get()
            return

        def send_all(other: int) -> None:
            for number in self._chunks(0):
                self._send(other, RESULT, 0, number)

        for sender in _start(partial(send_all, other) for other in self._connections):
            sender.join()

    def close(self) -> None:
        """Ends all connections."""
        self._listener.close()
        for connection in self._connections.values():
            connection.shutdown(socket.SHUT_RDWR)  # close() alone does not wake its reader
        for reader in self._readers:
            reader.join()
        for connection in self._connections.values():
            connection.close()

    def _chunks(self, owner: int) -> range:
        start, end = self._spans[owner]
        return range(-(-(end - start) // self._chunk))

    def _slice(self, owner: int, number: int) -> slice:
        start, end = self._spans[owner]
        low = start + number * self._chunk
        return slice(low, min(low + self._chunk, end))

    def _bytes(self, owner: int, number: int) -> memoryview:
        span = self._slice(owner, number)
        return self._memory[4 * span.start : 4 * span.stop]

    def _borrow(self) -> memoryview:
        try:
            return self._scratch.get_nowait()
        except Empty:
            return memoryview(bytearray(4 * self._chunk + _TAG_BYTES + _NONCE.size))

    def _send(self, receiver: int, kind: int, owner: int, number: int) -> None:
        plain, scratch = self._bytes(owner, number), self._borrow()
        end = len(plain) + _TAG_BYTES
        nonce = _NONCE.pack(self._rank, next(self._sealed))
        self._cipher.encrypt_into(nonce, plain, None, scratch[:end])
        scratch[end : end + _NONCE.size] = nonce
        with self._locks[receiver]:
            self._connections[receiver].sendmsg([_HEADER.pack(kind, number)], [], socket.MSG_MORE)
            self._connections[receiver].sendall(scratch[: end + _NONCE.size])
        self._scratch.put(scratch)

    def _read(self, sender: int, connection: socket.socket) -> None:
        header = bytearray(_HEADER.size)
        while _receive(connection, header):
            kind, number = _HEADER.unpack(header)
            place = self._bytes(sender if kind == RESULT else self._rank, number)
            end = len(place) + _TAG_BYTES
            sealed = self._borrow()
            if not _receive(connection, sealed[: end + _NONCE.size]):
                return
            memory = place if kind == RESULT else self._borrow()
            nonce = sealed[end : end + _NONCE.size]
            self._cipher.decrypt_into(nonce, sealed[:end], None, memory[: len(place)])
            self._scratch.put(sealed)
            self._arrivals.put((kind, number, sender, memory))

    def _reduce(self, number: int, parts: dict[int, memoryview]) -> None:
        mean = self._vector[self._slice(self._rank, number)]
        for sender in sorted(parts):
            mean.add_(torch.frombuffer(parts[sender], dtype=torch.float32, count=len(mean)))
            self._scratch.put(parts[sender])
        mean.div_(self._peers)
