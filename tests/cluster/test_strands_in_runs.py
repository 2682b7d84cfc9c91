"""Clusters whose ranks carry strands: each rank sends and steps its own, and all peers have the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.clusters import clusters
from tests.cluster.test_clusters import check_alike, check_numbers

pytestmark = pytest.mark.processes


def test_peers_of_one_two_and_four_ranks_train_one_model(tmp_path: Path) -> None:
    with clusters(tmp_path, 7, optimizer="adamw", epochs=6, min_peers=3, strands=4) as made:
        made.add("plain", 1, 0)
        made.add("ddp", 2, 1, optimizer="zero")
        made.add("fsdp2", 4, 3)
        assert made.ended() == [[0], [0, 0], [0, 0, 0, 0]], made.logs()
        check_alike(made, 6)
        check_numbers(made, "adamw", 7, 6)


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_python_is_held_for_seconds_is_not_lost(tmp_path: Path, rank: int) -> None:
    """It is in every epoch, so all have the numbers of one process."""
    with clusters(tmp_path, 4, optimizer="adamw", epochs=8, min_peers=2, strands=4, matchmaking_time=15.0) as made:
        made.add("ddp", 2, 0)
        made.add("fsdp2", 2, 2, held=rank)
        assert made.ended() == [[0, 0], [0, 0]], made.logs()
        check_alike(made, 8)
        check_numbers(made, "adamw", 4, 8)
        assert made.longest_wait(0)[0] >= 4.0, "nobody was held"
        assert not any(" is lost" in made.log(cluster, each) for cluster in (0, 1) for each in (0, 1)), made.logs()


def test_a_cluster_of_other_ranks_goes_on_with_the_state_of_the_others(tmp_path: Path) -> None:
    with clusters(tmp_path, 4, optimizer="adamw", epochs=80, pause=0.01, strands=4) as made:
        made.add("ddp", 2, 0)
        first = made.add("fsdp2", 4, 2)
        made.wait(lambda: len(made.digests(1, 0)) > 3)
        first[1].kill()
        made.wait(lambda: first[0].process.poll() is not None)
        made.add("fsdp2", 2, 2)
        made.wait(lambda: len(made.digests(2, 1)) > 5)
        made.add("plain", 1, 3)
        made.wait(lambda: len(made.digests(3, 0)) > 5)
        made.wait(lambda: all(rank.process.poll() is not None for rank in [*made.all[0], *made.all[2], *made.all[3]]))
        mine = made.digests(0, 0)
        for number, rank in ((2, 0), (2, 1), (3, 0)):
            theirs = made.digests(number, rank)
            common = mine.keys() & theirs.keys()
            assert len(common) > 5, made.logs()
            assert all(mine[epoch] == theirs[epoch] for epoch in common), made.logs()


OTHER_KERNELS = {"ATEN_CPU_CAPABILITY": "default"}


def test_a_peer_with_other_kernels_is_refused_by_name(tmp_path: Path) -> None:
    """Its steps would round otherwise, and nothing averages the states of strands."""
    with clusters(tmp_path, 1, optimizer="adamw", epochs=4000, waits=False, pause=0.05, strands=4) as made:
        made.add("plain", 1, 0)
        made.wait(lambda: len(made.digests(0, 0)) > 1)
        (other,) = made.add("plain", 1, 1, OTHER_KERNELS)
        made.wait(lambda: other.process.poll() is not None)
        assert other.wait(1.0) != 0
        assert "strands' machine" in made.log(1, 0), made.logs()
        before = max(made.digests(0, 0))
        made.wait(lambda: max(made.digests(0, 0)) > before + 3, 20.0)


def test_with_diloco_each_rank_brings_the_drift_of_its_strands(tmp_path: Path) -> None:
    """Also a peer whose kernels differ: the anchors have equal bits."""
    with clusters(tmp_path, 5, optimizer="adamw", epochs=6, min_peers=3, strands=4, mode="diloco") as made:
        made.add("plain", 1, 0, OTHER_KERNELS)
        made.add("ddp", 2, 1)
        made.add("fsdp2", 2, 3)
        assert made.ended() == [[0], [0, 0], [0, 0]], made.logs()
        check_alike(made, 6)


@pytest.mark.parametrize(("mode", "kinds"), [("", ("fsdp2", "plain")), ("diloco", ("ddp", "fsdp2"))])
def test_a_checkpoint_goes_on_in_a_cluster_of_another_kind(tmp_path: Path, mode: str, kinds: tuple[str, str]) -> None:
    """Of the whole cluster, at rank 0; a peer without strands has one of the same form."""
    file = str(tmp_path / "checkpoint")
    sizes = [1 if kind == "plain" else 2 for kind in kinds]
    run = {"optimizer": "adamw", "strands": 4, "mode": mode}
    with clusters(tmp_path / "first", 2, epochs=3, save=file, **run) as made:
        made.add(kinds[0], sizes[0], 0, target=4 * sizes[0])
        assert made.ended() == [[0] * sizes[0]], made.logs()
    with clusters(tmp_path / "second", 2, epochs=6, load=file, **run) as made:
        made.add(kinds[1], sizes[1], 0, target=4 * sizes[1])
        assert made.ended() == [[0] * sizes[1]], made.logs()
        assert list(made.digests(0, sizes[1] - 1)) == [4, 5, 6]
        goes_on = made.digests(0, 0)
    with clusters(tmp_path / "third", 2, epochs=6, load=file, **run) as made:
        made.add(kinds[0], sizes[0], 0, target=4 * sizes[0])
        assert made.ended() == [[0] * sizes[0]], made.logs()
        if sizes[0] == sizes[1] and not mode:
            assert made.digests(0, 0) == goes_on
