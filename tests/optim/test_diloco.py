"""Runs with an outer optimizer, of real processes: the same numbers as torchft and torch, and the same bits at all."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.peers import Worker, ask_all
from tests.soaked import only_in_soak
from tests.waiting import wait_until
from tests.workers import outer as worker
from tests.workers.outer import OuterTraining

pytestmark = pytest.mark.processes
Peer = Worker[OuterTraining]


def add(peers: list[Peer], seed: int, environment: dict[str, str] | None = None, **options: Any) -> Peer:
    """Start one more, which finds the first, and wait until it is in the run."""
    peer = Worker(OuterTraining, environment)
    peers.append(peer)
    peer.begin(OuterTraining, peers[0].addresses, seed, **options)
    peer.started()
    return peer


def epochs(peer: Peer) -> dict[int, dict[str, Any]]:
    """What it has said of each."""
    return {line["epoch"]: line for line in peer.said if line["event"] == "epoch"}


def another_epoch(peer: Peer) -> None:
    """Wait until it has made one more."""
    before = len(epochs(peer))
    wait_until(lambda: len(epochs(peer)) > before)


@contextlib.contextmanager
def swarm(count: int, environment: dict[str, str] | None = None, **options: Any) -> Iterator[list[Peer]]:
    """`count` peers, of which the first has that environment."""
    peers: list[Peer] = []
    try:
        for number in range(count):
            add(peers, number, None if number else environment, **options)
        yield peers
    finally:
        for peer in peers:
            peer.end()


def scalar_model(delay: int, mix: float, steps: int) -> list[list[float]]:
    """What torchft's fragments do to two scalars that all replicas compute alike, before each of `steps` inner steps.
    A fragment's turn has three steps; its drift is taken `delay` steps before the last and applied after that."""
    model, anchor, drift, history = [1.0, 1.0], [1.0, 1.0], 0.0, []
    for number in range(steps):
        history.append(list(model))
        model = [value - worker.INNER_RATE * worker.GRADIENT for value in model]
        step, fragment = number % 3 + 1, number // 3 % 2
        if step == 3 - delay:
            drift = anchor[fragment] - model[fragment]
        if step == 3:
            anchor[fragment] -= worker.OUTER_RATE * drift
            model[fragment] = (1 - mix) * anchor[fragment] + mix * model[fragment]
    return history


@pytest.mark.parametrize(
    ("delay", "mix"),
    [
        (0, 0.0),
        (1, 0.5),
        pytest.param(0, 0.5, marks=only_in_soak),
        pytest.param(0, 1.0, marks=only_in_soak),
        pytest.param(1, 0.0, marks=only_in_soak),
        pytest.param(1, 1.0, marks=only_in_soak),
    ],
)
def test_two_peers_have_the_numbers_of_torchft(delay: int, mix: float) -> None:
    """The setting of torchft's DiLoCoMockedUpdateTest: 7 synchronisations, 84 values, all exact in binary."""
    diloco = {"inner_steps": 6, "fragments": 2, "overlap": delay or None, "mix": mix}
    with swarm(2, is_scalar=True, diloco=diloco, outer=("SGD", {"lr": worker.OUTER_RATE})) as peers:
        ask_all(peers, OuterTraining.train, steps=21)
        for end in ask_all(peers, OuterTraining.trained):
            assert end["history"] == scalar_model(delay, mix, 21)


def oracle(peers: int, rounds: int, inner_steps: int) -> torch.Tensor:
    """The anchor after so many rounds of DiLoCo in one process, with torch's own optimizers."""
    anchor = worker.network()
    outer = torch.optim.SGD(anchor.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    replicas = [worker.network() for _ in range(peers)]
    inners = [worker.make_inner(replica.parameters()) for replica in replicas]
    draws = [random.Random(number) for number in range(peers)]
    for _ in range(rounds):
        for replica, inner, draw in zip(replicas, inners, draws, strict=True):
            replica.load_state_dict(anchor.state_dict())
            for _ in range(inner_steps):
                inner.zero_grad()
                worker.backward(replica, draw)
                inner.step()
        for parameter, *theirs in zip(anchor.parameters(), *(r.parameters() for r in replicas), strict=True):
            parameter.grad = parameter.detach() - torch.stack([p.detach() for p in theirs]).mean(0)
        outer.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in anchor.parameters()])


@pytest.mark.parametrize("capability", ["", pytest.param("default", marks=only_in_soak)])
def test_anchors_are_equal_at_all_and_those_of_torch(capability: str) -> None:
    environment = {"ATEN_CPU_CAPABILITY": capability} if capability else None
    with swarm(4, environment, diloco={"inner_steps": 8}) as peers:
        ask_all(peers, OuterTraining.train, epochs=30)
        ends = ask_all(peers, OuterTraining.trained)
        assert [end["steps"] for end in ends] == [240] * 4
        for epoch in range(1, 31):
            reports = [epochs(peer)[epoch] for peer in peers]
            assert len({report["digest"] for report in reports}) == 1
            assert {(report["peers"], report["samples"]) for report in reports} == {(4, 4 * 8 * worker.BATCH)}
        for end in ends:
            torch.testing.assert_close(torch.tensor(end["anchor"]), oracle(4, 30, 8), rtol=1e-5, atol=1e-5)


def test_a_newcomer_has_the_anchor_and_the_momentum_of_the_others_and_no_drift() -> None:
    options: dict[str, Any] = {"diloco": {"inner_steps": 8}, "pause": 0.06}
    with swarm(2, **options) as peers:
        first, second = peers
        ask_all(peers, OuterTraining.train, epochs=1 << 30)
        another_epoch(first)
        newcomer = add(peers, 7, **options)
        newcomer.ask(OuterTraining.train, epochs=1 << 30)
        another_epoch(newcomer)
        ask_all(peers, OuterTraining.stop, max(epochs(first)) + 8)
        ends = ask_all(peers, OuterTraining.trained)
        download = next(line for line in newcomer.said if line["event"] == "download")
        assert download["drift"] == 0.0
        assert download["steps"] == 0
        known = {epoch: line["digest"] for peer in (first, second) for epoch, line in epochs(peer).items()}
        assert download["digest"] == known[download["epoch"]]
        assert all(line["digest"] == known[epoch] for epoch, line in epochs(newcomer).items())
        assert len({end["momentum"] for end in ends}) == 1


KILLS = int(os.environ.get("SHOAL_KILLS", "4"))  # in `make soak` 20


@pytest.mark.long
@pytest.mark.parametrize("overlap", [None, pytest.param("free", marks=pytest.mark.skipif(KILLS < 20, reason="soak"))])
def test_a_killed_peer_costs_no_survivor_an_inner_step(overlap: str | None) -> None:
    """In each of some epochs one of four is killed at a random moment, and another comes in its place."""
    draw = random.Random(18)
    options: dict[str, Any] = {
        "diloco": {"inner_steps": 8, "overlap": overlap, "mix": "keep"}, "pause": 0.1,
    }  # fmt: skip
    with swarm(4, **options) as peers:
        living = list(peers)
        first = {peer.peer for peer in peers}
        ask_all(peers, OuterTraining.train, epochs=1 << 30)
        for number in range(KILLS):
            another_epoch(living[0])
            time.sleep(draw.uniform(0.0, 0.8))
            victim = living.pop(draw.randrange(1, len(living)))
            victim.kill()
            living.append(add(peers, 100 + number, **options))
            living[-1].ask(OuterTraining.train, epochs=1 << 30)
        ask_all(living, OuterTraining.stop, max(epochs(living[0])) + 4)
        ends = ask_all(living, OuterTraining.trained)
        weights: dict[int, dict[str, float]] = {}
        digests: dict[int, set[str]] = {}
        for peer in peers:
            for epoch, line in epochs(peer).items():
                weights.setdefault(epoch, line["weights"])
                digests.setdefault(epoch, set()).add(line["digest"])
        assert all(len(found) == 1 for found in digests.values())
        assert len({tuple(end["anchor"]) for end in ends}) == 1
        for peer, end in zip(living, ends, strict=True):
            brought = sum(line.get(peer.peer, 0.0) for line in weights.values())
            assert brought + end["pending"] == end["steps"] * worker.BATCH
            # A newcomer whose download was overtaken by a round makes another one before its first inner step: in the
            # same call, or in the next.
            downloads = [line["calls"] for line in peer.said if line["event"] == "download" and line["steps"] == 0]
            early = len(set(downloads))
            print(f"downloads of {peer.peer} before its first inner step, by call: {downloads}")
            assert end["calls"] - end["steps"] == early, "only the first gradients of who downloads are of no use"
            assert bool(early) == (peer.peer not in first)
        for line in epochs(living[0]).values():
            assert line["samples"] == sum(weights[line["epoch"]].values())
        times = [line["time"] for line in epochs(living[0]).values()]
        gaps = sorted(after - before for before, after in itertools.pairwise(times))
        print(f"epochs: {len(times)}; seconds: median {gaps[len(gaps) // 2]:.2f}, longest {gaps[-1]:.2f}")
        assert gaps[-1] < gaps[len(gaps) // 2] + 3.0
