"""Two states that may differ never have one name, and of several the newest wins, by name."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import shoal
from shoal.swarm.protocol.errors import AveragingError
from tests.optim.models import OPTIMIZERS, backward, fixed_batch, make_model
from tests.optim.processes import Pool, Training, ask_all, by_epoch, events, fixed, stopped, training
from tests.waiting import wait_until


def lone(dht: shoal.DHT, seed: int = 0) -> tuple[torch.nn.Module, shoal.Optimizer]:
    model = make_model(seed)
    made = shoal.Optimizer(
        dht=dht,
        run_id="names",
        target_batch_size=64,
        params=model.parameters(),
        optimizer=OPTIMIZERS["sgd"],
        averaging_timeout=0.2,
    )
    return model, made


@pytest.mark.parametrize("fails", [True, False], ids=["no average could be had", "a round of its own"])
def test_peers_that_go_on_alone_with_equal_samples_are_at_unlike_tips(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same model, the same batch, and as many samples: still each is at a state of its own."""
    with shoal.DHT(start=True) as one, shoal.DHT(start=True) as other:
        made = [lone(dht) for dht in (one, other)]
        tips = []
        for model, optimizer in made:
            if fails:

                def fail(*_: object) -> None:
                    time.sleep(0.3)
                    raise AveragingError("nobody answers")

                monkeypatch.setattr(optimizer._run, "average", fail)
            backward(model, *fixed_batch(0))
            optimizer.step(batch_size=64)
            assert optimizer.local_epoch == 1
            tips.append(optimizer._run.swarm.tip)
            optimizer.shutdown()
    assert tips[0].epoch == tips[1].epoch
    assert tips[0].samples == tips[1].samples == 64.0
    assert tips[0].lineage != tips[1].lineage


@pytest.mark.long
def test_all_restart_from_checkpoints_of_different_epochs(pool: Pool, tmp_path: Path) -> None:
    """Three of the older epoch, one of the newer: the newest state wins, and those that leave theirs say so."""
    with training(pool, 4, optimizer="adamw", target=64) as peers:
        files = [str(tmp_path / f"checkpoint {index}") for index in range(4)]
        for epochs in (3, 5):
            fixed(peers.all, [(start, start + 16) for start in range(0, 64, 16)], epochs)
            for peer, file in list(zip(peers.all, files, strict=True))[3 * (epochs == 5) :]:
                peer.ask(Training.save, file)
    with training(pool, 4, optimizer="adamw", target=64) as peers:
        loaded = [peer.ask(Training.load, file) for peer, file in zip(peers.all, files, strict=True)]
        assert loaded == [3, 3, 3, 5]
        ask_all(peers.all, Training.train, batch=8, pause=0.03)
        wait_until(lambda: all(sum(e.get("peers") == 4 for e in events(peer)) >= 3 for peer in peers.all))
        states = stopped(peers.all)
        reports = ask_all(peers.all, Training.report)
    assert all(state == states[0] for state in states)
    by_epoch([report["events"] for report in reports])
    first = min(event["epoch"] for report in reports for event in report["events"])
    assert first >= 5, "an epoch was made from the older checkpoint"
    for report in reports[:3]:
        told = [line for line in report["log"] if "has left its state of epoch 3" in line]
        assert len(told) == 1, report["log"]
        assert "which it has from <PeerID" in told[0]
        assert sum(event["kind"] == "download" for event in report["events"]) == 1
