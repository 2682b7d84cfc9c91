"""Why ZeroMQ is driven from the asyncio loop: what its messages wait for while the trainer holds the GIL.

Another process sends to a CURVE socket of this one, which is driven in two ways: (a) `loop.add_reader` on the socket's
descriptor, drained at each wake-up, as `shoal.p2p` does; (b) a thread that blocks in `recv` and hands each message over
with `call_soon_threadsafe`. Each once while the main thread sleeps, once while it runs pure Python. Printed are

- latency: from the other process's send to the callback on the loop, of single small messages (median and 99 %),
- burst: from the first of 100 messages of 1 MiB to the last one's callback (median).

    python benchmarks/gil.py [--events 300] [--bursts 5]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import struct
import sys
import threading
import time
from collections.abc import Callable

import zmq

BURST, SIZE = 100, 1 << 20
PAUSE = 0.004  # seconds between two single messages
_STAMP = struct.Struct("=d")  # time.monotonic() of the sender: one clock for all processes of a machine


def send(port: int, server_key: bytes, events: int, bursts: int) -> None:
    """The other process: single messages, then bursts, each burst when the one before it was received."""
    public, secret = zmq.curve_keypair()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.curve_publickey, dealer.curve_secretkey, dealer.curve_serverkey = public, secret, server_key
        dealer.connect(f"tcp://127.0.0.1:{port}")
        payload = bytes(SIZE)
        dealer.send(_STAMP.pack(time.monotonic()))
        dealer.recv()
        for _ in range(events):
            time.sleep(PAUSE)
            dealer.send(_STAMP.pack(time.monotonic()))
        for _ in range(bursts):
            start = _STAMP.pack(time.monotonic())
            for _ in range(BURST):
                dealer.send_multipart([start, payload])
            dealer.recv()


async def by_reader(router: zmq.Socket[bytes], on_message: Callable[[list[zmq.Frame]], None]) -> Callable[[], None]:
    """Way (a); returns what ends it."""
    loop = asyncio.get_running_loop()

    def drain() -> None:
        for _ in range(64):
            try:
                frames = router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            on_message(frames)
        loop.call_soon(drain)

    loop.add_reader(router.fileno(), drain)
    loop.call_soon(drain)

    def end() -> None:
        loop.remove_reader(router.fileno())

    return end


async def by_thread(router: zmq.Socket[bytes], on_message: Callable[[list[zmq.Frame]], None]) -> Callable[[], None]:
    """Way (b); returns what ends it."""
    loop = asyncio.get_running_loop()
    ending = threading.Event()
    router.rcvtimeo = 200

    def receive() -> None:
        while not ending.is_set():
            try:
                frames = router.recv_multipart(copy=False)
            except zmq.Again:
                continue
            loop.call_soon_threadsafe(on_message, frames)

    thread = threading.Thread(target=receive)
    thread.start()

    def end() -> None:
        ending.set()
        thread.join()

    return end


async def receive(way: str, events: int, bursts: int) -> tuple[list[float], list[float]]:
    """Start the other process, and take the times: latencies, and durations of bursts, in seconds."""
    latencies: list[float] = []
    durations: list[float] = []
    done = asyncio.get_running_loop().create_future()
    public, secret = zmq.curve_keypair()
    with zmq.Context(io_threads=2) as context, context.socket(zmq.ROUTER) as router:
        router.curve_server, router.curve_secretkey = True, secret
        port = router.bind_to_random_port("tcp://127.0.0.1")
        counts = {"single": 0, "burst": 0}

        def on_message(frames: list[zmq.Frame]) -> None:
            took = time.monotonic() - _STAMP.unpack(frames[1].buffer)[0]
            if len(frames) == 2:
                counts["single"] += 1
                if counts["single"] == 1:  # connected: the other side may begin
                    router.send_multipart([frames[0].bytes, b""])
                else:
                    latencies.append(took)
            else:
                counts["burst"] += 1
                if counts["burst"] % BURST == 0:
                    durations.append(took)
                    router.send_multipart([frames[0].bytes, b""])
                    if counts["burst"] == BURST * bursts:
                        done.set_result(None)

        end = await {"reader": by_reader, "thread": by_thread}[way](router, on_message)
        arguments = [str(port), public.decode(), str(events), str(bursts)]
        process = await asyncio.create_subprocess_exec(sys.executable, __file__, "--send", *arguments)
        try:
            await asyncio.wait_for(done, 120)
        finally:
            await process.wait()
            end()
    return latencies, durations


def measure(way: str, busy: bool, events: int, bursts: int) -> tuple[list[float], list[float]]:
    """Run the loop in a thread, as the reactor does, while this thread sleeps or computes."""
    result: list[tuple[list[float], list[float]]] = []
    loop = threading.Thread(target=lambda: result.append(asyncio.run(receive(way, events, bursts))))
    loop.start()
    number = 0
    while busy and loop.is_alive():
        for _ in range(10_000):
            number += 1
    loop.join()
    return result[0]


def main() -> None:
    if sys.argv[1:2] == ["--send"]:
        send(int(sys.argv[2]), sys.argv[3].encode(), int(sys.argv[4]), int(sys.argv[5]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=300, help="single messages (300)")
    parser.add_argument("--bursts", type=int, default=5, help="bursts of 100 messages (5)")
    options = parser.parse_args()
    print(f"{'main thread':<14}{'driven by':<12}{'median ms':>11}{'99 % ms':>9}{'burst s':>9}{'MB/s':>7}")
    for busy in (False, True):
        for way in ("reader", "thread"):
            latencies, durations = measure(way, busy, options.events, options.bursts)
            burst = statistics.median(durations)
            row = f"{'pure Python' if busy else 'sleeps':<14}{way:<12}{statistics.median(latencies) * 1e3:>11.2f}"
            row += f"{statistics.quantiles(latencies, n=100)[98] * 1e3:>9.2f}{burst:>9.3f}"
            print(f"{row}{BURST * SIZE / burst / 1e6:>7.0f}", flush=True)


if __name__ == "__main__":
    main()
