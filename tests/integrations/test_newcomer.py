"""A peer that comes in the middle of a run takes over the state, and its schedule and its count of steps continue those
of the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.training import by_epoch, training

pytestmark = [pytest.mark.processes, pytest.mark.long]

EPOCHS = 120


@pytest.mark.parametrize("framework", ["transformers"])  # the others take as long, and pass as well
def test_a_newcomer_goes_on_where_the_run_is(framework: str, tmp_path: Path) -> None:
    own = [{"folder": str(tmp_path / name)} for name in "ab"]
    with training(own[0], framework=framework, steps=EPOCHS, pause=0.02) as one:
        one.hear_epoch(0, 5)
        one.add(own[1])
        old, new = one.finish()
    by_epoch([old.events, new.events])
    assert old.downloads == new.late_downloads == 0
    assert new.downloads >= 1
    assert new.epochs_together > 5
    assert new.done["steps"] == EPOCHS
    scheduled = [0.01 * (1 - n / EPOCHS) if framework == "transformers" else 0.01 * 0.9**n for n in range(EPOCHS)]
    assert new.done["rates"] == pytest.approx([scheduled[epoch - 1] for epoch in new.epochs])
    assert old.done["parameters"] == new.done["parameters"]
