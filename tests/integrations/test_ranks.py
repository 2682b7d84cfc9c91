"""Several processes of a framework are one peer, with `cluster=`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.ranks import Ranks
from tests.integrations.test_restart import checkpoint
from tests.integrations.training import TOGETHER, by_epoch, training

pytestmark = pytest.mark.alone

EPOCHS = 10
FRAMEWORKS = ["transformers", "lightning", "accelerate"]


def rates(framework: str, first: int, last: int, steps: int) -> list[float]:
    """With which the steps to those epochs have to be made."""
    epochs = range(first - 1, last)
    return [0.01 * (1 - epoch / steps) if framework == "transformers" else 0.01 * 0.9**epoch for epoch in epochs]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_two_ranks_and_a_process_train_one_model(framework: str, tmp_path: Path) -> None:
    of_all: dict[str, Any] = {"framework": framework, "steps": EPOCHS, "run": TOGETHER, "pause": 0.01}
    with training({"folder": str(tmp_path / "one")}, **of_all) as one:
        peers = one.processes[0].addresses
        with Ranks(tmp_path / "two", 2, launcher=True, initial_peers=peers, accumulate=2, **of_all) as two:
            [alone] = one.finish()
            assert two.wait() == [0], two.log()
            first, second = two.told()
    by_epoch(peer.events for peer in (alone, first))
    assert first.epochs[-1] == EPOCHS == first.done["steps"] == second.done["steps"]
    assert second.events == []
    assert first.epochs_together > EPOCHS // 2
    assert alone.late_downloads == first.late_downloads == 0
    for rank in (first, second):
        common = rank.done["digests"].keys() & alone.done["digests"].keys()
        assert len(common) > EPOCHS // 2
        assert all(rank.done["digests"][epoch] == alone.done["digests"][epoch] for epoch in common)
        assert rank.done["parameters"] == alone.done["parameters"]
        assert rank.done["warnings"] == []
    assert first.done["digests"] == second.done["digests"]
    assert first.done["rates"] == pytest.approx([rates(framework, e, e, EPOCHS)[0] for e in first.epochs])


SAVED = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 100}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_checkpoint_of_two_ranks_goes_on_in_one_and_in_two(framework: str, tmp_path: Path) -> None:
    of_all: dict[str, Any] = {"framework": framework, "args": SAVED, "in_order": True, "data": 32, "target": 32}
    before = None
    for first, ranks in ((1, 2), (3, 1), (5, 2)):
        resume = {} if before is None else {"resume": checkpoint(framework, str(before.folder), first - 1)}
        folder = tmp_path / str(first)
        with Ranks(folder, ranks, steps=first + 1, **of_all, **resume) as now:
            assert now.wait() == [0] * ranks, [now.log(rank)[-4000:] for rank in range(ranks)]
        for told in now.told():
            assert told.done["steps"] == first + 1
            assert told.done["warnings"] == []
            assert told.done["digests"] == now.told()[0].done["digests"]
            if before is not None:
                assert told.done["digests"][str(first - 1)] == before.told()[0].done["digests"][str(first - 1)]
        told = now.told()[0]
        assert told.epochs == [first, first + 1]
        assert [event["samples"] for event in told.events] == [32, 32]
        if before is not None:
            assert told.done["moments"][str(first - 1)] == before.told()[0].done["moments"][str(first - 1)]
        if framework != "transformers":  # whose schedule is as long as the training
            assert told.done["rates"] == pytest.approx(rates(framework, first, first + 1, 0))
        before = now


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_error_of_one_rank_is_heard_by_name(framework: str, tmp_path: Path) -> None:
    is_script = framework == "accelerate"  # which says so as it ends: nobody but Python hears of its error
    with Ranks(tmp_path, 2, launcher=is_script, framework=framework, steps=20, fails=[1, 3]) as two:
        assert 0 not in two.wait(), two.log()
        assert re.search(
            r"^rank 1 \(process \d+ on .*\) of this cluster is lost: it has raised KeyError: 'mine'", two.log(), re.M
        )
