"""Times lanes against what they are measured by: an all-reduce over bare sealed sockets, run in turn with them.

    python benchmarks/lanes.py --floor ../shared/floors/sealed_sockets.py [--peers 4] [--numel 25000000] [--times 5]

Each peer is a process. Both send the same chunks: parts into scratch, which their reducer sums in order, and results
into the vector. Prints the median seconds of the slowest peer of each, and their ratio. `--hog`: a Python loop holds
the GIL in every peer; `--one-way`: the first peer sends its whole vector to each other one.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import multiprocessing
import os
import queue
import re
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from shoal.flat import bytes_of
from shoal.p2p.identity import PeerID
from shoal.p2p.lane import Arrival, Lane, Lanes
from shoal.p2p.sealing import Keys
from shoal.p2p.tokens import TOKEN_BYTES

PART, RESULT = 0, 1
_MESSAGE = struct.Struct("<BI")
_NAME = struct.Struct("<QQII")  # round, reducer, kind, number of the chunk


def peer_id(rank: int) -> PeerID:
    """The peer of that rank."""
    return PeerID(bytes([rank]) * 32)


class Peer:
    """One process's side of the all-reduce."""

    def __init__(self, rank: int, args: argparse.Namespace, vector: torch.Tensor) -> None:
        self.rank, self.peers, self.chunk, self.vector = rank, args.peers, args.chunk, vector
        self.memory = bytes_of(vector)
        width = -(-args.numel // args.peers)
        self.spans = [(min(i * width, args.numel), min((i + 1) * width, args.numel)) for i in range(args.peers)]
        if args.one_way:
            self.spans = [(0, args.numel)] + [(args.numel,) * 2] * (args.peers - 1)
        self.inbox: queue.SimpleQueue[Arrival | int] = queue.SimpleQueue()
        self.lanes = Lanes(self.inbox.put, lambda peer, reason: None)
        self.lane: dict[int, Lane] = {r: self.lanes.lane(peer_id(r)) for r in range(args.peers) if r != rank}
        self.waiting: dict[int, deque[tuple[int, int]]] = {r: deque() for r in self.lane}
        self.listener = socket.create_server(("127.0.0.1", 0))

    def connect(self, ports: list[int], connections: int) -> None:
        """Lower ranks accept, higher ranks dial."""

        def keys(sender: int, receiver: int, number: int) -> bytes:
            return hashlib.sha256(bytes([sender, receiver, number])).digest()

        def of(other: int, number: int) -> Keys:
            return Keys("aes-256-gcm", keys(self.rank, other, number), keys(other, self.rank, number))

        for other, number in itertools.product(range(self.rank), range(connections)):
            token = bytes([self.rank, number]) + bytes(TOKEN_BYTES - 2)
            self.lane[other].dial(("127.0.0.1", ports[other]), token, of(other, number))
        for _ in range((self.peers - 1 - self.rank) * connections):
            accepted, _address = self.listener.accept()
            token = accepted.recv(TOKEN_BYTES, socket.MSG_WAITALL)
            self.lane[token[0]].accept(accepted, of(token[0], token[1]))

    def _bytes(self, owner: int, number: int) -> tuple[int, int]:
        low = self.spans[owner][0] + number * self.chunk
        return 4 * low, 4 * min(low + self.chunk, self.spans[owner][1])

    def _chunks(self, owner: int) -> range:
        start, end = self.spans[owner]
        return range(-(-(end - start) // self.chunk))

    def register(self, number: int) -> None:
        """All results of this round are waited for."""
        for other in self.lane:
            for chunk in self._chunks(other):
                low, high = self._bytes(other, chunk)
                self.lanes.leases.register(
                    _NAME.pack(number, other, RESULT, chunk), peer_id(other), self.memory[low:high]
                )

    def _send(self, other: int) -> None:
        """Send what is waiting, as far as the window goes."""
        while self.waiting[other]:
            kind, chunk = self.waiting[other][0]
            owner = other if kind == PART else self.rank
            low, high = self._bytes(owner, chunk)
            name, message = _NAME.pack(self.number, owner, kind, chunk), _MESSAGE.pack(kind, chunk)
            if not self.lane[other].send(name, message, self.memory[low:high], lambda: self.inbox.put(other)):
                return
            self.under_way += 1
            self.waiting[other].popleft()

    def all_reduce(self, number: int) -> None:
        """One round."""
        self.number, self.under_way = number, 0
        for other in self.lane:
            self.waiting[other].extend((PART, chunk) for chunk in self._chunks(other))
            self._send(other)
        parts: dict[int, dict[PeerID, Arrival]] = {chunk: {} for chunk in self._chunks(self.rank)}
        left = len(parts) + sum(len(self._chunks(other)) for other in self.lane)
        while left or self.under_way or any(self.waiting.values()):
            arrival = self.inbox.get()
            if isinstance(arrival, int):
                self.under_way -= 1
                self._send(arrival)
                continue
            kind, chunk = _MESSAGE.unpack(arrival.message)
            if kind == RESULT:
                assert arrival.target is not None
                left -= 1
                continue
            parts[chunk][arrival.peer] = arrival
            if len(parts[chunk]) == self.peers - 1:
                low, high = self._bytes(self.rank, chunk)
                mine = self.vector[low // 4 : high // 4]
                for sender in sorted(parts[chunk]):
                    mine.add_(torch.frombuffer(parts[chunk][sender].memory, dtype=torch.float32))
                    parts[chunk].pop(sender).release()
                mine.div_(self.peers)
                left -= 1
                for other in self.lane:
                    self.waiting[other].append((RESULT, chunk))
                    self._send(other)

    def send_all(self, number: int) -> None:
        """The first peer's vector to all others."""
        self.number, self.under_way = number, 0
        left = 0 if self.rank == 0 else len(self._chunks(0))
        if self.rank == 0:
            for other in self.lane:
                self.waiting[other].extend((RESULT, chunk) for chunk in self._chunks(0))
                self._send(other)
        while left or self.under_way or any(self.waiting.values()):
            arrival = self.inbox.get()
            if isinstance(arrival, int):
                self.under_way -= 1
                self._send(arrival)
            else:
                left -= 1


def work(rank: int, args: argparse.Namespace, pipe: Connection, barrier: Barrier) -> None:
    """One peer."""
    torch.set_num_threads(1)
    base = torch.randn(args.numel, generator=torch.Generator().manual_seed(0))
    vector = torch.empty(args.numel)
    peer = Peer(rank, args, vector)
    pipe.send(peer.listener.getsockname()[1])
    peer.connect(pipe.recv(), args.connections)
    if args.hog:
        threading.Thread(target=lambda: [i * i for i in itertools.count() if i < 0], daemon=True).start()
    seconds, cpu = [], []
    for number in range(args.rounds + 2):
        torch.mul(base, rank + 1.0, out=vector)
        peer.register(number)
        barrier.wait()
        started, busy = time.perf_counter(), time.process_time()
        peer.send_all(number) if args.one_way else peer.all_reduce(number)
        seconds.append(time.perf_counter() - started)
        barrier.wait()
        cpu.append(time.process_time() - busy)
    error = (vector - base * (1 if args.one_way else (args.peers + 1) / 2)).abs().max().item()
    pipe.send((seconds[2:], sum(cpu[2:]) / args.rounds, error, hashlib.sha256(peer.memory).hexdigest()))
    barrier.wait()
    peer.lanes.close()
    peer.listener.close()


def lanes(args: argparse.Namespace) -> float:
    """The median seconds of a round over lanes."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(args.peers)
    pipes, processes = [], []
    for rank in range(args.peers):
        here, there = context.Pipe()
        processes.append(context.Process(target=work, args=(rank, args, there, barrier), daemon=True))
        pipes.append(here)
        processes[-1].start()
    ports = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send(ports)
    times, cpu, errors, digests = zip(*(pipe.recv() for pipe in pipes), strict=True)
    for process in processes:
        process.join()
    slowest = [max(row) for row in zip(*times, strict=True)]
    print(
        f"  lanes: median {statistics.median(slowest):.3f} s [{min(slowest):.3f}..{max(slowest):.3f}], "
        f"CPU {sum(cpu):.2f} s a round, same digests {len(set(digests)) == 1}, largest error {max(errors):.1e}",
        flush=True,
    )
    return float(statistics.median(slowest))


def floor(args: argparse.Namespace) -> float:
    """The median seconds of a round over bare sealed sockets."""
    command = [sys.executable, args.floor]
    for name in ("peers", "numel", "rounds", "chunk"):
        command += [f"--{name}", str(getattr(args, name))]
    command += ["--hog"] * args.hog + ["--one-way"] * args.one_way
    before = os.times()
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    after = os.times()
    busy = after.children_user + after.children_system - before.children_user - before.children_system
    print(f"  floor: {said} (CPU {busy:.1f} s in all)", flush=True)
    found = re.search(r"median ([0-9.]+) s", said)
    assert found is not None
    return float(found[1])


def main() -> None:
    """Run both in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--floor", help="path of sealed_sockets.py; without it, lanes alone are timed")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--numel", type=int, default=25_000_000)
    parser.add_argument("--rounds", type=int, default=7, help="of each run")
    parser.add_argument("--times", type=int, default=3, help="runs of each")
    parser.add_argument("--chunk", type=int, default=1 << 18, help="elements")
    parser.add_argument("--connections", type=int, default=1, help="of a lane")
    parser.add_argument("--hog", action="store_true")
    parser.add_argument("--one-way", action="store_true")
    args = parser.parse_args()
    pairs = [(floor(args) if args.floor else float("nan"), lanes(args)) for _ in range(args.times)]
    bare, ours = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(
        f"{args.peers} peers x {args.numel:,} float32: lanes {ours:.3f} s, floor {bare:.3f} s: {ours / bare:.2f} times"
    )


if __name__ == "__main__":
    main()
