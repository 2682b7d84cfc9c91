"""Clusters as peers of a run: the same bits everywhere, the same numbers as one process, and an end by name."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.cluster.clusters import Clusters, clusters
from tests.workers.cluster import OPTIMIZERS, Odd, batch_of

pytestmark = pytest.mark.processes
WITHIN = 10.0  # seconds in which all ranks end after one is lost


def one_process(optimizer: str, ranks: int, epochs: int) -> list[torch.Tensor]:
    """The parameters that a single process has which sees the samples of all ranks."""
    model = Odd()
    stepper = OPTIMIZERS[optimizer](model.parameters())
    for epoch in range(epochs):
        batches = [batch_of(epoch, part) for part in range(ranks)]
        inputs, outputs = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
        stepper.zero_grad()
        nn.functional.mse_loss(model(inputs), outputs).backward()
        stepper.step()
    return [parameter.detach() for parameter in model.parameters()]


def check_alike(made: Clusters, epochs: int) -> None:
    """All ranks of all clusters had the same bits after each epoch."""
    everybody = [(number, rank) for number, ranks in enumerate(made.all) for rank in range(len(ranks))]
    found = {tuple(made.digests(*who).items()) for who in everybody}
    assert len(found) == 1, made.logs()
    assert list(dict(found.pop())) == list(range(1, epochs + 1))


def check_numbers(made: Clusters, optimizer: str, ranks: int, epochs: int) -> None:
    expected = one_process(optimizer, ranks, epochs)
    parameters = next(said["parameters"] for said in made.said(0, 0) if "parameters" in said)
    for mine, theirs in zip(parameters, expected, strict=True):
        torch.testing.assert_close(torch.tensor(mine), theirs, rtol=1e-5, atol=1e-6)


def test_a_cluster_of_each_kind_and_a_single_peer_train_one_model(tmp_path: Path) -> None:
    with clusters(tmp_path, 5, optimizer="sgd", epochs=6, min_peers=3) as made:
        made.add("ddp", 2, 0)
        made.add("fsdp2", 2, 2)
        made.add("plain", 1, 4, cluster=False)
        assert made.ended() == [[0, 0], [0, 0], [0]], made.logs()
        check_alike(made, 6)
        check_numbers(made, "sgd", 5, 6)


@pytest.mark.parametrize("kind", ["colwise", "rowwise"])
def test_tensor_parallel_ranks_count_their_samples_once(tmp_path: Path, kind: str) -> None:
    with clusters(tmp_path, 2, optimizer="adamw", epochs=4, min_peers=2) as made:
        made.add(kind, 2, 0)
        made.add("plain", 1, 1, cluster=False)
        assert made.ended() == [[0, 0], [0]], made.logs()
        check_alike(made, 4)
        check_numbers(made, "adamw", 2, 4)


@pytest.mark.parametrize("mode", ["diloco", "delayed"])
def test_ranks_have_the_bits_of_rank_0_in_every_mode(tmp_path: Path, mode: str) -> None:
    """Where inner steps move the model, or a step comes late, peers differ between the ends of epochs: ranks do not."""
    with clusters(tmp_path, 3, optimizer="sgd", epochs=6, min_peers=2, mode=mode, waits=mode != "delayed") as made:
        made.add("fsdp2", 2, 0)
        made.add("plain", 1, 2, cluster=False)
        assert made.ended() == [[0, 0], [0]], made.logs()
        assert made.digests(0, 0) == made.digests(0, 1)
        assert max(made.digests(0, 0)) >= 6
        if mode == "diloco":
            assert made.digests(0, 0) == made.digests(1, 0)


@pytest.mark.long
def test_two_clusters_of_four_ranks(tmp_path: Path) -> None:
    with clusters(tmp_path, 8, optimizer="adamw", epochs=20, min_peers=2, strands=8) as made:
        made.add("hsdp", 4, 0)
        made.add("hsdp", 4, 4)
        assert made.ended() == [[0] * 4] * 2, made.logs()
        check_alike(made, 20)
        check_numbers(made, "adamw", 8, 20)


def check_end(made: Clusters, lost: int, within: float = WITHIN) -> None:
    """Kill that rank of the last cluster: all of it ends, and says who was lost."""
    number, victims = len(made.all) - 1, made.all[-1]
    victims[lost].kill()
    others = [rank for rank in range(len(victims)) if rank != lost]
    made.wait(lambda: all(victims[rank].process.poll() is not None for rank in others), within)
    for rank in others:
        assert victims[rank].wait(1.0) != 0
        assert f"rank {lost} (process {victims[lost].process.pid} on " in made.log(number, rank), made.logs()


@pytest.mark.parametrize(("kind", "size", "lost"), [("ddp", 2, 0), ("fsdp2", 4, 2)])
def test_a_killed_rank_ends_its_cluster_by_name_and_the_others_go_on(
    tmp_path: Path, kind: str, size: int, lost: int
) -> None:
    with clusters(tmp_path, 4, optimizer="sgd", epochs=4000, waits=False) as made:
        made.add("ddp", 2, 0)
        made.add(kind, size, 2)
        made.wait(lambda: len(made.digests(1, 1)) > 3)
        check_end(made, lost)
        before = max(made.digests(0, 0))
        made.wait(lambda: max(made.digests(0, 0)) > before + 3, 10.0)
        mine, theirs = made.digests(0, 0), made.digests(1, 1)
        assert all(mine[epoch] == digest for epoch, digest in theirs.items() if epoch in mine)


def test_it_ends_while_rank_0_waits_for_other_peers(tmp_path: Path) -> None:
    with clusters(tmp_path, 2, optimizer="sgd", epochs=3, min_peers=2, matchmaking_time=600.0) as made:
        made.add("ddp", 2, 0)
        made.wait(lambda: made.said(0, 0) and made.said(0, 1))
        time.sleep(1.0)  # nothing says that it waits now; if it does not yet, the test is only easier
        check_end(made, 1)


def test_ranks_with_other_gradients_are_told_to_reduce_them(tmp_path: Path) -> None:
    with clusters(tmp_path, 2, optimizer="sgd", epochs=3) as made:
        made.add("plain", 2, 0)
        assert made.ended() == [[3, 3]], made.logs()
        assert "have other gradients: wrap the model in DistributedDataParallel" in made.said(0, 0)[-1]["error"]
        said = made.said(0, 1)[-1]
        assert said["kind"] == "ClusterError"
        assert "rank 0" in said["error"]
        assert "have other gradients" in said["error"]


def test_a_checkpoint_of_rank_0_goes_on_in_a_cluster_of_another_kind(tmp_path: Path) -> None:
    file = str(tmp_path / "checkpoint")
    with clusters(tmp_path / "first", 2, optimizer="adamw", epochs=3, save=file) as made:
        made.add("ddp", 2, 0)
        assert made.ended() == [[0, 0]], made.logs()
    with clusters(tmp_path / "second", 2, optimizer="adamw", epochs=6, load=file) as made:
        made.add("fsdp2", 2, 0)
        assert made.ended() == [[0, 0]], made.logs()
        assert list(made.digests(0, 1)) == [4, 5, 6]
        check_numbers(made, "adamw", 2, 6)
