"""A peer that breaks the rules is told which, and the others' round goes on without it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch

from shoal.averaging.exchange import Exchange
from shoal.p2p.errors import Refused, Unavailable
from shoal.p2p.node import Node
from shoal.simulation.clock import run
from shoal.simulation.world import World
from shoal.swarm.protocol.contribution import Contribution, Fault, Outcome, SendTo
from shoal.swarm.protocol.errors import AveragingError, Rejected
from shoal.swarm.protocol.messages import (
    Begin,
    Broken,
    Commit,
    Done,
    Elsewhere,
    Fetch,
    Hello,
    Part,
    Progress,
    Repair,
    Result,
    Survey,
    Terms,
)
from shoal.swarm.protocol.rules import Rules
from shoal.swarm.protocol.tip import Ballot
from shoal.swarm.protocol.view import Member, Role
from tests.averaging.given import given
from tests.codecs import codecs_of
from tests.simulation.swarms import TERMS, Board, Peer, mean, results_by_tip, spawn_peer, spawn_swarm
from tests.swarm.rounds import join_of


class Gibberish(msgspec.Struct, tag=99, array_like=True):
    """No message of any service."""

    words: str = "abracadabra"


def assert_a_round_of(peers: list[Peer], outcomes: Sequence[object], members: int | None = None) -> None:
    """They committed one result: their own mean, alike in all bits."""
    for outcome in outcomes:
        assert isinstance(outcome, Outcome), outcomes
        assert members is None or len(outcome.begin.members) == members
    assert all(torch.equal(peer.output, peers[0].output) for peer in peers)
    assert (peers[0].output - mean(peers)).abs().max() < 1e-6
    assert all(len(roots) == 1 for roots in results_by_tip(peers).values())


async def swarm_and_stranger(world: World) -> tuple[list[Peer], Node]:
    """Three peers that have made a round, and a node that knows them and is none of them."""
    peers = await spawn_swarm(world, 3)
    await asyncio.gather(*(peer.round() for peer in peers))
    stranger = await world.spawn_node()
    for peer in peers:
        stranger.learn(peer.node.peer_id, peer.node.addresses)
        await stranger.connect(peer.node.peer_id)
    return peers, stranger


def test_garbage_is_refused_and_disturbs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        world = World(1)
        peers, stranger = await swarm_and_stranger(world)
        tasks = [peer.spawn_round() for peer in peers]
        everybody = [peer.node.peer_id for peer in peers]
        for data in (b"", b"\xc1", b"\x91" * 50_000, world.rng.randbytes(300)):
            stranger.transport.send(everybody, data, [world.rng.randbytes(1000)])
        for peer in peers:
            with pytest.raises(Refused, match="not a message of 'averaging/run'"):
                await stranger.call_for_buffers(peer.node.peer_id, peer.swarm.service, Gibberish(), timeout=1)
        assert_a_round_of(peers, [await task for task in tasks], members=3)

    with caplog.at_level(logging.INFO, "shoal"):
        run(scenario())
    assert caplog.text.count("not a message: ") >= 3 * 3, "nobody said what was wrong"
    assert "internal error" not in caplog.text


def test_a_stranger_has_no_say() -> None:
    """Whoever is no member of the run, or of the round, can't begin, decide, repair or end anything."""

    async def scenario() -> None:
        world = World(2, bandwidth=1e6)
        peers, stranger = await swarm_and_stranger(world)
        tasks = [peer.spawn_round() for peer in peers]
        victim = peers[0]
        await asyncio.sleep(0.1)  # a round takes a quarter of a second at this bandwidth
        begin = victim.swarm.peer.participant.begin
        assert begin is not None
        mine = Ballot(50, stranger.peer_id.key)
        root = bytes(32)
        forged = [
            (Commit(begin.tip, begin.round, root, 3.0, (), ()), "COMMIT from a peer that is no member"),
            (msgspec.structs.replace(begin, ballot=mine), "BEGIN from a peer that is no member"),
            (Survey(begin.tip, begin.round, mine, (), None), "the sender does not hold that ballot"),
            (Survey(begin.tip, begin.round, Ballot(50, begin.ballot.coordinator), (), None), "does not hold"),
            (Repair(begin.round, mine, ()), "the sender does not hold that ballot"),
            (Part(begin.round, 0, begin.round, 1.0), "not a member of the round|is not mine to reduce"),
            (Result(begin.round, 0, begin.round), "not its to reduce"),
            (Fetch(bytes(16), 0), "does not have that round's result"),
        ]
        refusals = await asyncio.gather(
            *(
                stranger.call_for_buffers(victim.node.peer_id, victim.swarm.service, message, timeout=1)
                for message, _ in forged
            ),
            return_exceptions=True,
        )
        for refusal, (message, reason) in zip(refusals, forged, strict=True):
            assert isinstance(refusal, Refused), message
            assert re.search(reason, str(refusal)), (message, refusal)
        assert victim.swarm.peer.participant.begin is not None, "the round was over before it heard all this"
        leader = next(peer for peer in peers if peer.key == begin.ballot.coordinator)
        complaint = Broken(begin.round, victim.key, True, "I do not like it")
        with pytest.raises(Refused, match="only a member of the round can complain"):
            await stranger.call_for_buffers(leader.node.peer_id, leader.swarm.service, complaint, timeout=1)
        done = Done(begin.round, begin.ballot, root)
        stranger.notify([leader.node.peer_id], leader.swarm.service, done)
        assert_a_round_of(peers, [await task for task in tasks], members=3)

    run(scenario())


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf, 1e16])
@pytest.mark.parametrize("seed", [3, 4])
def test_a_weight_that_is_none_is_refused_by_name(weight: float, seed: int) -> None:
    async def scenario() -> None:
        world = World(seed)
        peers = await spawn_swarm(world, 4)
        await asyncio.gather(*(peer.round() for peer in peers))
        tasks = [peer.spawn_round(patience=2.0) for peer in peers[:3]]
        with pytest.raises(Rejected, match=r"refuses this peer: .*Expected `float`"):
            await peers[3].round(weight=weight, patience=2.0)
        assert_a_round_of(peers[:3], [await task for task in tasks], members=3)
        assert_a_round_of(peers, await asyncio.gather(*(peer.round() for peer in peers)), members=4)

    run(scenario())


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_samples_that_are_none_are_refused(weight: float) -> None:
    async def scenario() -> None:
        peers, stranger = await swarm_and_stranger(World(5))
        report = Progress(peers[0].tip, weight, 1.0)
        with pytest.raises(Refused, match="Expected `float`"):
            await stranger.call_for_buffers(peers[0].node.peer_id, peers[0].swarm.service, report, timeout=1)

    run(scenario())


NOT_FINITE = "its chunk 0 has values that are not finite (NaN or infinity)"


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("who", [0, 1, 2, 3])
def test_values_that_are_not_finite_stay_out(value: float, who: int, caplog: pytest.LogCaptureFixture) -> None:
    """Whichever place it has in the order, and whether it coordinates or not."""

    async def scenario() -> None:
        world = World(6)
        peers = await spawn_swarm(world, 4)
        await asyncio.gather(*(peer.round() for peer in peers))
        sick = peers[who]
        others = [peer for peer in peers if peer is not sick]
        healthy = sick.vector.clone()
        sick.vector[123] = value
        tasks = {peer.key: peer.spawn_round(timeout=20.0) for peer in peers}
        outcomes = [await tasks[peer.key] for peer in others]
        await tasks[sick.key]
        assert f"what this peer sends: {NOT_FINITE}" in caplog.text or NOT_FINITE in str(tasks[sick.key].result())
        assert all(isinstance(outcome, Outcome) for outcome in outcomes), outcomes
        assert all(torch.equal(peer.output, others[0].output) for peer in others)
        # What it brought elsewhere in its vector may count; what was not finite must not.
        assert others[0].output.isfinite().all()
        assert (others[0].output[123] - mean(others)[123]).abs() < 1e-6
        sick.vector.copy_(healthy)
        assert_a_round_of(peers, await asyncio.gather(*(peer.round() for peer in peers)), members=4)

    run(scenario())


def test_another_layout_is_refused_by_name() -> None:
    async def scenario() -> None:
        world, board = World(7), Board()
        peers = await spawn_swarm(world, 3, board)
        await asyncio.gather(*(peer.round() for peer in peers))
        other = await spawn_peer(world, board, terms=Terms({}, b"other" + bytes(27)))
        tasks = [peer.spawn_round() for peer in peers]
        with pytest.raises(Rejected, match="schema hash"):
            await other.round()
        assert_a_round_of(peers, [await task for task in tasks], members=3)

    run(scenario())


Sabotage = Callable[[Exchange, Begin, SendTo], None]


def bring_what_another_reduces(exchange: Exchange, begin: Begin, send: SendTo) -> None:
    me, book = exchange.book.me, exchange.book
    chunk = next(chunk for chunk, owner in enumerate(book.owners) if owner != me)
    others = [key for key in book.keys if key not in (me, book.owners[chunk])]
    send(others, Result(begin.round, chunk, begin.round), [exchange.chunk_bytes(chunk)])


def send_a_part_to_who_does_not_reduce_it(exchange: Exchange, begin: Begin, send: SendTo) -> None:
    me, book = exchange.book.me, exchange.book
    chunk = next(chunk for chunk, owner in enumerate(book.owners) if owner != me)
    others = [key for key in book.keys if key not in (me, book.owners[chunk])]
    send(others[:1], Part(begin.round, chunk, begin.round, 1.0), [exchange.chunk_bytes(chunk)])


def of_its_first_part(change: Callable[[SendTo, bytes, Part, memoryview], None]) -> Sabotage:
    def sabotage(exchange: Exchange, begin: Begin, send: SendTo) -> None:
        me, book = exchange.book.me, exchange.book
        chunk, owner = next((chunk, owner) for chunk, owner in enumerate(book.owners) if owner != me)
        change(send, owner, Part(begin.round, chunk, begin.round, 1.0), exchange.chunk_bytes(chunk))

    return sabotage


def twice(send: SendTo, to: bytes, part: Part, data: memoryview) -> None:
    send([to], part, [data])
    send([to], part, [data])


SABOTAGES: dict[str, tuple[Sabotage, str]] = {
    "result": (bring_what_another_reduces, "a result of chunk .* which is not its to reduce"),
    "part": (send_a_part_to_who_does_not_reduce_it, "chunk .* is not mine to reduce"),
    "short": (
        of_its_first_part(lambda send, to, part, data: send([to], part, [data[:-4]])),
        "came as .* bytes instead of",
    ),
    "double": (of_its_first_part(lambda send, to, part, data: send([to], part, [data, data])), "2 payloads"),
    "empty": (of_its_first_part(lambda send, to, part, data: send([to], part, [])), "lacks a payload"),
    "twice": (of_its_first_part(twice), "came twice|not its to reduce"),
    "beyond": (
        of_its_first_part(lambda send, to, part, data: send([to], msgspec.structs.replace(part, chunk=9999), [data])),
        "a part of chunk 9999; the round has",
    ),
}


@pytest.mark.parametrize("kind", SABOTAGES)
@pytest.mark.parametrize("who", [0, 3])
def test_chunks_that_do_not_belong_there_cost_nobody_else(
    kind: str, who: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Who is told of so by one member only is parted from that one; else it is out, and hears why."""
    sabotage, reason = SABOTAGES[kind]

    async def scenario() -> None:
        world = World(8)
        peers = await spawn_swarm(world, 4)
        await asyncio.gather(*(peer.round() for peer in peers))
        rogue = peers[who]
        others = [peer for peer in peers if peer is not rogue]

        def open_exchange(begin: Begin, send: SendTo, fault: Fault) -> Exchange:
            vectors = given(rogue.vector, rogue.output, codecs_of([rogue.vector]))
            exchange = Exchange(vectors, rogue.key, begin, send, fault)
            sabotage(exchange, begin, send)
            return exchange

        tasks = [peer.spawn_round(timeout=20.0) for peer in others]
        with contextlib.suppress(AveragingError):  # one that is put out
            await rogue.swarm.average(Contribution(1.0, open_exchange), 20.0)
        assert re.search(reason, caplog.text), "it was not told"
        began = asyncio.get_running_loop().time()
        outcomes = [await task for task in tasks]
        assert asyncio.get_running_loop().time() - began < 3.0
        assert all(isinstance(outcome, Outcome) for outcome in outcomes), outcomes
        assert all(torch.equal(peer.output, others[0].output) for peer in others)
        assert all(len(roots) == 1 for roots in results_by_tip(others).values())
        # It may do better the next time.
        assert_a_round_of(peers, await asyncio.gather(*(peer.round() for peer in peers)), members=4)

    run(scenario())


@pytest.mark.parametrize("seed", range(6))
def test_a_newcomer_with_other_terms_gives_way_unless_others_share_them(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """What others claim ends nobody who has company: who is wrong is for their users to say."""

    async def scenario() -> None:
        world, board = World(seed), Board()
        veteran = await spawn_peer(world, board)
        assert (await veteran.round()).begin.members
        other = Terms({"target_batch_size": "64"}, TERMS.schema)
        alone = await spawn_peer(world, board, terms=other)
        with pytest.raises(Rejected, match="target_batch_size is 64 here"):
            await alone.round(patience=1.0)
        company = await spawn_peer(world, board, terms=other)
        outcomes = await asyncio.gather(*(peer.round(patience=1.0) for peer in (alone, company)))
        assert all(len(outcome.begin.members) == 2 for outcome in outcomes)
        assert "in the run with other terms: target_batch_size is 64 here" in caplog.text
        assert isinstance(await veteran.round(patience=1.0), Outcome)

    run(scenario())


def test_terms_that_change_with_each_hello_are_told_eight_times_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        peers = await spawn_swarm(World(1), 3, Board())
        await asyncio.gather(*(peer.round() for peer in peers))
        liar, other = peers[0], peers[1]
        for number in range(200):
            hello = liar.swarm.peer.hello()
            terms = Terms({"target_batch_size": str(number)}, TERMS.schema)
            if number % 2:
                hello = msgspec.structs.replace(hello, terms=terms)
            other.swarm.contacts.on_hello(liar.node.peer_id, hello)
            await asyncio.sleep(0.5)

    run(scenario())
    assert 8 <= caplog.text.count("in the run with other terms: ") <= 24


def test_chunks_of_strangers_are_not_kept_for_a_round_to_come() -> None:
    async def scenario() -> None:
        peers, stranger = await swarm_and_stranger(World(6))
        waiting = peers[0].spawn_round()  # the others do not come yet
        await asyncio.sleep(0.1)
        part = Part(bytes(16), 0, bytes(16), 1.0)
        with pytest.raises(Refused, match="no member"):
            await stranger.call_for_buffers(
                peers[0].node.peer_id, peers[0].swarm.service, part, timeout=1, buffers=[bytes(4000)]
            )
        for _ in range(70):
            peers[1].node.notify([peers[0].node.peer_id], peers[1].swarm.service, part, [bytes(4000)])
        await asyncio.sleep(0.1)
        with pytest.raises(Refused, match="too many chunks"):
            await peers[1].node.call_for_buffers(
                peers[0].node.peer_id, peers[0].swarm.service, part, timeout=1, buffers=[bytes(4000)]
            )
        rest = await asyncio.gather(*(peer.round() for peer in peers[1:]))
        assert_a_round_of(peers, [await waiting, *rest], members=3)

    run(scenario())


def test_samples_of_strangers_do_not_count() -> None:
    async def scenario() -> None:
        rules = Rules(sizes=(40_000,), matchmaking_time=15.0, round_timeout=60.0, target_samples=100.0)
        world = World(7)
        peers = await spawn_swarm(world, 3, rules=rules)
        stranger = await world.spawn_node()
        for peer in peers:
            stranger.learn(peer.node.peer_id, peer.node.addresses)
            report = Progress(peer.tip, 1000.0, 1.0)
            answer = await stranger.call_for_buffers(peer.node.peer_id, peer.swarm.service, report, timeout=1)
            assert isinstance(answer.body, Hello | Elsewhere)
        assert not any([(await peer.swarm.report(Progress(peer.swarm.tip, 1.0, 1.0))).called for peer in peers])
        assert (await peers[0].swarm.report(Progress(peers[0].swarm.tip, 100.0, 1.0))).called

    run(scenario())


def test_a_coordinator_that_has_just_left_the_run_is_no_refusal() -> None:
    async def scenario() -> None:
        world = World(8)
        peers = await spawn_swarm(world, 3)
        await asyncio.gather(*(peer.round() for peer in peers))
        first = peers[0].swarm.peer.participant.coordinator()
        leaver = next(peer for peer in peers if peer.key == first.key)
        others = [peer for peer in peers if peer is not leaver]
        leaver.node.stop_serving(leaver.swarm.service)  # before the others hear of it
        assert_a_round_of(others, await asyncio.gather(*(peer.round(patience=2.0) for peer in others)), members=2)

    run(scenario())


def test_a_join_that_waits_at_a_coordinator_that_leaves_is_not_taken() -> None:
    """It is of the next state, of which the coordinator has not heard yet."""

    async def scenario() -> None:
        peers = await spawn_swarm(World(9), 2)
        coordinator = next(p for p in peers if p.key == peers[0].swarm.peer.participant.coordinator().key)
        other = next(peer for peer in peers if peer is not coordinator)
        join = join_of(other.swarm.me, tip=coordinator.tip.after(bytes(32), 1.0))
        service = coordinator.swarm.service
        asked = other.node.spawn(other.node.call_for_buffers(coordinator.node.peer_id, service, join, timeout=5.0))
        await asyncio.sleep(0.5)
        coordinator.swarm.retire()
        with pytest.raises(Unavailable, match="has left the run"):
            await asked
        assert coordinator.swarm.peer.lead is None

    run(scenario())


def test_a_round_that_ends_while_its_members_are_dialled_has_no_effect_on_the_next() -> None:
    """Nobody is complained of in the next one, and the input is not prepared for a round that is over."""

    async def scenario() -> None:
        world = World(10)
        peers = await spawn_swarm(world, 3)
        first = peers[0].swarm
        heard: list[Broken] = []
        for peer in peers:
            notify = peer.node.notify

            def hears(to: Any, service: Any, message: Any, *rest: Any, notify: Any = notify) -> None:
                heard.extend([message] if isinstance(message, Broken) else [])
                notify(to, service, message, *rest)

            peer.node.notify = hears  # type: ignore[method-assign, assignment]
        tasks = [peer.spawn_round() for peer in peers]
        while (begin := first.peer.participant.begin) is None:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.001)
        absent = Member(bytes(32), ("/ip4/10.9.9.9/tcp/1",), Role.NODE)
        group, starts = (absent, *begin.members), (0, *begin.starts)
        before = msgspec.structs.replace(begin, members=group, starts=starts, ballot=Ballot(0, absent.key))
        prepared: list[Begin] = []

        async def prepare() -> None:
            prepared.append(before)

        assert first.peer.participant.given.input is not None
        first.peer.participant.given.input.prepare = prepare
        await first._enter(before)
        assert first.peer.participant.begin is begin, "the scenario tests nothing"
        assert heard == []
        assert prepared == []
        assert_a_round_of(peers, [await task for task in tasks], members=3)

    run(scenario())
