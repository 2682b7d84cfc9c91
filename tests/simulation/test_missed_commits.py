"""A peer's state is what it holds: a commit whose bytes nobody brings is void, and one that was missed is fetched."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from shoal.simulation.clock import run
from shoal.simulation.world import World
from shoal.swarm.protocol.actions import FetchChunks
from shoal.swarm.protocol.contribution import Outcome
from shoal.swarm.protocol.errors import AveragingError, ResultLost
from shoal.swarm.protocol.messages import Commit, Committed, Done, Fetch, Progress, Source
from shoal.swarm.protocol.rules import Rules
from tests.simulation.swarms import Board, Peer, results_by_tip, seeds, spawn_swarm
from tests.simulation.trainers import ELEMENTS, RULES, Trainer


async def trainers_of(world: World, count: int) -> list[Trainer]:
    options: dict[str, Any] = {"elements": ELEMENTS, "rules": RULES, "keeps_state": True}
    trainers = [Trainer(peer) for peer in await spawn_swarm(world, count, Board(), **options)]
    for trainer in trainers:
        trainer.donate()
    return trainers


def assert_alike(trainers: list[Trainer]) -> None:
    assert len({trainer.tip for trainer in trainers}) == 1
    assert all(torch.equal(trainer.state, trainers[0].state) for trainer in trainers)


@pytest.mark.parametrize("seed", seeds(2))
def test_a_committed_state_that_only_a_lost_peer_had(seed: int) -> None:
    """One peer ends an epoch alone, all others hear of the COMMIT, and it dies before anybody has the result."""

    async def scenario() -> None:
        world = World(seed)
        holder, *others = trainers = await trainers_of(world, 4)
        tasks = [asyncio.create_task(trainer.train(2)) for trainer in trainers]
        await asyncio.gather(*tasks)
        before = holder.tip
        # The others compute for so long that the round begins without them.
        committed = asyncio.create_task(holder.train(3))
        while holder.peer.tip == before:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # the COMMIT arrives
        assert all(other.peer.swarm.peer.participant.at.missed is not None for other in others)
        assert all(other.peer.tip == before for other in others), "they do not hold that state"
        assert all(other.peer.swarm.called for other in others), "their trainers have to come for the result"
        committed.cancel()
        world.kill(holder.peer.node.peer_id)
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(other.train_on(others, 5) for other in others))
        assert asyncio.get_running_loop().time() - began < 30.0
        assert_alike(others)
        assert all(outcome.begin.members for outcome in others[0].outcomes)

    run(scenario(), until=2000.0)


@pytest.mark.parametrize("seed", seeds(2))
def test_a_committed_state_that_a_peer_missed_is_fetched(seed: int) -> None:
    async def scenario() -> None:
        world = World(seed)
        late, *others = trainers = await trainers_of(world, 4)
        await asyncio.gather(*(trainer.train(2) for trainer in trainers))
        before = late.tip
        tasks = [asyncio.create_task(other.train(3)) for other in others]
        await asyncio.gather(*tasks)
        assert late.peer.tip == before
        await late.train(3)
        assert late.outcomes[-1].missed
        assert late.downloaded == []
        assert_alike(trainers)
        await asyncio.gather(*(trainer.train(5) for trainer in trainers))
        assert not late.outcomes[-1].missed
        assert_alike(trainers)

    run(scenario(), until=2000.0)


@pytest.mark.parametrize("seed", seeds(4))
def test_a_report_of_a_round_that_was_missed_asks_for_no_download(seed: int) -> None:
    """It was under way when the coordinator committed, so the answer is that the others are past it; COMMIT is there by
    then."""

    async def scenario() -> None:
        late, *others = trainers = await trainers_of(World(seed), 4)
        await asyncio.gather(*(trainer.train(2) for trainer in trainers))
        await asyncio.gather(*(other.train(3) for other in others))
        swarm = late.peer.swarm
        await asyncio.sleep(0.1)  # the COMMIT arrives
        assert swarm.peer.participant.at.missed is not None
        count = await swarm.report(Progress(late.tip, 0.0, 1.0))
        assert count.tip == late.tip
        assert swarm.behind is None, "nor does the next step ask for one"
        await late.train(3)
        assert late.outcomes[-1].missed
        assert late.downloaded == []
        assert_alike(trainers)

    run(scenario(), until=2000.0)


@pytest.mark.parametrize("seed", seeds(2))
def test_a_coordinator_that_commits_and_loses_its_connections_in_the_same_moment(seed: int) -> None:
    """Nobody hears its COMMIT, and all find each other again at once: the others must not stay in a round that is
    over."""

    async def scenario() -> None:
        world = World(seed, lost_after=0.3)
        trainers = await trainers_of(world, 4)
        await asyncio.gather(*(trainer.train(2) for trainer in trainers))
        key = trainers[0].peer.swarm.peer.participant.coordinator().key
        coordinator = next(trainer for trainer in trainers if trainer.peer.key == key)
        node, notify = coordinator.peer.node, coordinator.peer.node.notify
        cut_at: list[float] = []

        def cutting(peers: Any, service: Any, message: Any, buffers: Any = (), name: bytes = b"") -> None:
            if isinstance(message, Commit) and not cut_at:
                cut_at.append(asyncio.get_running_loop().time())
                for other in trainers:
                    if other is not coordinator:
                        world.cut(node.peer_id, other.peer.node.peer_id)
                asyncio.get_running_loop().call_later([0.05, 0.31, 1.0][seed % 3], world.heal)
            notify(peers, service, message, buffers, name)

        node.notify = cutting  # type: ignore[method-assign]
        await asyncio.gather(*(trainer.train_on(trainers, 16) for trainer in trainers))
        assert cut_at, "the scenario tests nothing"
        assert asyncio.get_running_loop().time() - cut_at[0] < 30.0
        assert_alike(trainers)
        assert all(len(roots) == 1 for roots in results_by_tip(trainer.peer for trainer in trainers).values())

    run(scenario(), until=2000.0)


def test_a_commit_that_went_with_a_connection_is_told_again() -> None:
    """All are connected again before anybody has noticed: nothing but a question can tell that the round is over."""

    async def scenario() -> None:
        world = World(2)
        trainers = await trainers_of(world, 4)
        await asyncio.gather(*(trainer.train(2) for trainer in trainers))
        key = trainers[0].peer.swarm.peer.participant.coordinator().key
        node = next(trainer.peer.node for trainer in trainers if trainer.peer.key == key)
        notify = node.notify
        dropped: list[float] = []

        def dropping(peers: Any, service: Any, message: Any, buffers: Any = (), name: bytes = b"") -> None:
            if isinstance(message, Commit) and not dropped:
                dropped.append(asyncio.get_running_loop().time())
                peers = [node.peer_id]
            notify(peers, service, message, buffers, name)

        node.notify = dropping  # type: ignore[method-assign]
        await asyncio.gather(*(trainer.train_on(trainers, 4) for trainer in trainers))
        assert asyncio.get_running_loop().time() - dropped[0] < 5.0
        assert_alike(trainers)

    run(scenario(), until=2000.0)


def test_whoever_speaks_of_a_committed_round_hears_its_commit() -> None:
    async def scenario() -> None:
        world = World(1)
        trainers = await trainers_of(world, 3)
        await asyncio.gather(*(trainer.train(1) for trainer in trainers))
        one, other = trainers[0].peer, trainers[1].peer
        heard: list[object] = []
        receive = other.swarm.peer.receive

        def hears(sender: bytes, message: Any, buffers: Any, now: float) -> Any:
            heard.extend([message] if isinstance(message, Commit) else [])
            return receive(sender, message, buffers, now)

        other.swarm.peer.receive = hears  # type: ignore[method-assign]
        commit = one.swarm.peer.participant.at.commit
        assert commit is not None
        ballot = trainers[1].outcomes[-1].begin.ballot
        other.swarm._channel.notify([one.key], Done(commit.round, ballot, bytes(32)))
        await asyncio.sleep(1.0)
        assert heard == [commit]

    run(scenario(), until=100.0)


async def one_who_misses(world: World, count: int) -> tuple[Peer, list[Peer]]:
    """A peer that knows of a round's COMMIT and was not in it, and those who were."""
    rules = Rules(sizes=(40_000,), matchmaking_time=1.0, round_timeout=60.0, chunk_elements=2_000)
    late, *others = await spawn_swarm(world, count, Board(), rules=rules, keeps_state=True)
    await asyncio.gather(*(other.round(bound=True, patience=1.0) for other in others))
    await asyncio.sleep(0.1)
    assert late.swarm.peer.participant.at.missed is not None
    return late, others


def test_a_missed_result_that_comes_slowly_is_waited_for() -> None:
    """Fetching it takes longer than a round may stand still."""

    async def scenario() -> None:
        world = World(1)
        late, others = await one_who_misses(world, 3)
        world.lines.out = 8_000.0  # a chunk a second
        began = asyncio.get_running_loop().time()
        outcome = await late.round(timeout=6.0, bound=True)
        assert outcome.missed
        assert asyncio.get_running_loop().time() - began > 9.0
        assert torch.equal(late.output, others[0].output)

    run(scenario(), until=200.0)


def test_a_holder_that_is_lost_while_it_sends_is_followed_by_the_next() -> None:
    async def scenario() -> None:
        world = World(1)
        late, others = await one_who_misses(world, 4)
        world.lines.out = 8_000.0  # two seconds for a chunk
        task = late.spawn_round(timeout=60.0, bound=True)
        await asyncio.sleep(2.5)
        world.kill(min(others, key=lambda other: other.key).node.peer_id)  # the one that is asked first
        world.lines.out = 100e6
        outcome = await task
        assert isinstance(outcome, Outcome), outcome
        assert outcome.missed
        assert torch.equal(late.output, max(others, key=lambda other: other.key).output)

    run(scenario(), until=500.0)


def test_when_a_missed_result_is_waited_for_no_longer_nothing_of_it_is_written_any_more() -> None:
    """Else it might be written over the next average; and it could not be asked for again."""

    async def scenario() -> None:
        world = World(1)
        late, others = await one_who_misses(world, 3)
        for other in others:
            fetch = other.swarm.peer.participant.on_fetch
            other.swarm.peer.participant.on_fetch = slowly(fetch)  # type: ignore[method-assign, assignment]
        with pytest.raises(AveragingError, match="no result within"):
            await late.round(timeout=5.0, bound=True)
        late.output.zero_()
        await asyncio.sleep(10.0)
        assert not late.output.any(), "a chunk that came late was written"
        assert (await late.round(bound=True)).missed
        assert torch.equal(late.output, others[0].output)

    run(scenario(), until=500.0)


def test_an_answer_whose_plan_does_not_fit_its_digests_is_no_result() -> None:
    """A plan of fewer chunks fits the vector, too. It is asked of the next holder."""

    async def scenario() -> None:
        late, others = await one_who_misses(World(1), 3)
        liar = min(others, key=lambda other: other.key).swarm.peer.participant
        fetch = liar.on_fetch

        def lie(message: Any) -> Any:
            answer = fetch(message)
            if isinstance(answer, Committed):
                starts = tuple(min(start, 1) for start in answer.begin.starts)
                begin = msgspec.structs.replace(answer.begin, chunk_elements=1 << 20, starts=starts)
                return Committed(begin, answer.digests)
            return answer

        liar.on_fetch = lie  # type: ignore[method-assign]
        assert (await late.round(bound=True)).missed
        assert torch.equal(late.output, others[0].output)

    run(scenario(), until=200.0)


def slowly(fetch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Chunks are answered after 10 s; what they are is told at once."""

    async def answer(message: Any) -> Any:
        if isinstance(message, Fetch):
            await asyncio.sleep(10.0)
        return fetch(message)

    return answer


def test_members_that_do_not_answer_are_dialled_at_the_same_time() -> None:
    """Else whoever missed a round of many that are lost would give up before it has asked all of them, each time."""

    async def scenario() -> None:
        world = World(1)
        late, others = await one_who_misses(world, 11)
        for other in others:
            world.kill(other.node.peer_id)
        await asyncio.sleep(0.5)  # all connections are known to be lost
        dial = late.node.transport.dial

        async def hanging(address: Any) -> None:
            await asyncio.sleep(1000.0)
            await dial(address)

        late.node.transport.dial = hanging  # type: ignore[method-assign]
        outcome = await late.round(timeout=15.0, bound=True)
        assert not outcome.missed
        assert [member.key for member in outcome.begin.members] == [late.key]

    run(scenario(), until=200.0)


def test_the_other_result_of_a_round_is_not_taken_for_the_one_that_a_peer_holds() -> None:
    """The two sides of a partition may commit two results of one round."""

    async def scenario() -> None:
        world = World(1)
        trainers = await trainers_of(world, 3)
        await asyncio.gather(*(trainer.train(1) for trainer in trainers))
        swarm = trainers[0].peer.swarm
        commit = swarm.peer.participant.at.commit
        assert commit is not None
        other = msgspec.structs.replace(commit, root=bytes(32))
        assert not swarm.peer.participant.recall(other, 0.0)
        with pytest.raises(ResultLost, match="not those that were committed"):
            await swarm._fetching.fetch_committed(other, lambda begin: pytest.fail("it was not asked for"))

    run(scenario(), until=100.0)


def test_what_an_earlier_repair_has_asked_for_is_not_written_over_what_the_next_one_brings() -> None:
    """The two may name two versions of a chunk, if its reducer has lied."""

    async def scenario() -> None:
        peers = await spawn_swarm(World(3), 3, Board())
        await asyncio.gather(*(peer.round() for peer in peers))
        me, slow, other = peers
        exchange = me.swarm.peer.participant._last
        assert exchange is not None
        fetch = slow.swarm.peer.participant.on_fetch
        slow.swarm.peer.participant.on_fetch = slowly(fetch)  # type: ignore[method-assign, assignment]
        written: list[tuple[int, bytes]] = []
        exchange.fetched = lambda chunk, digest, data: written.append((chunk, digest))  # type: ignore[method-assign]
        for holder, digest in ((slow, bytes(32)), (other, b"r" * 32)):
            me.swarm._do(FetchChunks(exchange, [Source(0, holder.key, digest)]))
            await asyncio.sleep(1.0)
        await asyncio.sleep(20.0)
        assert written == [(0, b"r" * 32)]
        assert not me.swarm._fetches

    run(scenario(), until=100.0)
