"""Stand-ins for what a `Pilot` asks: no swarm, no thread, no torch. Tests set what is so, and see what was asked."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from shoal.membership.pin import Pin
from shoal.optim.faults import Faults
from shoal.optim.machine import Machine
from shoal.optim.pilot import Brought, Pilot
from shoal.p2p.identity import PeerID
from shoal.swarm.protocol.contribution import Contribution, Outcome
from shoal.swarm.protocol.loss import Loss
from shoal.swarm.protocol.messages import Begin, Commit
from shoal.swarm.protocol.rules import Rules
from shoal.swarm.protocol.tip import Ballot, Tip
from shoal.swarm.protocol.view import Member, Role

KEYS = [bytes([number]) * 32 for number in range(5)]
ME = KEYS[0]
GENESIS = Tip.genesis("piloted")


class Swarm:
    """What this peer knows of the run."""

    def __init__(self) -> None:
        self.tip = GENESIS
        self.behind: Tip | None = None
        self.called = self.missed = self.made = self.can_replay = False
        self.gate: Any = None
        self.behind_pin = 0
        self.rests_for = 0.0
        self.got_on_at = 0.0
        self.unbelieved: set[bytes] = set()
        self.forgot: list[float] = []
        at = SimpleNamespace(contributed=0)
        self.peer = SimpleNamespace(tips=deque(), participant=SimpleNamespace(over=b"", at=at))

    def rests(self, tip: Tip) -> bool:
        return self.rests_for > 0

    def believes(self, tip: Tip) -> bool:
        return tip.lineage not in self.unbelieved

    def wait_for_room(self, seconds: float) -> float:
        self.rests_for = seconds
        return seconds

    def forget_behind(self, cost: float) -> float:
        self.forgot.append(cost)
        self.behind = None
        return 7.0

    def catch_up(self) -> Tip:
        return self.tip


class Run:
    """Does at once what the reactor would do. `outcomes` are what `average` returns or raises, one after the other."""

    def __init__(self, swarm: Swarm, rules: Rules, me: bytes = ME) -> None:
        self.swarm, self.rules, self.me, self.faults = swarm, rules, me, Faults()
        self.is_over = False
        self.outcomes: list[Outcome | Exception] = []
        self.contributions: list[Contribution] = []
        self.begins: Begin | None = None  # the BEGIN with which each round opens its exchange
        self.unused: Outcome | None = None
        self.here = 1
        self.others: list[PeerID] = []
        self.done: list[Any] = []  # what was asked of the reactor

    def call(self, function: Callable[[], Any]) -> Any:
        return function()

    def average(self, contribution: Contribution, timeout: float) -> Outcome:
        self.contributions.append(contribution)
        found = self.outcomes.pop(0)
        begin = self.begins if isinstance(found, Exception) else found.begin
        if begin is not None:
            contribution.open(begin, lambda *given: None, lambda key, why: None)
        if isinstance(found, Exception):
            raise found
        return found

    def unused_outcome(self, tip: Tip) -> Outcome | None:
        return self.unused

    def follow(self, tip: Tip, after: Tip | None = None) -> bool:
        if after is not None and (self.swarm.tip != after or self.swarm.missed):
            return False
        self.done.append(("follow", tip))
        self.swarm.tip = tip
        return True

    def donors(self) -> list[PeerID]:
        return self.others

    def ask_where_they_are(self, peers: Sequence[PeerID]) -> None:
        self.done.append(("ask", list(peers)))

    def wait_for_pin(self, number: int, timeout: float) -> None:
        self.done.append(("wait for pin", number))

    def wait_for_round(self, tip: Tip, timeout: float) -> None:
        self.done.append(("wait for round", tip))

    def wait_for_contributors(self, count: int, timeout: float) -> int:
        self.done.append(("wait for contributors", count, timeout))
        return self.here

    def wait_for_call(self, timeout: float) -> bool:
        return self.swarm.called

    def learn_of_round(self) -> bool:
        return self.swarm.can_replay

    def past(self, tip: Tip) -> Future[None]:
        return Future()

    def tell_state_changed(self) -> None:
        self.done.append("state changed")

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        self.done.append("loading")
        yield
        self.done.append("loaded")

    def begin_replay(self) -> None:
        self.done.append("replay")


class Tracker:
    """Counts this peer's samples, and says what the test has set."""

    def __init__(self) -> None:
        self.ready_to_update_epoch = False
        self.error: Exception | None = None
        self.reports: list[tuple[float, float]] = []
        self.began: list[Tip] = []
        self.rests: list[bool] = []  # whether each report said that no other step follows
        self.restarts = self.pauses = self.waits = 0

    def report(self, progress: float, *, behind: float = 0.0, rests: bool = False) -> None:
        self.reports.append((progress, behind))
        self.rests.append(rests)
        if self.error is not None:
            raise self.error

    def start_epoch(self, tip: Tip) -> None:
        self.began.append(tip)

    def restart_clock(self) -> None:
        self.restarts += 1

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self.pauses += 1
        yield

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        self.waits += 1
        yield

    def take_waited(self) -> float:
        return 1.5


class Piloted:
    """A `Pilot` with stand-ins for what it asks, and with what it has told."""

    def __init__(self, *, min_peers: float = 1, **rules: Any) -> None:
        share = {} if isinstance(min_peers, int) else {"min_share": min_peers}
        least = {"min_group": min_peers} if isinstance(min_peers, int) else share
        settings: Any = SimpleNamespace(matchmaking_time=3.0, averaging_timeout=60.0, min_peers=min_peers)
        self.swarm, self.tracker, self.events = Swarm(), Tracker(), list[Any]()
        self.run = Run(self.swarm, Rules((4,), 3.0, 60.0, **least, **rules))
        self.machine = Machine(ME, "cpu")
        given: Any = (settings, self.run, self.tracker, self.machine, "SGD", self.events.append)
        self.pilot = Pilot(*given)

    def pin(self, number: int, tip: Tip, *, rewind: bool = False) -> Pin:
        """The owner pins a state."""
        pin = Pin("piloted", number, tip.epoch, tip.samples, tip.lineage, rewind)
        self.swarm.gate = SimpleNamespace(pin=pin)
        return pin


def brought(tip: Tip = GENESIS, samples: float = 8.0, **given: Any) -> Brought:
    usual: dict[str, Any] = {"average": b"", "digest": b"", "options": b"lr", "loss": None}
    return Brought(samples, tip, unknown_of=given.pop("unknown_of", lambda options: ""), **(usual | given))


def outcome_of(
    tip: Tip = GENESIS,
    weights: Sequence[float] = (8.0, 8.0),
    *,
    machines: Sequence[str] = ("cpu",) * 5,
    states: Sequence[bytes] = (b"",) * 5,
    averages: Sequence[bytes] = (b"",) * 5,
    first: int = 0,
    me: bytes = ME,
    with_state: bool = False,
    options: bytes = b"lr of most",
    loss: Loss | None = None,
    seconds: float = 2.0,
) -> Outcome:
    """A committed round of members `first` and so on; number 0 is this peer."""
    count = len(weights)
    members = tuple(Member(key, (), Role.NODE) for key in KEYS[first : first + count])
    begin = Begin(
        tip, Ballot(1, members[0].key), members, tuple(weights), tuple(machines[:count]), tuple(states[:count]),
        tuple(averages[:count]),
        4, (*range(count), count), with_state, 60.0, options, loss,
    )  # fmt: skip
    keys = tuple(member.key for member in members)
    commit = Commit(tip, begin.round, bytes(32), sum(weights), keys, members)
    return Outcome(begin, commit, {}, me not in keys, None, 0.5, seconds, 100, 200)
