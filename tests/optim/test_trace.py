"""What a replica writes into its trace."""

from __future__ import annotations

import io
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import shoal
from shoal.cli.plot.command import run_plot
from shoal.cli.plot.story import Doing, story_of
from shoal.health.trace import TraceEvent, TraceLine, read_trace
from shoal.optim.reports import Event
from tests.optim.conftest import Alone
from tests.optim.models import backward, fixed_batch, make_model
from tests.optim.processes import Pool, Training, ask_all, events, training
from tests.waiting import wait_until

EPOCH: dict[str, Any] = {
    "epoch": 4,
    "samples": 96.0,
    "num_peers": 3,
    "coordinator": "",
    "round_seconds": 0.7,
    "matchmaking_seconds": 0.5,
    "allreduce_seconds": 0.2,
    "bytes_sent": 0,
    "bytes_received": 0,
    "state_digest": "",
    "waiting_seconds": 2.0,
    "step_seconds": 0.1,
    "own_samples": 32.0,
}


def lines(path: Path) -> list[TraceLine]:
    return list(read_trace(path))


def test_the_lines_of_an_epoch(tmp_path: Path) -> None:
    heard: list[Event] = []
    trace = shoal.Trace(tmp_path / "new" / "r0.jsonl", then=heard.append)
    for loss in (1.0, torch.tensor(2.0, requires_grad=True), float("nan")):
        trace.report(loss=loss)
    event = shoal.EpochReport(**EPOCH)
    trace(event)
    assert heard == [event]
    start, waiting, round_, step = lines(tmp_path / "new" / "r0.jsonl")
    assert (start.event, start.replica) == (TraceEvent.START, "r0")
    assert 0 < start.seconds < 24 * 3600, "of this process"
    assert abs(step.time - time.time()) < 60
    # It waited for samples and for members, was in the round, and stepped.
    assert (waiting.event, waiting.seconds) == (TraceEvent.WAITING, 2.5)
    assert step.time - waiting.time == pytest.approx(0.3, abs=1e-4)
    assert (round_.event, round_.seconds) == (TraceEvent.ROUND, 0.2)
    assert step.time - round_.time == pytest.approx(0.1, abs=1e-4)
    assert (step.epoch, step.samples, step.peers, step.own, step.loss) == (4, 96.0, 3, 32.0, 1.5)


def test_each_step_has_the_losses_since_the_last_one(tmp_path: Path) -> None:
    trace = shoal.Trace(tmp_path / "r0.jsonl", "mine")
    trace.report(loss=9.0)  # of a state that it leaves
    trace(shoal.DownloadReport(epoch=3, seconds=1.5, bytes=10, donors=1, state_digest=""))
    trace.report(loss=1.0)
    trace(shoal.EpochReport(**EPOCH))
    trace(shoal.EpochReport(**EPOCH))
    trace(shoal.ReachabilityReport(num_peers=1, unreached=(), advice=""))
    trace.lost(32, "left out")
    trace.end()
    found = lines(tmp_path / "r0.jsonl")
    assert {line.replica for line in found} == {"mine"}
    assert [line.loss for line in found if line.event is TraceEvent.STEP] == [1.0, None]
    (download,) = (line for line in found if line.event is TraceEvent.DOWNLOADING)
    assert (download.seconds, download.epoch) == (1.5, 3)
    assert (found[-2].event, found[-2].samples, found[-2].reason) == (TraceEvent.LOST, 32, "left out")
    assert found[-1].event is TraceEvent.END


def test_a_file_that_cannot_be_written_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(OSError, match="No space left"):
        shoal.Trace("/dev/full")
    monkeypatch.chdir(tmp_path)
    heard: list[Event] = []
    trace = shoal.Trace("traces/r0.jsonl", then=heard.append)
    os.rename(tmp_path / "traces", tmp_path / "moved")
    with caplog.at_level(logging.WARNING, "shoal"):
        for _ in range(2):
            trace(shoal.EpochReport(**EPOCH))
    assert len(heard) == 2
    assert len(caplog.records) == 1
    assert "the trace has a gap" in caplog.text
    os.rename(tmp_path / "moved", tmp_path / "traces")
    monkeypatch.chdir("/")
    trace.end()
    assert [line.event for line in lines(tmp_path / "traces" / "r0.jsonl")] == [TraceEvent.START, TraceEvent.END]


def test_a_report_has_the_samples_of_this_peer(alone: Alone, tmp_path: Path) -> None:
    model = make_model()
    optimizer = alone(model, optimizer=torch.optim.SGD, target_batch_size=24, batch_size_per_step=8)
    optimizer.on_event = shoal.Trace(tmp_path / "r0.jsonl")
    while optimizer.local_epoch < 2:
        inputs, outputs = fixed_batch(0)
        backward(model, inputs[:8], outputs[:8])
        optimizer.step()
    steps = [line for line in lines(tmp_path / "r0.jsonl") if line.event is TraceEvent.STEP]
    assert [(step.epoch, step.samples, step.own, step.peers) for step in steps] == [(1, 24, 24, 1), (2, 24, 24, 1)]


@pytest.mark.processes
def test_traces_of_a_run_in_which_a_peer_is_killed(pool: Pool, tmp_path: Path) -> None:
    with training(pool, 2, target=32, trace=[str(tmp_path / "r0.jsonl"), str(tmp_path / "r1.jsonl")]) as peers:
        first, victim = peers.all
        ask_all(peers.all, Training.train, batch=8, pause=0.03)
        wait_until(lambda: min(len(events(peer)) for peer in peers.all) >= 3)
        killed = time.time()
        victim.kill()
        wait_until(lambda: sum(event["peers"] == 1 for event in events(first)) >= 3)
        state = first.ask(Training.stop)
    run_plot([tmp_path / "r0.jsonl", tmp_path / "r1.jsonl"], tmp_path / "run.png", Console(file=io.StringIO()))
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    story = story_of(line for name in ("r0.jsonl", "r1.jsonl") for line in lines(tmp_path / name))
    assert len(story.committed) == state["epoch"]
    *_, computed = story.replicas["r1"][Doing.COMPUTING]
    (dead,) = story.replicas["r1"][Doing.DEAD]
    assert computed[1] <= killed + 1
    assert dead == (computed[1], story.end)
    assert not story.replicas["r0"][Doing.DEAD]
    both = [line for line in lines(tmp_path / "r0.jsonl") if line.event is TraceEvent.STEP and line.peers == 2]
    assert any(0 < line.own < line.samples for line in both)
