"""An averager of one vector. It can be told to kill itself with SIGKILL at a given point of a round, so that a test
hits the phase that it means."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch

import shoal
from shoal.compression import compression_by_spec
from shoal.swarm.protocol.actions import Send
from shoal.swarm.protocol.messages import Begin, Commit, Part, Result
from shoal.swarm.swarm import Swarm
from tests.workers.killed import before_sending, die

KINDS = {"part": Part, "result": Result, "begin": Begin, "commit": Commit}


class Round(TypedDict):
    """What came of one."""

    seconds: float
    members: list[str]
    digest: str
    first: float
    last: float
    join_to_begin: float | None


class Rounds(TypedDict):
    """How many members each of several had, and all commits so far: the tip that it was made from, and the digest."""

    sizes: list[int]
    commits: list[tuple[str, str]]


def memory(which: str) -> int:
    """Bytes that this process holds ("VmRSS"), or has held at most ("VmHWM")."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(which))


class Averager:
    """The averager.

    Args:
        elements: of the vector, of float32.
        options: of the averager, compressions by their specs.
        dht: options of the DHT.
    """

    def __init__(
        self, initial_peers: list[str], elements: int, options: dict[str, Any], dht: dict[str, Any] | None = None
    ) -> None:
        self.dht = shoal.DHT(initial_peers, start=True, **(dht or {}))
        self._tensor = torch.zeros(elements)
        for name in {"compression", "state_compression"} & set(options):
            options[name] = compression_by_spec(options[name])
        self._averager = shoal.DecentralizedAverager([self._tensor], self.dht, start=True, prefix="test", **options)
        assert self._averager._engine.swarm is not None
        self._swarm = self._averager._engine.swarm
        self._commits: list[tuple[str, str]] = []
        advance = self._swarm.peer.participant.advance

        def advancing(commit: Commit) -> None:
            self._commits.append((f"{commit.tip.epoch} {commit.tip.lineage.hex()}", commit.root.hex()))
            advance(commit)

        self._swarm.peer.participant.advance = advancing  # type: ignore[method-assign]

    def die(self, where: Literal["part", "result", "begin", "commit"], number: int) -> None:
        """When it is about to send the `number`-th part or result, or when as coordinator it has told `number` members
        that a round begins or is committed."""
        sent, perform = 0, Swarm._do

        def look(swarm: Swarm, action: Send) -> None:
            nonlocal sent
            if not isinstance(action.message, KINDS[where]) or (where == "begin" and swarm.peer.leading is None):
                return
            if where in ("begin", "commit"):
                perform(swarm, dataclasses.replace(action, to=action.to[:number]))
                time.sleep(0.1)
                die()
            sent += 1
            if sent == number:
                die()

        before_sending(look)

    def coordinator(self) -> str:
        return str(self._swarm.peer.participant.coordinator().peer)

    def members(self, count: int, seconds: float) -> tuple[list[str], float]:
        """Wait until it is connected to so many, itself included, but no longer than that; who they are, and how long
        that took."""
        started = time.monotonic()
        while len(found := self._swarm.peer.view.connected()) != count and time.monotonic() < started + seconds:
            time.sleep(0.02)
        return sorted(str(member.peer) for member in found), time.monotonic() - started

    def forget(self, peers: list[str]) -> None:
        """As if it had never heard of these."""

        async def forget() -> None:
            for key in peers:
                self._swarm.peer.view.members.pop(shoal.PeerID.parse(key).key, None)

        self.dht.reactor.run(forget())

    def round(
        self,
        value: float,
        *,
        seed: int | None = None,
        timeout: float = 60.0,
        weight: float | None = None,
        save: str | None = None,
    ) -> Round:
        """One round with a vector full of `value`, or of random numbers; what came of it, and what is owed to later
        rounds, into that file."""
        with self._averager.get_tensors():
            self._tensor.fill_(value)
            if seed is not None:
                self._tensor.copy_(torch.randn(len(self._tensor), generator=torch.Generator().manual_seed(seed)))
        started = time.perf_counter()
        gathered = self._averager.step(timeout=timeout, weight=weight)
        report = self._averager.last_round
        assert report is not None
        if save is not None:
            residual = self._averager._vector.residuals[0]
            owed = torch.zeros_like(self._tensor) if residual is None else residual.values
            torch.save((self._tensor, owed), save)
        return Round(
            seconds=time.perf_counter() - started,
            members=sorted(map(str, gathered)),
            digest=report.digest,
            first=self._tensor[0].item(),
            last=self._tensor[-1].item(),
            join_to_begin=report.join_to_begin_seconds,
        )

    def until(self, members: int, seconds: float) -> Rounds:
        """Rounds until one had so many members, but no longer than that."""
        sizes: list[int] = []
        deadline = time.monotonic() + seconds
        while members not in sizes and time.monotonic() < deadline:
            try:
                sizes.append(len(self._averager.step(timeout=seconds)))
            except shoal.AveragingError:
                sizes.append(0)
        return Rounds(sizes=sizes, commits=self._commits)

    def load(self) -> tuple[int, int]:
        """Download the state of another: bytes of memory that this took at most, and that are left of it."""
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
        loaded = self._averager.load_state_from_peers(timeout=60.0)
        assert loaded is not None
        with self._averager.get_tensors():
            self._tensor.copy_(loaded[1][0])
        del loaded
        return memory("VmHWM") - before, memory("VmRSS") - before
