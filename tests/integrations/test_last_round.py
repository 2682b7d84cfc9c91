"""A peer that misses the last rounds of a training ends where the others do, with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.training import by_epoch, training
from tests.soaked import only_in_soak

pytestmark = pytest.mark.processes

LAST = 4


@pytest.mark.long
@pytest.mark.parametrize("framework", [pytest.param("transformers", marks=only_in_soak), "lightning"])
def test_what_a_callback_puts_into_the_model_at_the_end_is_taken_over_by_nobody(framework: str, tmp_path: Path) -> None:
    """As callbacks that average weights do."""
    own = [
        {"folder": str(tmp_path / "a"), "pause": 0.05, "spoils": True},
        {"folder": str(tmp_path / "b"), "pause": 4.0},
    ]
    with training(*own, framework=framework, steps=LAST, run={"matchmaking_time": 0.5}) as one:
        fast, slow = one.finish()
    assert slow.events[-1]["epoch"] == slow.done["steps"] == LAST
    assert not any(fast.done["parameters"])
    assert any(slow.done["parameters"])
    assert fast.done["warnings"] == slow.done["warnings"] == []


@pytest.mark.parametrize(
    "framework",
    [
        pytest.param("transformers", marks=pytest.mark.long),
        pytest.param("lightning", marks=[pytest.mark.long, only_in_soak]),
        "accelerate",
    ],
)
def test_a_peer_that_misses_the_last_round_takes_over_the_last_state(framework: str, tmp_path: Path) -> None:
    own = [{"folder": str(tmp_path / "a"), "pause": 0.05}, {"folder": str(tmp_path / "b"), "pause": 4.0}]
    run = {"matchmaking_time": 0.5}
    with training(*own, framework=framework, steps=LAST, run=run) as one:
        fast, slow = one.finish()
    by_epoch([fast.events, slow.events])
    assert fast.epochs[-1] == LAST
    assert fast.events[-1]["peers"] == 1  # else the slow one has missed nothing
    assert slow.events[-1]["epoch"] == LAST  # by a download, or the result of a round that it was not in
    assert fast.done["steps"] == slow.done["steps"] == LAST
    assert fast.done["parameters"] == slow.done["parameters"]
