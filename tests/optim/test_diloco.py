"""Runs with an outer optimizer, of real processes: the same numbers as torchft and torch, and the same bits at all."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from tests.optim import outer_worker as worker
from tests.peers import ROOT
from tests.soaked import only_in_soak

pytestmark = pytest.mark.processes
PATIENT = {"matchmaking_time": 10.0}


class Peer:
    """A process of `outer_worker`, with an environment of its own."""

    def __init__(self, options: dict[str, Any], **environment: str) -> None:
        command = [sys.executable, "-m", "tests.optim.outer_worker", json.dumps(options)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.lines: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.seen: list[dict[str, Any]] = []

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):  # one that was killed has not ended its last line
                self.lines.put(json.loads(line))
        self.lines.put(None)

    def hear(self, event: str = "", timeout: float = 120.0) -> dict[str, Any]:
        """The next line with that event; those before are kept."""
        while True:
            line = self.lines.get(timeout=timeout)
            assert line is not None, f"the peer has ended: {self.process.wait(10)}"
            self.seen.append(line)
            if line.get("event", "") == event:
                return line

    def tell(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL; what it has said is still heard."""
        self.process.kill()
        self.process.wait()
        while (line := self.lines.get(timeout=10)) is not None:
            self.seen.append(line)

    def epochs(self) -> dict[int, dict[str, Any]]:
        return {line["epoch"]: line for line in self.seen if line.get("event") == "epoch"}


@contextlib.contextmanager
def swarm(count: int, options: dict[str, Any], *own: dict[str, Any]) -> Iterator[list[Peer]]:
    """`count` peers; `own` has what differs for the first of them (`environment` is of its process)."""
    peers: list[Peer] = []
    addresses: list[str] = []
    try:
        for number in range(count):
            given = {
                "initial_peers": addresses,
                "seed": number,
                **options,
                **(own[number] if number < len(own) else {}),
            }
            peers.append(Peer(given, **given.pop("environment", {})))
            if not addresses:
                addresses = peers[0].hear()["addresses"]
        for peer in peers[1:]:
            peer.hear()
        yield peers
    finally:
        for peer in peers:
            peer.process.kill()
            peer.process.communicate()


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
    diloco = {
        "inner_steps": 6, "fragments": 2, "overlap": delay or None, "mix": mix,
        "outer": ["SGD", {"lr": worker.OUTER_RATE}],
    }  # fmt: skip
    with swarm(2, {"scalars": True, "diloco": diloco, "arguments": PATIENT}) as peers:
        for peer in peers:
            peer.tell(do="train", steps=21)
        for peer in peers:
            assert peer.hear("end")["history"] == scalar_model(delay, mix, 21)


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
    own = [{}, {"environment": {"ATEN_CPU_CAPABILITY": capability}} if capability else {}]
    options = {"diloco": {"inner_steps": 8}, "arguments": PATIENT}
    with swarm(4, options, *own) as peers:
        for peer in peers:
            peer.tell(do="train", epochs=30)
        ends = [peer.hear("end") for peer in peers]
        assert [end["steps"] for end in ends] == [240] * 4
        for epoch in range(1, 31):
            reports = [peer.epochs()[epoch] for peer in peers]
            assert len({report["digest"] for report in reports}) == 1
            assert {(report["peers"], report["samples"]) for report in reports} == {(4, 4 * 8 * worker.BATCH)}
        for end in ends:
            torch.testing.assert_close(torch.tensor(end["anchor"]), oracle(4, 30, 8), rtol=1e-5, atol=1e-5)


def test_a_newcomer_has_the_anchor_and_the_momentum_of_the_others_and_no_drift() -> None:
    options = {"diloco": {"inner_steps": 8}, "arguments": PATIENT, "pause": 0.06}
    with swarm(2, options) as peers:
        for peer in peers:
            peer.tell(do="train", epochs=18)
        addresses = peers[0].seen[0]["addresses"]
        peers[0].hear("epoch")
        newcomer = Peer({"initial_peers": addresses, "seed": 7, **options})
        try:
            newcomer.hear()
            newcomer.tell(do="train", epochs=18)
            download = newcomer.hear("download")
            assert download["drift"] == 0.0
            assert download["steps"] == 0
            ends = [peer.hear("end") for peer in [*peers, newcomer]]
            known = {epoch: line["digest"] for peer in peers for epoch, line in peer.epochs().items()}
            assert download["digest"] == known[download["epoch"]]
            for epoch, line in newcomer.epochs().items():
                assert line["digest"] == known[epoch]
            assert len({end["momentum"] for end in ends}) == 1
            assert newcomer.epochs(), "it has trained with them"
        finally:
            newcomer.process.kill()
            newcomer.process.communicate()


KILLS = int(os.environ.get("SHOAL_KILLS", "4"))  # in `make soak` 20


@pytest.mark.long
@pytest.mark.parametrize("overlap", [None, pytest.param("free", marks=pytest.mark.skipif(KILLS < 20, reason="soak"))])
def test_a_killed_peer_costs_no_survivor_an_inner_step(overlap: str | None) -> None:
    """In each of some epochs one of four is killed at a random moment, and another comes in its place."""
    draw = random.Random(18)
    diloco = {"inner_steps": 8, "overlap": overlap, "mix": "keep"}
    options = {"diloco": diloco, "arguments": PATIENT, "pause": 0.1}
    with swarm(4, options) as peers:
        everyone, living = list(peers), list(peers)
        addresses = [address for peer in peers for address in peer.seen[0]["addresses"]]
        names = {id(peer): peer.seen[0]["peer"] for peer in peers}
        first = set(names.values())
        for peer in peers:
            peer.tell(do="train", epochs=1 << 30)
        for number in range(KILLS):
            witness = living[0]
            witness.hear("epoch")
            time.sleep(draw.uniform(0.0, 0.8))
            victim = living.pop(draw.randrange(1, len(living)))
            victim.kill()
            newcomer = Peer({"initial_peers": addresses, "seed": 100 + number, **options})
            peers.append(newcomer)  # so that it is ended with them
            everyone.append(newcomer)
            names[id(newcomer)] = newcomer.hear()["peer"]
            newcomer.tell(do="train", epochs=1 << 30)
            living.append(newcomer)
        last = max(living[0].epochs()) + 4
        for peer in living:
            peer.tell(do="stop", epoch=last)
        ends = {names[id(peer)]: peer.hear("end") for peer in living}
        weights: dict[int, dict[str, float]] = {}
        digests: dict[int, set[str]] = {}
        for peer in everyone:
            for epoch, line in peer.epochs().items():
                weights.setdefault(epoch, line["weights"])
                digests.setdefault(epoch, set()).add(line["digest"])
        assert all(len(found) == 1 for found in digests.values())
        assert len({tuple(end["anchor"]) for end in ends.values()}) == 1
        for name, end in ends.items():
            brought = sum(line.get(name, 0.0) for line in weights.values())
            assert brought + end["pending"] == end["steps"] * worker.BATCH
            # A newcomer whose download was overtaken by a round makes another one before its first inner step: in the
            # same call, or in the next.
            seen = next(peer.seen for peer in living if names[id(peer)] == name)
            downloads = [line["calls"] for line in seen if line.get("event") == "download" and line["steps"] == 0]
            early = len(set(downloads))
            print(f"downloads of {name} before its first inner step, by call: {downloads}")
            assert end["calls"] - end["steps"] == early, "only the first gradients of who downloads are of no use"
            assert bool(early) == (name not in first)
        for line in living[0].epochs().values():
            assert line["samples"] == sum(weights[line["epoch"]].values())
        times = [line["time"] for line in living[0].epochs().values()]
        gaps = sorted(after - before for before, after in itertools.pairwise(times))
        print(f"epochs: {len(times)}; seconds: median {gaps[len(gaps) // 2]:.2f}, longest {gaps[-1]:.2f}")
        assert gaps[-1] < gaps[len(gaps) // 2] + 3.0
