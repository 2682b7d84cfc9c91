"""A process with one end of a lane: `python -m tests.p2p.lane_worker sends|takes|forks|hogs|exits`.

It reads its two keys, and says where it listens; then it does what its argument says.
"""

from __future__ import annotations

import os
import sys
import time

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from shoal.p2p.identity import PeerID
from shoal.p2p.sealing import LaneKeys
from tests.p2p.lane_ends import End, name

HOG_SECONDS = 10.0
CHILD_SECONDS = 3.0


def main() -> None:
    """Play one end."""
    mode = sys.argv[1]
    end = End(2)
    sealing, opening = (bytes.fromhex(key) for key in sys.stdin.readline().split())
    lane = end.lane(PeerID(bytes([1]) * 32))
    print(end.listener.getsockname()[1], flush=True)
    end.accept(lane, LaneKeys(AESGCM, sealing, opening))
    end.listener.close()
    memory = memoryview(bytearray(4 << 20))
    if mode == "forks":
        end.arrival()
        print("took one", flush=True)
        if os.fork() == 0:
            time.sleep(CHILD_SECONDS)
            os._exit(0)
    if mode == "hogs":
        end.arrival()
        print("holds the GIL", flush=True)
        sys.setswitchinterval(1000)
        until = time.monotonic() + HOG_SECONDS
        while time.monotonic() < until:
            pass
        sys.setswitchinterval(0.005)
    if mode in ("sends", "exits"):
        for number in range(100 if mode == "exits" else 1 << 40):
            while not lane.send(name(number), b"", memory):
                time.sleep(0.001)
    while mode != "exits":
        end.arrival()
        print("took one", flush=True)


if __name__ == "__main__":
    main()
