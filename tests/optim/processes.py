"""Processes that train, shared by the tests of this folder: starting one costs seconds, a new training in it does
not."""

from __future__ import annotations

import queue
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from tests.peers import PeerProcess
from tests.waiting import wait_until


class Pool:
    """Worker processes that are idle, or train in a test."""

    def __init__(self) -> None:
        self.idle: list[PeerProcess] = []
        self.busy: list[PeerProcess] = []

    def take(self, count: int) -> list[PeerProcess]:
        """So many workers, running but without a training."""
        new = [PeerProcess("tests.optim.worker", {}) for _ in range(count - len(self.idle))]
        self.busy += new
        for worker in new:
            worker.started()
        taken = [self.idle.pop() for _ in range(min(count, len(self.idle)))]
        self.busy += taken
        return [*taken, *new]

    def put_back(self, worker: PeerProcess) -> None:
        """It has no training after all."""
        self.busy.remove(worker)
        self.idle.append(worker)

    def give_back(self, workers: list[PeerProcess]) -> None:
        """End their trainings; those that do not obey are killed."""
        told = []
        for worker in workers:
            try:
                worker.tell(do="end")
                told.append(worker)
            except OSError:
                worker.end()
        for worker in told:
            try:
                obeyed = worker.hear(20.0) == {"ok": True}
            except queue.Empty:
                obeyed = False
            if obeyed:
                self.idle.append(worker)
            else:
                worker.end()
        self.busy = [worker for worker in self.busy if worker not in workers]

    def end(self) -> None:
        for worker in self.idle + self.busy:
            worker.end()


class Peers:
    """The peers of one test, which find each other through the first.

    Args:
        pool: where their processes come from.
        run: arguments of all, see `Training.make_optimizer` in worker.py.
    """

    def __init__(self, pool: Pool, run: dict[str, Any]) -> None:
        self._pool, self._run = pool, run
        self.all: list[PeerProcess] = []

    def add(self, count: int, **differing: Any) -> list[PeerProcess]:
        """Begin the training of more peers, and wait until they have; an option that is a list has one item for
        each."""
        workers = self._pool.take(count)
        self.all += workers
        run = self._run | differing
        for index, worker in enumerate(workers):
            own = {key: value[index] if isinstance(value, list) else value for key, value in run.items()}
            worker.tell(do="begin", initial_peers=self.addresses, run=own)
            if not self.addresses:
                worker.started()
        for worker in workers:
            if not worker.addresses:
                worker.started()
        return workers

    @property
    def addresses(self) -> list[str]:
        return next((worker.addresses for worker in self.all if worker.addresses), [])


@contextmanager
def training(pool: Pool, count: int, **run: Any) -> Iterator[Peers]:
    """`count` peers that have begun a run, not yet a step."""
    peers = Peers(pool, run)
    try:
        peers.add(count)
        yield peers
    finally:
        for worker in peers.all:
            worker.go_on()
            worker.addresses, worker.peer = [], ""
        pool.give_back(peers.all)


def five_more(peers: list[PeerProcess]) -> tuple[list[Any], list[list[dict[str, Any]]]]:
    """Let them train for five epochs, and stop them at the same one. Returns what each ends with, and its events."""
    seen = len(events(peers[0]))
    wait_until(lambda: len(events(peers[0])) >= seen + 5)
    last = max(event["epoch"] for peer in peers for event in events(peer)) + 3
    for peer in peers:
        peer.tell(do="stop", epoch=last)
    return [peer.hear() for peer in peers], [events(peer) for peer in peers]


def by_epoch(histories: Iterable[list[dict[str, Any]]]) -> dict[int, str]:
    """The digest of each epoch, from the reports of several peers; all must have had the same, by step or download."""
    digests: dict[int, dict[str, list[str]]] = {}
    for peer, history in enumerate(histories):
        for event in history:
            who = f"peer {peer}: {event['kind']} of {event.get('peers')} at {event['time']:.3f}"
            digests.setdefault(event["epoch"], {}).setdefault(event["digest"], []).append(who)
    differing = [epoch for epoch, found in sorted(digests.items()) if len(found) > 1]
    assert not differing, f"states differed after epochs {differing}; after the first: {digests[differing[0]]}"
    return {epoch: digest for epoch, found in digests.items() for digest in found}


def events(peer: PeerProcess) -> list[dict[str, Any]]:
    """What its optimizer has reported so far."""
    return list(peer.ask(do="report")["events"])


def gaps(history: Iterable[dict[str, Any]]) -> list[tuple[float, float]]:
    """(when, after how long) for each report but the first, in seconds of the machine's monotonic clock."""
    return [(end, end - start) for start, end in pairwise(event["time"] for event in history)]
