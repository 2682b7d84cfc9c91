"""Clusters whose ranks carry strands: each rank sends and steps its own, and all peers have the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.clusters import clusters
from tests.cluster.test_clusters import check_alike, check_numbers

pytestmark = pytest.mark.alone


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_peers_of_one_two_and_four_ranks_train_one_model(tmp_path: Path, optimizer: str) -> None:
    with clusters(tmp_path, 7, optimizer=optimizer, epochs=6, min_peers=3, strands=4) as made:
        made.add("plain", 1, 0)
        made.add("ddp", 2, 1)
        made.add("fsdp2", 4, 3)
        assert made.ended() == [[0], [0, 0], [0, 0, 0, 0]], made.logs()
        check_alike(made, 6)
        check_numbers(made, optimizer, 7, 6)
