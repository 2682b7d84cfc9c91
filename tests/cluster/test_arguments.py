"""What makes no sense is refused before anything is changed; a cluster of one rank is a peer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import shoal
from shoal.cluster.cluster import MOST_STRANDS, shared_by
from tests.cluster.group_of_one import seen_of_arguments
from tests.groups import in_group


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    [found] = in_group(1, tmp_path, seen_of_arguments)
    assert "init_process_group" in found.pop("before")
    assert "strands=0: give a whole number from 1" in found.pop("strands")
    assert "does not go together with delay_grad_averaging yet: give strands=1" in found.pop("delayed")
    assert "not known of Adafactor that it treats each element alike" in found.pop("norms")
    assert "the optimizer is a Together(SGD), which steps whole ones: give shoal.Cluster(st" in found.pop("together")
    assert "give a process group or a device mesh" in found.pop("group")
    assert "cluster='all': give a shoal.Cluster" in found.pop("cluster")
    assert "cluster=… does not go together with reuse_grad_buffers=True" in found.pop("reuse")
    assert "cluster=… needs params=" in found.pop("params")
    assert "takes no grad_scaler" in found.pop("scaler")
    assert "batch_size=0.5: give a whole number" in found.pop("half")
    assert found == {"epoch": "1", "moved": "True"}


def test_the_strands_that_are_advised_fit_the_other_clusters_too() -> None:
    assert [shared_by(ranks, 8) for ranks in (3, 5, 6, 12, 16)] == [24, 40, 24, 24, 16]
    assert shared_by(129, 8) == 129 <= MOST_STRANDS < 129 * 8


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        (None, "shoal.Optimizer needs dht=: "),
        (shoal.Cluster(strands=1), "shoal.Cluster(strands=1) needs dht=: "),
        (shoal.Cluster(strands=2), "shoal.Cluster(strands=2) needs dht= in every rank: "),
    ],
    ids=["alone", "one strand", "strands"],
)
def test_who_is_in_the_run_needs_a_dht(cluster: shoal.Cluster | None, said: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=re.escape(said)):
        shoal.Optimizer(
            dht=None,
            run_id="r",
            target_batch_size=4,
            batch_size_per_step=4,
            params=model.parameters(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            cluster=cluster,
        )
