"""Two processes of unequal speed train one model in a framework: they hold one state in each epoch, and the schedule of
each follows the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.training import TOGETHER, Told, by_epoch, training

pytestmark = pytest.mark.processes

EPOCHS = 30
SPEEDS = [{"pause": 0.005}, {"pause": 0.02}]
"""Seconds for a batch: four times as many batches for one of the two."""


@pytest.mark.parametrize(
    "framework", [*(pytest.param(each, marks=pytest.mark.long) for each in ("transformers", "lightning")), "accelerate"]
)
def test_states_are_equal_and_schedules_follow_the_run(framework: str, tmp_path: Path) -> None:
    own = [{"folder": str(tmp_path / str(number)), **speed} for number, speed in enumerate(SPEEDS)]
    with training(*own, framework=framework, steps=EPOCHS, run=TOGETHER) as one:
        told = one.finish()
    digests = by_epoch(peer.events for peer in told)
    assert [peer.late_downloads for peer in told] == [0, 0]
    assert all(peer.downloads <= 2 for peer in told)
    scheduled = [
        0.01 * (1 - epoch / EPOCHS) if framework == "transformers" else 0.01 * 0.9**epoch for epoch in range(EPOCHS)
    ]
    for peer in told:
        assert peer.epochs[-1] == EPOCHS == peer.done["steps"]
        assert peer.done["rates"] == pytest.approx([scheduled[epoch - 1] for epoch in peer.epochs])
        assert peer.done["warnings"] == []
        assert numbers_of_peers(peer)[-1] == 2
        assert peer.epochs_together > EPOCHS // 2
    assert told[0].done["parameters"] == told[1].done["parameters"]
    assert len(set(digests.values())) == len(digests)


def numbers_of_peers(peer: Told) -> list[float]:
    """What the framework has logged; Accelerate's tests have logs of their own."""
    if "metrics" in peer.done:
        return [peer.done["metrics"]["run_peers"]]
    return list(peer.done.get("peers", [2]))
