"""What a cluster of a framework's processes is made of, and how many samples are behind its gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

import shoal
from shoal.integrations.accelerate import swarm
from shoal.integrations.lightning import ClusterStrategy, SwarmStrategy
from shoal.integrations.ranks import LaunchedRanks
from shoal.integrations.samples import Samples
from shoal.integrations.terms import refuse_scaler
from tests.integrations.tiny import inputs

SIZES = [[4, 4, 2], [4, 3, 1]]  # of the batches of each rank in a step


class Together(LaunchedRanks):
    """A rank of two, which are told what a collective would give."""

    def __init__(self, total: int) -> None:
        super().__init__()
        self.size, self._total = 2, total

    def of_first(self, number: int) -> int:
        return SIZES[0][0]

    def total(self, number: int) -> int:
        return self._total


def test_the_gradient_is_the_mean_over_the_samples_of_all_ranks() -> None:
    total = sum(map(sum, SIZES))
    rows = inputs(total).split([size for sizes in SIZES for size in sizes])
    model = nn.Linear(8, 1)
    counts, reduced = [], torch.zeros_like(model.weight)
    kept = [Samples(Together(total)), Samples(Together(total))]
    for number, (sizes, samples) in enumerate(zip(SIZES, kept, strict=True)):
        for batch in rows[3 * number : 3 * number + 3]:
            samples.size = len(batch)
            (gradient,) = torch.autograd.grad(
                model(batch).square().mean() / len(sizes) * samples.weight(), model.weight
            )
            reduced += gradient / len(SIZES)  # as DistributedDataParallel does
    for samples in kept:
        model.weight.grad = reduced.clone()
        counts.append(samples.finish([model.weight], 3))
        (expected,) = torch.autograd.grad(model(inputs(total)).square().mean(), model.weight)
        torch.testing.assert_close(model.weight.grad, expected)
    assert counts == [10, 8]


def test_what_is_no_cluster_of_all_processes_is_refused(dht: shoal.DHT, monkeypatch: pytest.MonkeyPatch) -> None:
    def join(**given: Any) -> Any:
        run = {"dht": dht, "run_id": "refused", "target_batch_size": 8, **given}
        return swarm(Accelerator(cpu=True), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), **run)

    with pytest.raises(ValueError, match=r"dht=None, and this process is in the run .*: give a shoal\.DHT"):
        join(dht=None)
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    with pytest.raises(
        ValueError,
        match=r"asks for 2: give cluster=lambda: shoal\.Cluster\(strands=8\) at all peers .*, and a shoal.DHT in every",
    ):
        join()
    with pytest.raises(ValueError, match=r"cluster= made a int: give cluster=lambda: shoal\.Cluster\(strands=8\)"):
        join(cluster=lambda: 2)
    with pytest.raises(ValueError, match=r"has 1 of the 2 processes of `accelerate launch`"):
        join(cluster=lambda: shoal.Cluster(strands=1))


def test_a_cluster_has_all_processes_and_no_scaler() -> None:
    part = object.__new__(shoal.Cluster)
    part.rank, part.size, part.strands = 1, 2, 1
    assert not LaunchedRanks.of(part, 2, "a launcher").speaks
    with pytest.raises(ValueError, match="has 2 of the 1 processes of a launcher"):
        LaunchedRanks.of(part, 1, "a launcher")
    with pytest.raises(ValueError, match="has 2 of the 4 processes of a launcher, which reduces gradients over all"):
        LaunchedRanks.of(part, 4, "a launcher")
    refuse_scaler(torch.amp.GradScaler("cpu", enabled=False))
    with pytest.raises(ValueError, match="cluster= takes none yet: train in bf16"):
        refuse_scaler(torch.amp.GradScaler("cpu"))


def test_one_process_carries_all_strands_if_there_are_some() -> None:
    assert LaunchedRanks.of(None, 1, "a launcher").cluster is None
    assert LaunchedRanks.of(lambda: shoal.Cluster(strands=1), 1, "a launcher").cluster is None
    alone = LaunchedRanks.of(shoal.Cluster, 1, "a launcher")
    assert alone.cluster is not None
    assert (alone.cluster.strands, alone.size, alone.speaks) == (8, 1, True)


def test_a_strategy_of_several_processes_is_one_of_lightnings_ddp(dht: shoal.DHT) -> None:
    run: dict[str, Any] = {"dht": dht, "run_id": "x", "target_batch_size": 8, "cluster": lambda: 1}
    assert isinstance(SwarmStrategy(**run), ClusterStrategy)
    with pytest.raises(ValueError, match=r"device='cpu' is of one process: with cluster=, the Trainer chooses"):
        SwarmStrategy(device="cpu", **run)
    with pytest.raises(ValueError, match="cluster= makes a ClusterStrategy: let Mine inherit from that"):
        type("Mine", (SwarmStrategy,), {})(**run)
    with pytest.raises(ValueError, match="set the Trainer's gradient_clip_val"):
        SwarmStrategy(max_grad_norm=1.0, **run)
