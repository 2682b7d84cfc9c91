"""A peer process that only pretends: it speaks the demo's protocol without torch and without a swarm.

Run as ``python fake_peer.py <how> <PeerConfig as JSON>``. ``how``: "well", "crash" (peer 1 fails in epoch 3), "differ"
(peer 1 has another digest in epoch 3), "babble" (peer 1 writes a line that is no message), "deaf" (ignores SIGTERM).
"""

from __future__ import annotations

import os
import signal
import sys
import time

import msgspec

from shoal.cli.demo.messages import Baseline, Committed, Downloaded, Evaluated, Finished, Listening, Progress, Ready
from shoal.cli.demo.parent import START, STOP, Parent
from shoal.cli.demo.settings import PeerConfig

SECONDS_PER_EPOCH = 0.02


def main(how: str, config: PeerConfig, output: int) -> None:
    parent = Parent()
    if how == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    odd = config.index == 1
    parent.tell(Listening(peer_id=f"id-{config.index}", addresses=["/ip4/127.0.0.1/tcp/1/p2p/id-0"]))
    if config.evaluates:
        parent.tell(Baseline(bigram_loss=2.4, parameters=10, train_characters=90, held_out_characters=10))
    parent.tell(Ready())
    parent.wait_for(START)
    first = config.epochs * 3 // 5 if config.index == 4 else 0
    if first:
        parent.tell(Downloaded(epoch=first, seconds=0.1, bytes=4_000_000, donors=3, state_digest=f"digest {first}"))
    if config.evaluates:
        parent.tell(Evaluated(epoch=0, held_out_loss=4.6))
    for epoch in range(first, config.epochs):
        time.sleep(SECONDS_PER_EPOCH)
        if how == "crash" and odd and epoch == 3:
            sys.exit("the fake peer fails as it was told")
        if how == "babble" and odd and epoch == 3:
            os.write(output, b"hello\n")
        digest = "other" if how == "differ" and odd and epoch == 3 else f"digest {epoch}"
        parent.tell(
            Committed(
                epoch=epoch,
                samples=128,
                num_peers=4,
                coordinator="id-2",
                round_seconds=0.01,
                matchmaking_seconds=0.002,
                allreduce_seconds=0.006,
                bytes_sent=1_000_000,
                bytes_received=1_000_000,
                state_digest=digest,
            )
        )
        parent.tell(Progress(epoch=epoch, loss=3.0, samples_per_second=100.0))
    if config.evaluates:
        parent.tell(Evaluated(epoch=config.epochs, held_out_loss=1.6))
    parent.tell(Finished(epoch=config.epochs, sample="def f():" if config.evaluates else ""))
    parent.wait_for(STOP)


if __name__ == "__main__":
    main(sys.argv[1], msgspec.json.decode(sys.argv[2], type=PeerConfig), os.dup(1))
