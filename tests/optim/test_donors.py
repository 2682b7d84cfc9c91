"""`Donors` serves and downloads parts of a state, whole ones and strands, without optimizers: two DHTs on loopback."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import pytest
import torch

import shoal
from shoal.cluster.messages import Answered
from shoal.cluster.ties import MAX_BYTES, framed
from shoal.compression import NoCompression
from shoal.optim.donors import MOST_ASKED, Carrier, Carriers, Donors
from shoal.optim.state import PartState, TrainingState, for_newcomer
from shoal.optim.transfers import FoundState
from shoal.p2p.errors import Refused
from shoal.p2p.identity import PeerID
from shoal.swarm.protocol.tip import Tip
from shoal.transfer.donor import EncodedState, Offer
from shoal.transfer.transfer import Downloaded, DownloadFailed, NoMemoryForState, NothingShared, download_state
from tests.optim.test_division import own, strands

TIP = Tip(3, b"l" * 32, 12.0)
LIMIT = 1 << 20


@pytest.fixture(scope="module")
def peers() -> Iterator[list[shoal.DHT]]:
    with shoal.DHT(start=True) as first, shoal.DHT(initial_peers=first.get_visible_maddrs(), start=True) as second:
        yield [first, second]


class Pair:
    """The donors of one peer, and those of a newcomer."""

    def __init__(self, peers: list[shoal.DHT], run_id: str, count: int, **given: int) -> None:
        self.peers, self.count, self.donor_id = peers, count, peers[0].peer_id
        self.giver = Donors(peers[0], run_id, count, LIMIT)
        self.taker = Donors(peers[1], run_id, count, given.get("max_nbytes", LIMIT))

    def serve(self, copy: Callable[[int], Awaitable[EncodedState]], **given: object) -> None:
        offer = partial(Offer, line=TIP.lineage)
        self.giver.serve(range(self.count), copy, lambda: TIP, offer, **given)  # type: ignore[arg-type]
        if self.count > 1:
            self.giver.meet(Carriers((self.giver.me,), (0,) * self.count))

    def first(self, carriers: Sequence[Carriers], reserve: Any = None) -> Downloaded:
        coming = self.taker.download(0, carriers, 20.0, lambda tip: True, reserve)
        return self.peers[1].submit(coming).result()

    def download(self) -> list[Downloaded]:
        carriers = self.taker.who_carries([self.donor_id])
        return self.taker.fetch_all(range(self.count), carriers, 20.0, TIP.is_state_of, {})


@pytest.fixture
def pair(peers: list[shoal.DHT], request: pytest.FixtureRequest) -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(count: int, **given: int) -> Pair:
        made.append(Pair(peers, f"run of {request.node.name}", count, **given))
        return made[-1]

    yield make
    for one in made:
        one.giver.stop()
        one.taker.stop()


def trained(count: int, seed: float) -> TrainingState:
    pieces, groups = own() if count == 1 else strands(count)
    state = TrainingState(
        torch.optim.SGD(groups, lr=0.1, momentum=0.9), None, [torch.full((3,), seed)], division=pieces
    )
    with torch.no_grad():
        for number, parameter in enumerate(state.parameters):
            parameter.fill_(seed + number)
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    state.optimizer.step()
    return state


def copy_of(state: TrainingState) -> Callable[[int], Awaitable[EncodedState]]:
    return lambda number: for_newcomer(partial(state.snapshot, TIP, NoCompression(), part=state.parts[number]))


@pytest.mark.parametrize("count", [1, 3])
def test_a_state_comes_in_its_parts(pair: Callable[..., Pair], count: int) -> None:
    mine, theirs, both = trained(count, 50.0), trained(count, 1.0), pair(count)
    asked, reserved = list[int](), list[int]()
    assert both.giver.asked_at == float("-inf")
    both.serve(copy_of(theirs), asked=lambda: asked.append(1))
    carriers = both.taker.who_carries([both.donor_id])
    assert [[one.of(part).peer for one in carriers] for part in range(count)] == [[both.donor_id]] * count

    async def reserve(tip: Tip, holders: object, nbytes: int) -> bool:
        reserved.append(nbytes)
        return True

    first = both.first(carriers, reserve)
    assert (first.manifest.tip, first.line, len(reserved)) == (TIP, (TIP.lineage,), 1)
    parts = both.taker.fetch_all(range(count), carriers, 20.0, TIP.is_state_of, {0: first})
    assert parts[0] is first
    mine.prepare(*map(PartState.of, parts, mine.parts))()
    assert mine.digest() == theirs.digest()
    assert mine.extra_tensors[0].tolist() == [1.0] * 3
    assert both.giver.asked_at > 0
    assert len(asked) >= 2 * count
    both.giver.stop()
    with pytest.raises(DownloadFailed):
        both.first(carriers)


@pytest.mark.parametrize(("count", "part", "service"), [(1, 0, "state/{}"), (3, 2, "strand 2 of 3/{}")])
def test_a_peer_of_before_finds_the_part_by_its_name(
    peers: list[shoal.DHT],
    pair: Callable[..., Pair],
    request: pytest.FixtureRequest,
    count: int,
    part: int,
    service: str,
) -> None:
    theirs, both = trained(count, 1.0), pair(count)
    both.serve(copy_of(theirs))
    name = service.format(f"run of {request.node.name}")
    coming = download_state(peers[1].node, name, [both.donor_id], timeout=20.0, rng=random.Random(1))
    downloaded = peers[1].submit(coming).result()
    assert torch.equal(downloaded.tensors()[0], theirs.parts[part].parameters[0])


def test_who_does_not_share_says_so(pair: Callable[..., Pair]) -> None:
    both = pair(1)
    both.serve(copy_of(trained(1, 1.0)), allow=False)
    carriers = both.taker.who_carries([both.donor_id])
    with pytest.raises(NothingShared):
        both.first(carriers)


def test_without_all_strands_there_is_none(pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    both, theirs = pair(3), trained(3, 1.0)

    async def copy(number: int) -> EncodedState:
        if number == 1:
            raise Refused("not now")
        return await copy_of(theirs)(number)

    both.serve(copy)
    with pytest.raises(DownloadFailed, match=r"^strand 1: .*not now") as failed:
        both.download()
    assert not isinstance(failed.value, NoMemoryForState)
    real = Donors.download

    async def lacking(self: Donors, part: int, *given: object) -> Downloaded:
        if part == 2:
            raise NoMemoryForState("there is none")
        return await real(self, part, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Donors, "download", lacking)
    with pytest.raises(NoMemoryForState, match=r"^strand 2: there is none"):
        both.download()


def test_a_cluster_of_other_strands_is_not_asked_for_any(pair: Callable[..., Pair]) -> None:
    both = pair(3)
    with pytest.raises(DownloadFailed, match="There was nobody to ask"):
        both.taker.who_carries([])
    both.giver.meet(Carriers((both.giver.me,), (0, 0)))
    with pytest.raises(DownloadFailed, match="does not say who carries each of 3 strands"):
        both.download()


def test_a_part_that_is_too_large_is_refused(pair: Callable[..., Pair]) -> None:
    both = pair(1, max_nbytes=16)
    both.serve(copy_of(trained(1, 1.0)))
    with pytest.raises(DownloadFailed, match="more than the 16 allowed here"):
        both.first(both.taker.who_carries([both.donor_id]))


def test_a_process_alone_asks_nobody_who_carries_what(peers: list[shoal.DHT], pair: Callable[..., Pair]) -> None:
    away = PeerID(b"a" * 32)
    assert [each.of(0).peer for each in pair(1).taker.who_carries([away])] == [away]


def test_what_ranks_tell_each_other_of_donors_has_a_bound() -> None:
    """Liars may send 1,024 ranks with long addresses. What all donors say goes to all ranks in one message."""
    long = tuple(Carrier(bytes(32), ("x" * 256,) * 2) for _ in range(1024))
    assert Carriers(long, (0, 1)).fits(2)
    assert not Carriers((Carrier(bytes(32), ("x",)), *long), (0, 1)).fits(2)
    said = [Carriers(long, tuple(range(1024)))] * MOST_ASKED
    assert len(framed(Answered(1, "step", "find a state", msgspec.msgpack.encode(FoundState(TIP, said))))) < MAX_BYTES
