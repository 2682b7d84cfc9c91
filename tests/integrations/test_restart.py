"""A peer that was killed goes on from the checkpoint of its framework."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.training import TOGETHER, by_epoch, training
from tests.soaked import only_in_soak

pytestmark = [pytest.mark.processes, pytest.mark.long]

CHECKPOINTS = {"transformers": "checkpoint-{}", "lightning": "step={}.ckpt", "accelerate": "step={}"}
MANY = 100_000
LAST = 12
SAVED = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 100}


def checkpoint(framework: str, folder: str, epoch: int) -> str:
    path = Path(folder, CHECKPOINTS[framework].format(epoch))
    assert path.exists(), list(Path(folder).iterdir())
    return str(path)


@pytest.mark.parametrize("framework", ["transformers", pytest.param("lightning", marks=only_in_soak)])
def test_one_is_killed_and_goes_on_with_the_other(framework: str, tmp_path: Path) -> None:
    own = [{"folder": str(tmp_path / name), "identity": str(tmp_path / f"{name}.key")} for name in "ab"]
    with training(*own, framework=framework, steps=MANY, pause=0.02, args=SAVED) as one:
        one.hear_epoch(1, 8)
        one.processes[1].kill()
        one.add(own[1] | {"resume": checkpoint(framework, own[1]["folder"], 6)})
        while one.told[2].epochs_together < 3:
            assert one.hear(2)
        one.hear_epoch(0, one.told[2].epochs[-1])
        told = one.told
    by_epoch(peer.events for peer in told)
    assert told[0].late_downloads == told[2].late_downloads == 0
    assert set(told[2].epochs) <= set(told[0].epochs)


@pytest.mark.parametrize("framework", [pytest.param("transformers", marks=only_in_soak), "lightning", "accelerate"])
def test_all_are_killed_and_go_on_from_their_checkpoints(framework: str, tmp_path: Path) -> None:
    own = [{"folder": str(tmp_path / name), "identity": str(tmp_path / f"{name}.key")} for name in "ab"]
    with training(*own, framework=framework, steps=LAST, pause=0.02, args=SAVED) as before:
        for index in (0, 1):
            before.hear_epoch(index, 8)
    resumed = [peer | {"resume": checkpoint(framework, peer["folder"], 6)} for peer in own]
    with training(*resumed, framework=framework, steps=LAST, pause=0.02, args=SAVED, run=TOGETHER) as after:
        told = after.finish()
    by_epoch(peer.events for peer in told)
    for peer in told:
        assert peer.epochs == list(range(7, LAST + 1))
        assert peer.downloads == 0
        assert peer.done["rates"] == pytest.approx(rates_of(framework, peer.epochs))


def test_all_are_killed_and_go_on_from_checkpoints_without_the_optimizer(tmp_path: Path) -> None:
    own = [{"folder": str(tmp_path / name), "identity": str(tmp_path / f"{name}.key")} for name in "ab"]
    of_all = {"framework": "transformers", "pause": 0.02, "args": SAVED | {"save_only_model": True}}
    with training(*own, steps=LAST, **of_all) as before:
        for index in (0, 1):
            before.hear_epoch(index, 8)
    resumed = [peer | {"resume": checkpoint("transformers", peer["folder"], 6)} for peer in own]
    with training(*resumed, steps=LAST, run=TOGETHER, **of_all) as after:
        told = after.finish()
    by_epoch(peer.events for peer in told)
    for peer in told:
        assert peer.epochs == list(range(7, LAST + 1))
        assert peer.downloads == 0
        assert peer.done["rates"] == pytest.approx(rates_of("transformers", peer.epochs))
        assert any("has no optimizer (save_only_model=True)" in warning for warning in peer.done["warnings"])


def rates_of(framework: str, epochs: list[int]) -> list[float]:
    """With which each epoch's step has to be made."""
    if framework == "transformers":  # the schedule is as long as the training
        return [0.01 * (1 - (epoch - 1) / LAST) for epoch in epochs]
    return [0.01 * 0.9 ** (epoch - 1) for epoch in epochs]
