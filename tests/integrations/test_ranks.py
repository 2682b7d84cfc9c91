"""Several processes of a framework are one peer, with `cluster=`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.ranks import Ranks
from tests.integrations.test_restart import checkpoint
from tests.integrations.training import TOGETHER, Told, by_epoch, training
from tests.soaked import only_in_soak
from tests.waiting import wait_until

pytestmark = pytest.mark.processes

EPOCHS = 10
FRAMEWORKS = ["transformers", "lightning", "accelerate"]


def mostly_long(*short: str) -> list[Any]:
    """All frameworks, of which those are tried each time."""
    return [pytest.param(name, marks=[] if name in short else pytest.mark.long) for name in FRAMEWORKS]


def rates(framework: str, first: int, last: int, steps: int) -> list[float]:
    """With which the steps to those epochs have to be made."""
    epochs = range(first - 1, last)
    return [0.01 * (1 - epoch / steps) if framework == "transformers" else 0.01 * 0.9**epoch for epoch in epochs]


@pytest.mark.parametrize(
    ("framework", "strands"),
    [
        ("accelerate", 8),
        pytest.param("transformers", 8, marks=[pytest.mark.long, only_in_soak]),
        pytest.param("lightning", 8, marks=pytest.mark.long),
        pytest.param("lightning", 1, marks=[pytest.mark.long, only_in_soak]),
    ],
)
def test_two_ranks_and_a_process_train_one_model(framework: str, strands: int, tmp_path: Path) -> None:
    of_all: dict[str, Any] = {"framework": framework, "steps": EPOCHS, "run": TOGETHER, "pause": 0.01}
    if strands > 1:
        of_all["strands"] = strands
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
    assert not any(sample in second.done["seen"] for sample in first.done["seen"])  # they share out one order
    assert len(first.done["seen"]) == len(second.done["seen"]) == 32  # of 64
    if framework == "lightning":
        assert first.done["shuffle"] == second.done["shuffle"] > 0  # Lightning's own is 0 at all peers
    assert first.done["rates"] == pytest.approx([rates(framework, e, e, EPOCHS)[0] for e in first.epochs])


SAVED = {
    "save_strategy": "steps", "save_steps": 2, "save_total_limit": 100,
    "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 10,
}  # fmt: skip


@pytest.mark.parametrize(
    ("framework", "strands"),
    [
        ("accelerate", 8),
        ("accelerate", 1),
        pytest.param("transformers", 8, marks=[pytest.mark.long, only_in_soak]),
        pytest.param("lightning", 8, marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_of_two_ranks_goes_on_in_one_and_in_two(framework: str, strands: int, tmp_path: Path) -> None:
    of_all: dict[str, Any] = {"framework": framework, "args": SAVED, "in_order": True, "data": 32, "target": 32}
    of_all["strands"] = strands
    before: Told | None = None
    kept: list[Told] = []
    resume: dict[str, Any] = {}
    for last, ranks in ((2, 2), (4, 1), (6, 2)):
        with Ranks(tmp_path / str(last), ranks, steps=last, **of_all, **resume) as now:
            assert now.wait() == [0] * ranks, [now.log(rank)[-4000:] for rank in range(ranks)]
            told = now.told()
        saved = checkpoint(framework, str(now.folder), last)
        resume = {"resume": str(now.folder / "end.ckpt") if framework == "lightning" else saved}  # when it has left
        for rank in told:
            assert rank.done["steps"] == last
            assert rank.done["warnings"] == []
            assert rank.done["digests"] == told[0].done["digests"]
        assert told[0].epochs == [last - 1, last]
        assert [event["samples"] for event in told[0].events] == [32, 32]
        if before is not None:
            assert told[0].done["digests"][str(last - 2)] == before.done["digests"][str(last - 2)]
            fewer, more = sorted([set(one.done["moments"][str(last - 2)]) for one in (before, told[0])], key=len)
            assert len(fewer) > 4
            assert fewer <= more
        before = told[0]
        kept.append(before)
    last = 2 if framework == "lightning" else 6  # which goes on in the middle of a pass over the data
    whole = {**of_all, "batch": of_all["target"], "swarm": False}
    with Ranks(tmp_path / "never stopped", 1, steps=last, **whole) as one:
        assert one.wait() == [0], one.log()
        [expected] = one.told()
    assert kept[last // 2 - 1].done["parameters"] == pytest.approx(expected.done["parameters"], rel=1e-3, abs=1e-5)
    made_with = [epoch / 1000 if framework == "transformers" else 0.01 * 0.9**epoch for epoch in (last - 2, last - 1)]
    assert kept[last // 2 - 1].done["rates"] == pytest.approx(made_with)


@pytest.mark.long
def test_a_cluster_comes_late_and_is_lost_as_one(tmp_path: Path) -> None:
    of_all: dict[str, Any] = {"framework": "transformers", "steps": 100_000, "strands": 8, "pause": 0.02}
    with training({"folder": str(tmp_path / "one")}, **of_all) as one:
        one.hear_epoch(0, 5)
        peers = one.processes[0].addresses
        with Ranks(tmp_path / "two", 2, initial_peers=peers, **of_all) as two:
            wait_until(lambda: two.told()[0].epochs_together > 2)
            two.processes[1].kill()
            assert 0 not in two.wait(), two.log()
            late, _ = two.told()
            assert re.search(r"^rank 1 \(process \d+ on .*\) of this cluster is lost", two.log(), re.M)
        one.hear_epoch(0, late.epochs[-1] + 3)
    [alone] = one.told
    by_epoch(peer.events for peer in (alone, late))
    assert late.downloads >= 1
    assert late.late_downloads == alone.downloads == 0


@pytest.mark.long
def test_a_state_that_moves_in_the_background_is_saved(tmp_path: Path) -> None:
    """Also by a Trainer of Transformers, which asks the rank that writes for the state, and no other."""
    of_all: dict[str, Any] = {"framework": "transformers", "args": SAVED, "run": {"use_local_updates": True}}
    with Ranks(tmp_path, 2, steps=4, **of_all) as two:
        assert two.wait() == [0, 0], [two.log(0), two.log(1)]
        first, second = two.told()
    assert first.done["parameters"] == second.done["parameters"]
    assert checkpoint("transformers", str(tmp_path), 4)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_several_processes_without_a_cluster_are_refused(framework: str, tmp_path: Path) -> None:
    with Ranks(tmp_path, 2, framework=framework, steps=4, run={"cluster": None}) as two:
        assert 0 not in two.wait(), two.log()
        for rank in (0, 1):
            assert "asks for 2: give cluster=lambda: shoal.Cluster(strands=8) at all peers of the run" in two.log(rank)


WITHOUT = "dht=None at rank 1 of shoal.Cluster(rank {} of 2, strands=8), where each rank is in the run with its own"


@pytest.mark.parametrize("framework", mostly_long("accelerate"))
def test_all_ranks_hear_which_has_no_dht(framework: str, tmp_path: Path) -> None:
    with Ranks(tmp_path, 2, framework=framework, steps=4, strands=8, with_dht=[0]) as two:
        assert 0 not in two.wait(), two.log()
        assert all(WITHOUT.format(rank) in two.log(rank) for rank in (0, 1))


@pytest.mark.parametrize("framework", mostly_long("lightning"))
def test_an_error_of_one_rank_is_heard_by_name(framework: str, tmp_path: Path) -> None:
    is_script = framework == "accelerate"  # which says so as it ends: nobody but Python hears of its error
    with Ranks(tmp_path, 2, launcher=is_script, framework=framework, steps=20, fails=[1, 3]) as two:
        assert 0 not in two.wait(), two.log()
        assert re.search(
            r"^rank 1 \(process \d+ on .*\) of this cluster is lost: it has raised KeyError: 'mine'", two.log(), re.M
        )
