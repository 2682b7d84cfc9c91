"""Processes that train, shared by the tests of this folder: starting one costs seconds, a new training in it does
not."""

from __future__ import annotations

import inspect
import queue
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import msgspec

from tests.peers import Ended, Worker
from tests.peers import Failed as Failed
from tests.peers import ask_all as ask_all
from tests.waiting import wait_until
from tests.workers.training import State
from tests.workers.training import Trained as Trained
from tests.workers.training import Training as Training

Peer = Worker[Training]
OPTIONS = inspect.signature(Training).parameters


class Pool:
    """Worker processes that are idle, or train in a test."""

    def __init__(self) -> None:
        self.idle: list[Peer] = []
        self._all: list[Peer] = []

    def take(self, count: int) -> list[Peer]:
        """So many workers, without a training."""
        new = [Worker(Training) for _ in range(count - len(self.idle))]
        self._all += new
        return new + [self.idle.pop() for _ in range(count - len(new))]

    def give_back(self, workers: list[Peer]) -> None:
        """End their trainings; those that do not obey are killed."""
        told = []
        for worker in workers:
            try:
                told.append((worker, worker.tell(Training.end)))
            except OSError:
                worker.end()
        for worker, answer in told:
            try:
                answer(timeout=20.0)
                self.idle.append(worker)
            except (queue.Empty, Ended, Failed, msgspec.ValidationError):
                worker.end()

    def end(self) -> None:
        for worker in self._all:
            worker.end()


def begin(worker: Peer, initial_peers: list[str], run: dict[str, Any]) -> None:
    """Tell it to train in a run of these options; those that Training does not know are the optimizer's."""
    own = {name: value for name, value in run.items() if name in OPTIONS}
    worker.begin(Training, initial_peers, {name: run[name] for name in run if name not in OPTIONS}, **own)


class Peers:
    """The peers of one test, which find each other through the first.

    Args:
        pool: where their processes come from.
        run: options of all, see `begin`.
    """

    def __init__(self, pool: Pool, run: dict[str, Any]) -> None:
        self._pool, self._run = pool, run
        self.all: list[Peer] = []

    def add(self, count: int, **differing: Any) -> list[Peer]:
        """Begin the training of more peers, and wait until they have; an option that is a list has one item for
        each."""
        workers = self._pool.take(count)
        self.all += workers
        run = self._run | differing
        for index, worker in enumerate(workers):
            own = {key: value[index] if isinstance(value, list) else value for key, value in run.items()}
            begin(worker, self.addresses, own)
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


def fixed(
    peers: list[Peer], shares: Sequence[tuple[int, int]], epochs: int, parts: Sequence[int] = ()
) -> list[Trained]:
    """Let each train on its share of the fixed batches up to that epoch, in so many parts."""
    told = [
        peer.tell(Training.fixed, share, epochs, number)
        for peer, share, number in zip(peers, shares, parts or [1] * len(peers), strict=True)
    ]
    return [trained() for trained in told]


def stopped(peers: list[Peer], more: int = 3) -> list[State]:
    """Let them train for so many epochs more than the first of them has, and stop them at the same one."""
    last = max(event["epoch"] for peer in peers for event in events(peer)) + more
    return ask_all(peers, Training.stop, last)


def five_more(peers: list[Peer]) -> tuple[list[State], list[list[dict[str, Any]]]]:
    """Let them train for five epochs, and stop them at the same one. Returns what each ends with, and its events."""
    seen = len(events(peers[0]))
    wait_until(lambda: len(events(peers[0])) >= seen + 5)
    return stopped(peers), [events(peer) for peer in peers]


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


def events(peer: Peer) -> list[dict[str, Any]]:
    """What its optimizer has reported so far."""
    return peer.ask(Training.report)["events"]


def gaps(history: Iterable[dict[str, Any]]) -> list[tuple[float, float]]:
    """(when, after how long) for each report but the first, in seconds of the machine's monotonic clock."""
    return [(end, end - start) for start, end in pairwise(event["time"] for event in history)]
