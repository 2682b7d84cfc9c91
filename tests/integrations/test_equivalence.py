"""Two peers in a framework train what one process in that framework trains with the joint batch: with gradients
accumulated over 3 batches, an incomplete last batch, the framework's schedule and its clipping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.training import by_epoch, training

pytestmark = pytest.mark.processes

EPOCHS = 20
SAMPLES = 18
# In each epoch the first brings batches of 4, 4 and 3, the second of 4 and 3.
PARTS = [[0, 11], [11, 18]]


@pytest.mark.parametrize("framework", [pytest.param("transformers", marks=pytest.mark.long), "lightning", "accelerate"])
def test_two_peers_train_what_one_process_does(framework: str, tmp_path: Path) -> None:
    common: dict[str, Any] = {"framework": framework, "steps": EPOCHS, "data": SAMPLES, "in_order": True}
    peers = [
        {"folder": str(tmp_path / str(part)), "samples": part, "batch": 4, "accumulate": 3, "lockstep": True}
        for part in PARTS
    ]
    whole = {"folder": str(tmp_path / "whole"), "swarm": False, "batch": SAMPLES}
    with training(*peers, whole, **common, target=SAMPLES) as one:
        first, second, alone = one.finish()
    assert first.epochs == second.epochs == list(range(1, EPOCHS + 1))
    by_epoch([first.events, second.events])
    assert [event["samples"] for event in first.events] == [SAMPLES] * EPOCHS
    losses = [
        (11 * mine + 7 * other) / SAMPLES
        for mine, other in zip(first.done["losses"], second.done["losses"], strict=True)
    ]
    assert losses == pytest.approx(alone.done["losses"], abs=1e-5)
    # AdamW divides by the root of the second moment, so where gradients are almost zero it enlarges their rounding.
    torch.testing.assert_close(
        torch.tensor(first.done["parameters"]), torch.tensor(alone.done["parameters"]), rtol=0, atol=1e-4
    )
