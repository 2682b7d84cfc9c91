"""What a relay promises to whom, and where that ends."""

from __future__ import annotations

from itertools import count

import pytest

from shoal.p2p.errors import Refused
from shoal.p2p.identity import PeerID
from shoal.reach import ledger
from shoal.reach.ledger import Ledger
from shoal.reach.messages import LEASE_SECONDS

NETWORK = "203.0.113.1"
_numbers = count()


def peer(number: int) -> PeerID:
    return PeerID(number.to_bytes(32, "big"))


def token() -> bytes:
    return next(_numbers).to_bytes(32, "big")


class Book:
    """A ledger whose connections are texts and whose circuits are numbers."""

    def __init__(self) -> None:
        self.passed_at: dict[int, float] = {}
        self.ledger: Ledger[str, int] = Ledger(self.passed_at.__getitem__)

    def reserved(self, *numbers: int, now: float = 0.0) -> Book:
        for number in numbers:
            self.ledger.reserve(peer(number), f"198.51.100.{number}", now)
        return self

    def join(self, asker: int, to: int, now: float = 0.0, network: str = NETWORK) -> int | None:
        """A circuit whose ends have both come; returns the one that had to make room."""
        mine = token()
        idle = self.ledger.ask(mine, peer(asker), network, peer(to), now)
        if idle is not None:
            self.ledger.over(idle)
        assert self.ledger.arrive(mine, "one")
        circuit = self.ledger.arrive(mine, "other")
        assert circuit is not None
        assert circuit.first == "one"
        number = len(self.passed_at)
        self.passed_at[number] = now
        self.ledger.joined(circuit, number)
        return idle


def test_a_token_is_good_once_for_each_end():
    book = Book().reserved(1)
    mine = token()
    assert book.ledger.ask(mine, peer(2), NETWORK, peer(1), 0.0) is None
    first = book.ledger.arrive(mine, "one")
    assert first is not None
    assert first.first is None
    both = book.ledger.arrive(mine, "other")
    assert both is not None
    assert both.first == "one"
    assert book.ledger.arrive(mine, "a third") is None
    assert book.ledger.arrive(token(), "a guess") is None


def test_who_comes_alone_is_given_back_when_the_time_is_over():
    book = Book().reserved(1)
    mine = token()
    book.ledger.ask(mine, peer(2), NETWORK, peer(1), 0.0)
    book.ledger.arrive(mine, "one")
    assert book.ledger.late(mine) == "one"
    assert book.ledger.late(mine) is None
    assert book.ledger.numbers == (1, 0, 0)


def test_reservations_run_out_are_renewed_and_end_with_the_link():
    book = Book().reserved(1, 2)
    book.ledger.reserve(peer(1), NETWORK, LEASE_SECONDS - 1)
    book.join(3, 1, now=LEASE_SECONDS + 1)
    with pytest.raises(Refused, match="no reservation"):
        book.join(3, 2, now=LEASE_SECONDS + 1)
    book.ledger.lose(peer(1))
    with pytest.raises(Refused, match="no reservation"):
        book.join(3, 1, now=LEASE_SECONDS + 1)
    assert book.ledger.numbers[2] == 1  # the circuit stays


def test_reservations_are_bounded(monkeypatch):
    book = Book()
    for number in range(ledger.RESERVATIONS_PER_NETWORK):
        book.ledger.reserve(peer(number), NETWORK, 0.0)
    with pytest.raises(Refused, match=f"reservations from {NETWORK}"):
        book.ledger.reserve(peer(1000), NETWORK, 0.0)
    book.ledger.reserve(peer(0), NETWORK, 0.0)  # a renewal is no new one
    monkeypatch.setattr(ledger, "RESERVATIONS", ledger.RESERVATIONS_PER_NETWORK)
    with pytest.raises(Refused, match="reservations already"):
        book.ledger.reserve(peer(1000), "elsewhere", 0.0)


def test_circuits_that_wait_are_bounded_by_asker_network_and_in_all():
    book = Book().reserved(*range(100, 200))

    def ask(asker: int, to: int, network: str) -> None:
        book.ledger.ask(token(), peer(asker), network, peer(to), 0.0)

    for number in range(ledger.WAITING_PER_PEER):
        ask(1, 100 + number, "a")
    with pytest.raises(Refused, match="of this peer wait"):
        ask(1, 150, "a")
    for number in range(ledger.WAITING_PER_NETWORK - ledger.WAITING_PER_PEER):
        ask(2 + number // ledger.WAITING_PER_PEER, 100 + number, "a")
    with pytest.raises(Refused, match="that a has asked for"):
        ask(50, 150, "a")
    for number in range(ledger.WAITING - ledger.WAITING_PER_NETWORK):
        ask(1000 + number, 100 + number % 100, f"network {number // ledger.WAITING_PER_NETWORK}")
    with pytest.raises(Refused, match=f"{ledger.WAITING} circuits wait"):
        ask(50, 150, "b")


def test_circuits_of_a_pair_and_of_a_peer_are_bounded():
    book = Book().reserved(*range(1, 20))
    for _ in range(ledger.CIRCUITS_PER_PAIR):
        book.join(30, 1)
    with pytest.raises(Refused, match="circuits to that peer"):
        book.join(30, 1)
    for number in range(ledger.CIRCUITS_PER_PEER - ledger.CIRCUITS_PER_PAIR):
        book.join(30, 2 + number % 10)
    with pytest.raises(Refused, match="is reached"):
        book.join(30, 15)
    book.join(31, 15)  # others are served


def test_if_there_is_no_room_the_circuit_that_was_idle_for_longest_makes_some(monkeypatch):
    monkeypatch.setattr(ledger, "CIRCUITS", 3)
    book = Book().reserved(1, 2, 3, 4)
    for asker, now in ((10, 5.0), (11, 0.0), (12, 9.0)):
        book.join(asker, 1, now)
    with pytest.raises(Refused, match="circuits of all"):
        book.join(13, 2, now=ledger.IDLE_SECONDS - 1)
    assert book.join(13, 2, now=ledger.IDLE_SECONDS + 1) == 1
    assert book.ledger.numbers[2] == 3


def test_a_peer_makes_room_for_itself_only(monkeypatch):
    monkeypatch.setattr(ledger, "CIRCUITS_PER_PEER", 2)
    book = Book().reserved(1, 2, 3, 4)
    book.join(10, 1, now=0.0)
    book.join(11, 2, now=1.0)
    book.join(11, 3, now=2.0)
    assert book.join(11, 4, now=ledger.IDLE_SECONDS + 2) == 1
    assert book.ledger.numbers[2] == 3
