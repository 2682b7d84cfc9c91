"""Who reduces how much where links differ: by the limits that users set, and by what real connections have shown."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch

import shoal
from shoal.averaging.averager import DecentralizedAverager
from shoal.averaging.exchange import Exchange
from shoal.compression import Blockwise4Bit, Compression, NoCompression
from shoal.swarm.protocol.messages import Begin
from shoal.swarm.protocol.plan import SOON_SECONDS, best_shares
from tests.namespaces import ADDRESSES, inside, narrow, wired

ELEMENTS = 1 << 20
PART = 1 << 16  # bytes: chunks that let shares be nearly as they should
FAST_ENOUGH = 2 * 4 * ELEMENTS / SOON_SECONDS


@contextmanager
def limited(limits: Sequence[float | None], **more: object) -> Iterator[list[DecentralizedAverager]]:
    """An averager behind each of these limits, with more arguments. No round begins without all of them, however late
    one comes."""
    with ExitStack() as ends:
        dhts: list[shoal.DHT] = []
        peers: list[DecentralizedAverager] = []
        for limit in limits:
            known = dhts[0].get_visible_maddrs() if dhts else []
            lower, higher = ("upload_limit", "download_limit")[
                :: -1 if len(dhts) % 2 else 1
            ]  # the lower of the two counts
            limits_here = {lower: limit, higher: limit and 1e9}
            dhts.append(shoal.DHT(known, start=True, **limits_here))
            ends.callback(dhts[-1].shutdown)
            tensor = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(len(dhts)))
            options = {"prefix": "test", "part_size_bytes": PART, "min_group_size": len(limits), "start": True, **more}
            peers.append(DecentralizedAverager([tensor], dhts[-1], **options))  # type: ignore[arg-type]
            ends.callback(peers[-1].shutdown)
        yield peers


@pytest.fixture
def begins(monkeypatch: pytest.MonkeyPatch) -> list[Begin]:
    """Every BEGIN that is followed."""
    seen: list[Begin] = []
    original = Exchange.__init__

    def init(self: Exchange, vectors: Any, me: bytes, begin: Begin, *rest: object) -> None:
        seen.append(begin)
        original(self, vectors, me, begin, *rest)  # type: ignore[arg-type]

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


@pytest.mark.long
@pytest.mark.parametrize("slow", [0.25, 0.7])
def test_shares_follow_the_limits_that_users_set(slow: float, begins: list[Begin]) -> None:
    limits = [20e6 * slow, 20e6, 20e6, 20e6]
    with limited(limits) as peers:
        for _ in range(2):
            assert shares_of_a_round(peers, begins) == pytest.approx(best_shares(limits), abs=PART / 4 / ELEMENTS)


@pytest.mark.long
def test_peers_without_limits_measure_what_their_links_carry(begins: list[Begin]) -> None:
    """Loopback carries more than anybody needs, and each measures something else: they share alike."""
    with limited([FAST_ENOUGH / 1.5, None, None, None]) as peers:
        assert shares_of_a_round(peers, begins) == [0.25] * 4, "nobody has measured anything"
        expected = best_shares([1 / 1.5, 1.0, 1.0, 1.0])
        for _ in range(3):
            assert shares_of_a_round(peers, begins) == pytest.approx(expected, abs=PART / 4 / ELEMENTS)


def test_what_was_measured_counts_in_the_next_run_of_group_bits(begins: list[Begin]) -> None:
    with limited([FAST_ENOUGH / 1.5, None, None, None], initial_group_bits="0", target_group_size=4) as peers:
        shares_of_a_round(peers, begins)
        for peer in peers:
            peer.set_group_bits("0")
        expected = best_shares([1 / 1.5, 1.0, 1.0, 1.0])
        assert shares_of_a_round(peers, begins) == pytest.approx(expected, abs=PART / 4 / ELEMENTS)


@pytest.mark.long
def test_what_carries_an_encoded_vector_soon_is_fast_enough(begins: list[Begin]) -> None:
    """With 4 bits an element, a line needs an eighth of what it needs with 32."""
    limits = [FAST_ENOUGH / 5, FAST_ENOUGH, FAST_ENOUGH, FAST_ENOUGH]
    with limited(limits, compression=Blockwise4Bit()) as peers:
        assert shares_of_a_round(peers, begins) == [0.25] * 4
    parts_only = Compression.of(parts=Blockwise4Bit(), results=NoCompression())
    with limited(limits, compression=parts_only) as peers:
        assert shares_of_a_round(peers, begins) != [0.25] * 4, "results have 32"


@pytest.mark.long
def test_equal_peers_share_alike_though_they_have_measured(begins: list[Begin]) -> None:
    with limited([None] * 4) as peers:
        for _ in range(4):
            assert shares_of_a_round(peers, begins) == [0.25] * 4


PEERS = textwrap.dedent(
    """
    import json
    import sys
    from itertools import pairwise
    import torch
    import shoal
    from shoal.swarm.protocol.rates import Measured

    given = {}  # to each estimator: for each round, the bytes and seconds of each link

    def add(self, before, after, now, add=Measured.add):
        links = [(after[key][0] - nbytes, after[key][1] - seconds) for key, (nbytes, seconds) in before.items()]
        given.setdefault(self, []).append(links)
        add(self, before, after, now)

    Measured.add = add
    host, count, rounds, *known = sys.argv[1:]
    dhts, peers = [], []
    for _ in range(int(count)):
        known = known or [str(address) for dht in dhts[:1] for address in dht.get_visible_maddrs()]
        dhts.append(shoal.DHT(known, host_maddrs=[f"/ip4/{host}/tcp/0"], start=True))
        tensor = torch.ones(1 << 20)
        options = {"target_group_size": 4, "min_group_size": 4, "part_size_bytes": 1 << 16}
        made = shoal.DecentralizedAverager([tensor], dhts[-1], prefix="test", start=True, **options)
        peers.append(made)
    print(dhts[0].get_visible_maddrs()[0], flush=True)
    for _ in range(int(rounds)):
        for control in [peer.step(wait=False) for peer in peers]:
            control.result(60.0)
    swarm = peers[0]._engine.swarm
    measured = swarm._measured
    own = measured.rates(float("inf"), swarm._now()).own
    begin = swarm.peer.participant._last.book.begin
    lengths = {m.key: stop - start for m, (start, stop) in zip(begin.members, pairwise(begin.starts))}
    print(json.dumps([own, lengths[peers[0].peer_id.key], begin.starts[-1], given[measured]]), flush=True)
    for each in [*peers, *reversed(dhts)]:
        each.shutdown()
    """
)


@pytest.mark.timed
def test_a_peer_behind_a_narrow_line_measures_it() -> None:
    """Three peers in one network namespace, and one in another, whose way out carries 20 Mbit/s."""
    with wired(), ExitStack() as ends:
        narrow(1, 20.0)
        processes, said = [], list[str]()
        for side, count in ((0, 3), (1, 1)):
            command = inside(side, sys.executable, "-c", PEERS, ADDRESSES[side], str(count), "3", *said[:1])
            process = ends.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            ends.callback(process.kill)
            processes.append(process)
            assert process.stdout is not None
            said.append(process.stdout.readline().strip())
        (fast, some, chunks, _), (slow, none, _, given) = (
            json.loads(process.stdout.readline()) for process in processes if process.stdout is not None
        )
        # Each link is measured while it is busy, and the best of three rounds counts. Links that share the line
        # unevenly are busy at different times, and then their sum is more than the line carries. So the bound is on
        # what the estimator is given: the bytes of a round, and at least the time that the line needs for them.
        assert slow == pytest.approx(max(sum(nbytes / seconds for nbytes, seconds in links) for links in given))
        for links in given:
            nbytes, seconds = sum(moved for moved, _ in links), max(busy for _, busy in links)
            assert nbytes > 0.95 * 4 * ELEMENTS, "its whole vector was sent"
            assert seconds > 0.95 * nbytes / (20e6 / 8), "no link carries more than the line, or is idle meanwhile"
        assert fast > 10 * slow
        assert some == pytest.approx(chunks / 3, abs=1)
        assert none == 0
