"""Made-up runs for the tests of what a run amounts to."""

from __future__ import annotations

from pathlib import Path

from shoal.cli.demo.messages import Baseline, Committed, Evaluated, Finished, Listening, Progress, Ready
from shoal.cli.demo.record import PeerRecord, PeerState, Record
from shoal.cli.demo.settings import DemoSettings

EPOCHS = 20


def settings(out: Path = Path("runs"), *, kill: bool = True, epochs: int = EPOCHS) -> DemoSettings:
    """Four peers, 20 epochs: the kill comes with epoch 8, the newcomer with epoch 12."""
    return DemoSettings(out=out, epochs=epochs, kill=kill)


def committed(epoch: int, at: float, digest: str | None = None) -> Committed:
    """One peer's report of an epoch."""
    return Committed(
        at=at,
        epoch=epoch,
        samples=128,
        num_peers=4,
        coordinator="id-2",
        round_seconds=0.2,
        matchmaking_seconds=0.01,
        allreduce_seconds=0.15,
        bytes_sent=4_000_000,
        bytes_received=4_000_000,
        state_digest=digest or f"digest {epoch}",
    )


def good_run() -> Record:
    """One epoch a second; peer 3 is killed at 108.1 and the next epoch comes at 109.6; peer 4 comes at 112."""
    record = Record(started_at=95.0, ended_at=125.0)
    for index in range(5):
        record.peers[index] = PeerRecord(index=index, pid=1_000 + index, started_at=112.0 if index == 4 else 96.0)
        record.hear(index, Listening(at=97.0, peer_id=f"id-{index}", addresses=["/ip4/127.0.0.1/tcp/1"]))
        record.hear(index, Ready(at=115.0 if index == 4 else 99.0))
    record.newcomer = 4
    record.hear(0, Baseline(bigram_loss=2.4, parameters=10, train_characters=90, held_out_characters=10))
    record.hear(0, Evaluated(epoch=0, held_out_loss=4.6))
    for epoch in range(EPOCHS):
        at = 100.0 + epoch + (0.6 if epoch == 9 else 0.0)
        for index in (0, 1, 2, *((3,) if epoch <= 8 else ()), *((4,) if epoch >= 17 else ())):
            record.hear(index, committed(epoch, at + index / 100))
            record.hear(index, Progress(epoch=epoch, loss=4.0 - epoch / 10, samples_per_second=50.0))
    record.peers[3].state, record.peers[3].killed_at = PeerState.KILLED, 108.1
    record.hear(0, Evaluated(epoch=EPOCHS, held_out_loss=1.6))
    for index in (0, 1, 2, 4):
        record.hear(index, Finished(epoch=EPOCHS, sample="def f():" if index == 0 else ""))
    return record
