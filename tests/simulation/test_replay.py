"""Whoever is several rounds late replays them from the redo log, and downloads no state again."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from shoal.compression import Codec, Float16Compression, NoCompression, Uniform8BitQuantization
from shoal.p2p.identity import PeerID
from shoal.simulation.clock import run
from shoal.simulation.world import World
from shoal.swarm.protocol.book import RuleBroken
from shoal.swarm.protocol.messages import After, Commit, Digests, Fetch
from shoal.swarm.protocol.rules import Rules
from tests.codecs import codecs_of
from tests.simulation.swarms import Board, spawn_peer, spawn_swarm
from tests.simulation.trainers import ELEMENTS, RULES, Trainer

NOBODY_WAITS = dataclasses.replace(RULES, wait_for_newcomers=0.0)
OPTIONS: dict[str, Any] = {
    "elements": ELEMENTS,
    "rules": NOBODY_WAITS,
    "keeps_state": True,
    "redo_bytes": 30 * 4 * ELEMENTS,
}


async def trainers_of(world: World, board: Board, count: int, **given: Any) -> list[Trainer]:
    trainers = [Trainer(peer) for peer in await spawn_swarm(world, count, board, **OPTIONS | given)]
    for trainer in trainers:
        trainer.donate()
    return trainers


async def newcomer_of(world: World, board: Board, seconds: float) -> Trainer:
    newcomer = Trainer(await spawn_peer(world, board, **OPTIONS))
    newcomer.download_seconds = seconds
    return newcomer


def assert_alike(trainers: list[Trainer]) -> None:
    assert len({trainer.tip for trainer in trainers}) == 1
    assert all(torch.equal(trainer.state, trainers[0].state) for trainer in trainers)


def replayed(trainer: Trainer) -> int:
    return sum(outcome.missed for outcome in trainer.outcomes)


@pytest.mark.parametrize("seed", range(2))
def test_a_newcomer_replays_what_the_others_did_during_its_download(seed: int) -> None:
    async def scenario() -> None:
        world, board = World(seed), Board()
        veterans = await trainers_of(world, board, 3)
        tasks = [asyncio.create_task(trainer.train(20)) for trainer in veterans]
        await veterans[0].reached(3)
        newcomer = await newcomer_of(world, board, 3.0)
        await asyncio.gather(newcomer.arrive(veterans, 20), *tasks)
        assert len(newcomer.downloaded) == 1
        assert replayed(newcomer) >= 4, "its download was as fast as the epochs: the scenario tests nothing"
        assert sum(not outcome.missed for outcome in newcomer.outcomes) >= 3, "it takes part, then"
        assert not any(map(replayed, veterans)), "nobody waited, and nobody was left behind"
        assert_alike([newcomer, *veterans])
        await asyncio.sleep(70.0)
        logs = [trainer.peer.swarm.peer.redo for trainer in veterans]
        assert not any(log._rounds or log._nbytes for log in logs), "nobody wants them any more"

    run(scenario(), until=300.0)


def test_without_newcomers_and_losses_nothing_is_kept() -> None:
    async def scenario() -> None:
        veterans = await trainers_of(World(1), Board(), 3)
        kept: list[int] = []
        for trainer in veterans:
            trainer.at_state = lambda t: kept.append(len(t.peer.swarm.peer.redo._rounds))
        await asyncio.gather(*(trainer.train(6) for trainer in veterans))
        assert kept == [0] * 18
        assert all(trainer.peer.swarm.peer.redo._until < 0 for trainer in veterans)

    run(scenario(), until=100.0)


def test_a_log_that_is_too_short_costs_another_download() -> None:
    async def scenario() -> None:
        world, board = World(1), Board()
        veterans = await trainers_of(world, board, 3, redo_bytes=2 * 4 * ELEMENTS)
        tasks = [asyncio.create_task(trainer.train(30)) for trainer in veterans]
        await veterans[0].reached(3)
        newcomer = await newcomer_of(world, board, 3.0)
        joining = asyncio.create_task(newcomer.arrive(veterans, 30, awaited=True))
        newcomer.at_state = lambda trainer: setattr(trainer, "download_seconds", 0.0)
        await veterans[0].reached(12)
        assert all(len(trainer.peer.swarm.peer.redo._rounds) <= 2 for trainer in veterans)
        await asyncio.gather(joining, *tasks)
        assert len(newcomer.downloaded) == 2
        assert_alike([newcomer, *veterans])

    run(scenario(), until=300.0)


@pytest.mark.parametrize("seed", range(2))
def test_a_member_that_was_stopped_replays(seed: int) -> None:
    """The others put it out, or begin without it."""

    async def scenario() -> None:
        world = World(seed)
        sleeper, *others = trainers = await trainers_of(world, Board(), 4)
        for trainer in trainers:
            trainer.batch_seconds = 0.2
        tasks = [asyncio.create_task(trainer.train_on(trainers, 20)) for trainer in trainers]
        await others[0].reached(5)
        await asyncio.sleep(world.rng.uniform(0.0, 2.6))
        world.hold(sleeper.peer.node.peer_id, 16.0)
        await asyncio.gather(*tasks)
        assert sleeper.downloaded == []
        assert replayed(sleeper) >= 3
        assert_alike(trainers)

    run(scenario(), until=300.0)


def test_the_coordinators_of_past_rounds_need_not_be_there_any_more() -> None:
    """Nor need anybody who was in them, but one."""

    async def scenario() -> None:
        world, board = World(3), Board()
        one, *others = veterans = await trainers_of(world, board, 4)
        tasks = [asyncio.create_task(trainer.train_on(veterans, 12)) for trainer in veterans]
        await one.reached(3)
        newcomer = await newcomer_of(world, board, 3.0)
        catching = asyncio.create_task(newcomer.catch_up(veterans))
        await one.reached(8)
        coordinators = {outcome.begin.ballot.coordinator for outcome in one.outcomes[3:]}
        assert coordinators - {one.peer.key}
        for other, task in zip(others, tasks[1:], strict=True):
            task.cancel()
            world.kill(other.peer.node.peer_id)
        await asyncio.gather(catching, tasks[0])
        assert len(newcomer.downloaded) == 1
        await newcomer.peer.swarm.contacts.meet_peer(one.peer.node.peer_id)
        await newcomer.replay()
        assert newcomer.tip == one.tip
        assert replayed(newcomer) >= 5
        assert_alike([newcomer, one])

    run(scenario(), until=300.0)


async def late_by(world: World, board: Board, veterans: list[Trainer], rounds: int) -> Trainer:
    """A newcomer with a state that is so many rounds old, of which it has heard and fetched the first. The veterans
    rest."""
    newcomer = Trainer(await spawn_peer(world, board, **OPTIONS))
    await newcomer.catch_up(veterans)
    await asyncio.gather(*(trainer.train(trainer.tip.epoch + rounds) for trainer in veterans))
    await newcomer.average(0.0, 30.0)
    await asyncio.gather(*(newcomer.peer.swarm.contacts.meet_peer(PeerID(one.peer.key)) for one in veterans))
    return newcomer


def lying(trainer: Trainer, lie: Any) -> list[Any]:
    """`lie(message, answer)` replaces its answers. Returns what it was asked, in the end."""
    asked: list[Any] = []
    peer = trainer.peer.swarm.peer
    receive = peer.receive

    def lies(sender: bytes, message: Any, buffers: Any, now: float) -> Any:
        answer = receive(sender, message, buffers, now)
        if isinstance(message, After | Digests | Fetch):
            asked.append(message)
            return lie(message, answer)
        return answer

    peer.receive = lies  # type: ignore[method-assign]
    return asked


async def late_newcomer(count: int) -> tuple[list[Trainer], Trainer]:
    """So many members, and a newcomer that is four epochs late."""
    world, board = World(4), Board()
    veterans = await trainers_of(world, board, count)
    await asyncio.gather(*(trainer.train(2) for trainer in veterans))
    return veterans, await late_by(world, board, veterans, 4)


def names_another(liar: Trainer) -> Callable[[Any, Any], Any]:
    """For `lying`: a COMMIT becomes one of another result, which this liar has signed."""

    def lie(message: Any, answer: Any) -> Any:
        if not isinstance(answer, Commit):
            return answer
        other = msgspec.structs.replace(answer, root=b"l" * 32, coordinator=liar.peer.key)
        return liar.peer.swarm._signer.sign(other)

    return lie


def test_one_of_three_that_names_another_round_is_outvoted() -> None:
    async def scenario() -> None:
        veterans, newcomer = await late_newcomer(3)
        asked = lying(veterans[0], names_another(veterans[0]))
        await newcomer.replay()
        assert asked
        assert newcomer.tip == veterans[1].tip
        assert_alike([newcomer, *veterans])

    run(scenario(), until=100.0)


def test_a_member_that_names_another_round_alone_costs_one_download() -> None:
    """Two are asked, and contradict each other."""

    async def scenario() -> None:
        veterans, newcomer = await late_newcomer(2)
        liar, honest = veterans
        before = newcomer.tip

        assert lying(liar, names_another(liar)) == []
        await newcomer.replay()
        assert newcomer.tip == before
        assert len(newcomer.outcomes) == 1
        await newcomer.catch_up(veterans)
        assert len(newcomer.downloaded) == 2
        assert_alike([newcomer, honest])

    run(scenario(), until=100.0)


def test_a_commit_of_which_nobody_has_the_result_is_void_and_costs_one_download() -> None:
    """Most members name it: they lie, or have lost it."""

    async def scenario() -> None:
        veterans, newcomer = await late_newcomer(3)
        asked = [lying(trainer, names_another(veterans[0])) for trainer in veterans]
        await newcomer.replay()
        assert len(newcomer.outcomes) == 1
        assert not await newcomer.peer.swarm.learn_of_round(), "it is not believed again"
        assert all(sum(isinstance(each, Digests) for each in one) == 1 for one in asked)
        await newcomer.catch_up(veterans)
        assert_alike([newcomer, *veterans])

    run(scenario(), until=100.0)


def test_a_commit_that_its_coordinator_has_not_signed_is_not_believed() -> None:
    async def scenario() -> None:
        veterans, newcomer = await late_newcomer(3)

        def lie(message: Any, answer: Any) -> Any:
            return msgspec.structs.replace(answer, samples=1e9) if isinstance(answer, Commit) else answer

        for trainer in veterans:
            lying(trainer, lie)
        assert not await newcomer.peer.swarm.learn_of_round()

    run(scenario(), until=100.0)


def test_a_wrong_chunk_is_fetched_from_another_member() -> None:
    async def scenario() -> None:
        veterans, newcomer = await late_newcomer(3)
        liar: list[Trainer] = []  # the first that is asked

        def lie(trainer: Trainer, message: Any, answer: Any) -> Any:
            if isinstance(message, Fetch):
                liar[:] = liar or [trainer]
                if liar[0] is trainer:
                    answer.buffers = [bytes(len(answer.buffers[0]))]
            return answer

        for veteran in veterans:
            lying(veteran, functools.partial(lie, veteran))
        await newcomer.replay()
        assert liar
        assert replayed(newcomer) == 4
        assert_alike([newcomer, *veterans])

    run(scenario(), until=100.0)


def test_members_that_do_not_know_the_round_are_no_votes_and_others_are_asked() -> None:
    """They have come since, and downloaded a later state."""

    async def scenario() -> None:
        world, board = World(4), Board()
        veterans = await trainers_of(world, board, 2)
        await asyncio.gather(*(trainer.train(2) for trainer in veterans))
        newcomer = await late_by(world, board, veterans, 4)
        others = await trainers_of(world, board, 6)
        await asyncio.gather(*(other.catch_up(veterans) for other in others))
        await asyncio.sleep(1.0)
        await newcomer.replay()
        assert replayed(newcomer) == 4
        assert_alike([newcomer, *veterans])

    run(scenario(), until=100.0)


def test_a_pin_on_the_way_is_followed_and_another_state_forgets_the_rounds() -> None:
    async def scenario() -> None:
        world, board = World(4), Board()
        one, _ = veterans = await trainers_of(world, board, 2)
        await asyncio.gather(*(trainer.train(2) for trainer in veterans))
        newcomer = await late_by(world, board, veterans, 2)
        redo, tip = one.peer.swarm.peer.redo, one.tip
        assert len(redo._rounds) == 2
        one.peer.swarm.peer.move(msgspec.structs.replace(tip, pin=1), 0.0)
        assert len(redo._rounds) == 2, "it is the same state"
        one.peer.swarm.move(tip.after(bytes(32), 1e6))
        assert not redo._rounds, "they do not lead there"
        assert await newcomer.peer.swarm.learn_of_round(), "the other still tells it"

    run(scenario(), until=100.0)


@pytest.mark.parametrize("codec", [Float16Compression(), Uniform8BitQuantization(), NoCompression()])
def test_a_compressed_result_comes_as_it_was_sent_and_has_the_same_bits(codec: Codec) -> None:
    async def scenario() -> None:
        rules = Rules(sizes=(40_000,), matchmaking_time=1.0, round_timeout=60.0, chunk_elements=5_000)
        options: dict[str, Any] = {"rules": rules, "keeps_state": True, "redo_bytes": 1 << 20}
        late, *others = peers = await spawn_swarm(World(1), 3, Board(), **options)
        for peer in peers:
            peer.codecs = codecs_of([peer.vector], codec)
        results: list[torch.Tensor] = []
        for number in range(4):
            for other in others:
                other.vector += number
            await asyncio.gather(*(other.round(bound=True, patience=1.0) for other in others))
            assert torch.equal(others[0].output, others[1].output)
            results.append(others[0].output.clone())
        encoded = [kept.chunks for kept in others[0].swarm.peer.redo._rounds.values()]
        for number in range(4):
            assert await late.swarm.learn_of_round()
            outcome = await late.round(bound=True)
            assert outcome.missed
            assert torch.equal(late.output, results[number])
            assert outcome.bytes_received < sum(map(len, encoded[number])) + 8_000
        nbytes = codec.encoded_nbytes(5_000, torch.float32)
        # When the first round began, nobody knew that somebody would miss it.
        assert [{len(chunk) for chunk in chunks} for chunks in encoded] == [{20_000}, {nbytes}, {nbytes}, {nbytes}]

    run(scenario(), until=200.0)


def test_an_encoded_chunk_that_does_not_have_the_digest_is_refused() -> None:
    async def scenario() -> None:
        late, *others = peers = await spawn_swarm(World(1), 3, Board(), keeps_state=True)
        for peer in peers:
            peer.codecs = codecs_of([peer.vector], Float16Compression())
        await asyncio.gather(*(other.round(bound=True, patience=1.0) for other in others))
        outcome = await late.round(bound=True)
        assert outcome.missed
        exchange = late.exchange
        assert exchange is not None
        digest, size = exchange.book.digests[0], exchange.chunk_bytes(0).nbytes
        exchange.encoded = {0: b"old"}
        for payload in (bytes(size // 2), bytes(size // 2 - 1), bytes(size), b""):
            with pytest.raises(RuleBroken, match="not the one that was committed"):
                exchange.fetched(0, digest, memoryview(payload))
        assert exchange.encoded == {}, "it is of an earlier version of the chunk"
        out = torch.frombuffer(bytearray(exchange.chunk_bytes(0)), dtype=torch.float32)
        exchange.fetched(0, digest, Float16Compression().encode(out))
        assert exchange.book.digests[0] == digest

    run(scenario(), until=200.0)
