"""What makes no sense is refused before anything is changed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

import shoal


def test_strands_that_are_not_built_are_refused() -> None:
    with pytest.raises(ValueError, match="only strands=1 is built"):
        shoal.Cluster(strands=2)


def test_a_cluster_needs_a_process_group() -> None:
    with pytest.raises(ValueError, match=r"init_process_group"):
        shoal.Cluster(strands=1)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which torch replaces
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield shoal.Cluster()
    dist.destroy_process_group()


def test_what_is_no_group_is_refused(cluster: shoal.Cluster) -> None:
    with pytest.raises(ValueError, match="give a process group or a device mesh"):
        shoal.Cluster("nccl")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cluster": "all"}, "cluster='all': give a shoal.Cluster"),
        ({"reuse_grad_buffers": True}, "cluster=… does not go together with reuse_grad_buffers=True"),
        ({"params": None}, "cluster=… needs params="),
    ],
)
def test_what_does_not_go_together_is_refused(cluster: shoal.Cluster, given: dict[str, Any], message: str) -> None:
    arguments = {"cluster": cluster, "params": nn.Linear(2, 1).parameters(), **given}
    with shoal.DHT(start=True) as dht, pytest.raises(ValueError, match=message):
        shoal.Optimizer(
            dht=dht, run_id="r", target_batch_size=4, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), **arguments
        )


def test_a_cluster_of_one_rank_is_a_peer(cluster: shoal.Cluster) -> None:
    model = nn.Linear(2, 1)
    with shoal.DHT(start=True) as dht:
        optimizer = shoal.Optimizer(
            dht=dht,
            run_id="r",
            target_batch_size=4,
            params=model.parameters(),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
            cluster=cluster,
        )
        before = model.weight.detach().clone()
        model(torch.ones(4, 2)).sum().backward()
        with pytest.raises(ValueError, match="takes no grad_scaler"):
            optimizer.step(batch_size=4, grad_scaler=shoal.GradScaler("cpu"))
        optimizer.step(batch_size=4)
        assert optimizer.local_epoch == 1
        assert not torch.equal(model.weight, before)
        optimizer.shutdown()
