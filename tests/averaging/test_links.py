"""Who reduces how much where links differ: by the limits that users set, and by what real connections have shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise

import pytest
import torch

import shoal
from shoal.averaging.averager import DecentralizedAverager
from shoal.averaging.exchange import Exchange
from shoal.swarm.protocol.messages import Begin
from shoal.swarm.protocol.plan import SOON_SECONDS, best_shares

pytestmark = pytest.mark.usefixtures("all_are_here")

ELEMENTS = 1 << 20
PART = 1 << 16  # bytes: chunks that let shares be nearly as they should
FAST_ENOUGH = 2 * 4 * ELEMENTS / SOON_SECONDS


@contextmanager
def limited(limits: Sequence[float | None]) -> Iterator[list[DecentralizedAverager]]:
    """An averager behind each of these limits."""
    with ExitStack() as ends:
        dhts: list[shoal.DHT] = []
        peers: list[DecentralizedAverager] = []
        for limit in limits:
            known = dhts[0].get_visible_maddrs() if dhts else []
            dhts.append(shoal.DHT(known, start=True, upload_limit=limit))
            ends.callback(dhts[-1].shutdown)
            tensor = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(len(dhts)))
            options = {"prefix": "test", "part_size_bytes": PART, "start": True}
            peers.append(DecentralizedAverager([tensor], dhts[-1], **options))  # type: ignore[arg-type]
            ends.callback(peers[-1].shutdown)
        yield peers


@pytest.fixture
def begins(monkeypatch: pytest.MonkeyPatch) -> list[Begin]:
    """Every BEGIN that is followed."""
    seen: list[Begin] = []
    original = Exchange.__init__

    def init(self: Exchange, me: bytes, begin: Begin, *rest: object) -> None:
        seen.append(begin)
        original(self, me, begin, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Exchange, "__init__", init)
    return seen


def shares_of_a_round(peers: list[DecentralizedAverager], begins: list[Begin]) -> list[float]:
    """What part each peer has reduced in a round that all of them made, with the same bits on all."""
    for control in [peer.step(wait=False) for peer in peers]:
        control.result(60.0)
    begin, results = begins[-1], []
    for peer in peers:
        with peer.get_tensors() as (tensor,):
            results.append(tensor.clone())
    assert all(torch.equal(result, results[0]) for result in results)
    assert len(begin.members) == len(peers)
    lengths = [stop - start for start, stop in pairwise(begin.starts)]
    numbers = {member.peer: number for number, member in enumerate(begin.members)}
    return [lengths[numbers[peer.peer_id]] / begin.starts[-1] for peer in peers]


@pytest.mark.parametrize("slow", [0.25, 0.7])
def test_shares_follow_the_limits_that_users_set(slow: float, begins: list[Begin]) -> None:
    limits = [20e6 * slow, 20e6, 20e6, 20e6]
    with limited(limits) as peers:
        for _ in range(2):
            assert shares_of_a_round(peers, begins) == pytest.approx(best_shares(limits), abs=PART / 4 / ELEMENTS)


def test_peers_without_limits_measure_what_their_links_carry(begins: list[Begin]) -> None:
    """Loopback carries more than anybody needs, and each measures something else: they share alike."""
    with limited([FAST_ENOUGH / 1.5, None, None, None]) as peers:
        assert shares_of_a_round(peers, begins) == [0.25] * 4, "nobody has measured anything"
        expected = best_shares([1 / 1.5, 1.0, 1.0, 1.0])
        for _ in range(3):
            assert shares_of_a_round(peers, begins) == pytest.approx(expected, abs=PART / 4 / ELEMENTS)


def test_equal_peers_share_alike_though_they_have_measured(begins: list[Begin]) -> None:
    with limited([None] * 4) as peers:
        for _ in range(4):
            assert shares_of_a_round(peers, begins) == [0.25] * 4
