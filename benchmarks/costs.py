"""What one all-reduce of `benchmarks.floor` costs in bytes and operations, and what these cost on this machine alone.

The product is the least CPU time that any implementation with this encryption, these digests and kernel TCP can take
here; divided by the number of cores it is the least time on the wall, with perfect overlap and no core ever idle.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import blake3
import torch
import zmq

from benchmarks.floor import CHUNK

BUFFER = 64  # chunks worked through in turn, so that they come from memory and not from a core's cache
PASSES = 2  # over the buffer
REPEATS = 5


@dataclass(frozen=True)
class Work:
    """Bytes that one peer handles in one all-reduce; each group member does the same."""

    sent: int  # through loopback: contributions of what others own, means of what it owns to all others
    encrypted: int  # the same, and as much is decrypted
    summed: int  # of float32 contributions, its own among them
    hashed: int  # of the averaged vector, as it travels
    converted: int  # of float32 to or from float16


def count(members: int, elements: int, half: bool) -> Work:
    """The work of one of `members` peers that average `elements` float32, on the wire as float16 if `half`."""
    width = 2 if half else 4
    sent = 2 * (members - 1) * elements * width // members
    # Encode what goes to owners and the means; decode contributions received and all means, its own too.
    converted = 4 * ((members - 1) + 1 + (members - 1) + members) * elements // members if half else 0
    return Work(sent, sent, 4 * elements, width * elements, converted)


def _seconds_per_byte(work: Callable[[int], object], bytes_each: int) -> float:
    for index in range(BUFFER):
        work(index)
    started = time.process_time()
    for _ in range(PASSES):
        for index in range(BUFFER):
            work(index)
    return (time.process_time() - started) / (PASSES * BUFFER * bytes_each)


def _tcp_seconds_per_byte(chunk: bytes) -> float:
    """CPU time of both ends of a bare loopback connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    total = PASSES * BUFFER * len(chunk)

    def receive() -> None:
        into, left = bytearray(len(chunk)), total
        while left:
            left -= receiver.recv_into(into)

    with sender, receiver:
        return _transfer_seconds(lambda: sender.sendall(chunk), receive) / total


def _zmq_seconds_per_byte(chunk: bytes, curve: bool) -> float:
    """CPU time of both ends of a ZeroMQ connection over loopback, with its I/O threads."""
    with zmq.Context() as context, context.socket(zmq.PULL) as receiver, context.socket(zmq.PUSH) as sender:
        if curve:
            key, receiver.curve_secretkey = zmq.curve_keypair()
            sender.curve_publickey, sender.curve_secretkey = zmq.curve_keypair()
            receiver.curve_server, sender.curve_serverkey = True, key
        sender.sndhwm = receiver.rcvhwm = 8
        receiver.bind("tcp://127.0.0.1:*")
        sender.connect(receiver.getsockopt_string(zmq.LAST_ENDPOINT))

        def receive() -> None:
            for _ in range(PASSES * BUFFER):
                receiver.recv(copy=False)

        return _transfer_seconds(lambda: sender.send(chunk, copy=False), receive) / (PASSES * BUFFER * len(chunk))


def _transfer_seconds(send: Callable[[], object], receive: Callable[[], None]) -> float:
    thread = threading.Thread(target=receive)
    started = time.process_time()
    thread.start()
    for _ in range(PASSES * BUFFER):
        send()
    thread.join()
    return time.process_time() - started


def unit_costs() -> dict[str, float]:
    """CPU seconds per byte of each field of `Work`, and of ZeroMQ without CURVE; the least of `REPEATS`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        runs = [_measure() for _ in range(REPEATS)]
    finally:
        torch.set_num_threads(threads)
    least = {name: min(run[name] for run in runs) for name in runs[0]}
    # What CURVE adds to the same transport: encrypting and decrypting, with ZeroMQ's own copies for it.
    return least | {"encrypted": least["encrypted"] - least["zeromq"]}


def _measure() -> dict[str, float]:
    size = 4 * CHUNK
    plain = [os.urandom(size) for _ in range(BUFFER)]
    vector, into = torch.randn(BUFFER, CHUNK), torch.zeros(CHUNK)
    halves = torch.empty(BUFFER, CHUNK, dtype=torch.float16)
    return {
        "sent": _tcp_seconds_per_byte(plain[0]),
        "zeromq": _zmq_seconds_per_byte(plain[0], curve=False),
        "encrypted": _zmq_seconds_per_byte(plain[0], curve=True),
        "summed": _seconds_per_byte(lambda i: into.add_(vector[i], alpha=0.25), size),
        "hashed": _seconds_per_byte(lambda i: blake3.blake3(plain[i]).digest(), size),
        "converted": _seconds_per_byte(lambda i: halves[i].copy_(vector[i]), size),
    }


@dataclass(frozen=True)
class Cost:
    """One line of the count: what a peer handles, the price, and the CPU seconds of the whole group."""

    bytes_per_peer: int
    seconds_per_gigabyte: float
    group_cpu_seconds: float


def price(members: int, elements: int, half: bool, units: dict[str, float]) -> dict[str, Cost]:
    """`count` times `units`, by the name of the work."""
    return {
        name: Cost(amount, 1e9 * units[name], members * amount * units[name])
        for name, amount in asdict(count(members, elements, half)).items()
    }
