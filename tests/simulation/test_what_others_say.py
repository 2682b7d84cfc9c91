"""After its first commit a trainer goes on, whatever another peer says."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import torch
from blake3 import blake3

from shoal.flat import bytes_of
from shoal.p2p.errors import Refused
from shoal.p2p.node import Reply
from shoal.simulation.clock import run
from shoal.simulation.world import World
from shoal.swarm.protocol.book import root_of
from shoal.swarm.protocol.errors import Rejected
from shoal.swarm.protocol.messages import Begin, Commit, Committed, Digests, Fetch, Hello, Join, Part, Result, Terms
from shoal.swarm.protocol.tip import Ballot, Tip
from tests.simulation.swarms import TERMS, Board, spawn_peer, spawn_swarm
from tests.simulation.test_missed_commits import assert_alike, trainers_of
from tests.simulation.trainers import ELEMENTS, RULES, Trainer


def test_other_terms_with_a_huge_tip_end_nobody() -> None:
    async def scenario() -> None:
        world = World(1)
        trainers = await trainers_of(world, 3)
        await asyncio.gather(*(trainer.train(1) for trainer in trainers))
        stranger = await world.spawn_node()
        me = msgspec.structs.replace(trainers[0].peer.swarm.me, key=stranger.peer_id.key, addresses=())
        hello = Hello(me, Terms({"target_batch_size": "1"}, TERMS.schema), Tip(5, bytes(32), 1e300), (me,))
        for trainer in trainers:
            stranger.learn(trainer.peer.node.peer_id, trainer.peer.node.addresses)
            answer = await stranger.call(
                trainer.peer.node.peer_id, trainer.peer.swarm.service, hello, Hello, timeout=5.0
            )
            assert answer.tip == trainer.tip
        await asyncio.gather(*(trainer.train(4) for trainer in trainers))
        assert_alike(trainers)

    run(scenario(), until=500.0)


async def missed_by(late: Trainer) -> Commit:
    """The commit that this peer has missed, when it has heard of it."""
    while (commit := late.peer.swarm.peer.participant.at.missed) is None:
        await late.peer.swarm.news()
    return commit


def test_a_begin_without_members_in_an_answer_is_no_result() -> None:
    """It is asked of everybody who was in the round; the next one has it."""

    async def scenario() -> None:
        world = World(2)
        late, *others = trainers = await trainers_of(world, 4)
        await asyncio.gather(*(trainer.train(2) for trainer in trainers))
        await asyncio.gather(*(other.train(3) for other in others))
        commit = await missed_by(late)
        liar = next(other for other in others if other.peer.key == sorted(commit.members)[0])
        handle = liar.peer.swarm.peer.participant.on_fetch

        def lie(message: Any) -> Any:
            answer = handle(message)
            if isinstance(message, Digests):
                assert isinstance(answer, Committed)
                nothing = dict.fromkeys(("members", "weights", "machines", "states", "averages"), ())
                begin = msgspec.structs.replace(answer.begin, **nothing)
                return Committed(begin, answer.digests)
            return answer

        liar.peer.swarm.peer.participant.on_fetch = lie  # type: ignore[method-assign]
        await late.train(3)
        assert_alike(trainers)

    run(scenario(), until=500.0)


def refusing(trainer: Trainer) -> None:
    """From now on it takes nobody's JOIN but its own."""
    receive = trainer.peer.swarm.peer.receive

    def refuse(sender: bytes, message: Any, buffers: Any, now: float) -> Any:
        if isinstance(message, Join) and sender != trainer.peer.key:
            raise Refused("I do not like it")
        return receive(sender, message, buffers, now)

    trainer.peer.swarm.peer.receive = refuse  # type: ignore[method-assign]


def test_a_refused_join_is_a_coordinator_lost(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        world = World(3)
        trainers = await trainers_of(world, 4)
        await asyncio.gather(*(trainer.train(1) for trainer in trainers))
        moody, *others = trainers
        refusing(moody)
        await asyncio.wait([asyncio.create_task(moody.train_on([], 100))], timeout=0.0)
        await asyncio.gather(*(other.train_on(others, 8) for other in others))
        assert_alike(others)

    run(scenario(), until=500.0)
    told = [record for record in caplog.records if "refuses" in record.getMessage() and record.levelname == "WARNING"]
    assert len(told) == 3, "each says it once"
    assert "I do not like it" in told[0].getMessage()


def test_a_newcomer_that_all_refuse_is_told() -> None:
    async def scenario() -> None:
        world, board = World(4), Board()
        options: dict[str, Any] = {"elements": ELEMENTS, "rules": RULES, "keeps_state": True}
        veterans = [Trainer(peer) for peer in await spawn_swarm(world, 2, board, **options)]
        for veteran in veterans:
            refusing(veteran)
        newcomer = Trainer(await spawn_peer(world, board, **options))
        with pytest.raises(Rejected, match="I do not like it"):
            await newcomer.train(1)

    run(scenario(), until=500.0)


@pytest.mark.parametrize("weight", [1e30, -1.0, float("nan")])
def test_a_part_that_the_decoder_refuses_is_a_fault_at_once(weight: float) -> None:
    async def scenario() -> None:
        world = World(5)
        liar, *others = trainers = await trainers_of(world, 4)
        await asyncio.gather(*(trainer.train(1) for trainer in trainers))
        notify = liar.peer.node.notify

        def lie(peers: Any, service: Any, message: Any, buffers: Any = (), name: bytes = b"") -> None:
            if isinstance(message, Part):
                message = msgspec.structs.replace(message, weight=weight)
            notify(peers, service, message, buffers, name)

        liar.peer.node.notify = lie  # type: ignore[method-assign]
        lying = asyncio.create_task(liar.train_on(trainers, 100))
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(other.train(4) for other in others))
        assert asyncio.get_running_loop().time() - began < 4.0, "its silence was waited for"
        assert_alike(others)
        lying.cancel()

    run(scenario(), until=500.0)


def test_a_liar_that_commits_nothing_at_each_tip_costs_one_deadline(caplog: pytest.LogCaptureFixture) -> None:
    """Though it does its work as a coordinator in between."""

    async def scenario() -> None:
        world = World(6)
        liar, *others = trainers = await trainers_of(world, 4)
        await asyncio.gather(*(trainer.train(1) for trainer in trainers))
        swarm, handler = liar.peer.swarm, liar.peer.swarm._handle

        async def never() -> Any:
            await asyncio.Event().wait()

        def handle(peer: Any, message: Any, buffers: Any) -> Any:
            is_asked = isinstance(message, Digests | Fetch) and message.round == bytes(16)
            return never() if is_asked else handler(peer, message, buffers)

        def lie(trainer: Trainer) -> None:
            keys = (swarm.me.key, *swarm.peer.view.others())
            commit = Commit(swarm.tip, bytes(16), bytes(32), 40.0, keys, swarm.peer.view.snapshot(), swarm.me.key)
            liar.peer.node.notify(
                [other.peer.node.peer_id for other in others], swarm.service, swarm._signer.sign(commit)
            )

        liar.peer.node.stop_serving(swarm.service)
        liar.peer.node.serve(swarm.service, handle)
        liar.at_state = lie
        lying = liar.peer.node.spawn(liar.train_on(trainers, 100))
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(other.train_on(others, 30) for other in others))
        assert asyncio.get_running_loop().time() - began < 30 * 1.0 + 2 * 15.0, "each of its COMMITs was waited for"
        assert_alike(others)
        lying.cancel()

    run(scenario(), until=2000.0)
    assert "nobody brings its result" in caplog.text


async def lone_commit(trainers: list[Trainer], answer_after: float) -> tuple[Commit, list[bytes]]:
    """The first of them commits a round of its own, with a chunk for each element, and answers one FETCH at a time."""
    liar, *others = trainers
    swarm, handler = liar.peer.swarm, liar.peer.swarm._handle
    values = torch.zeros(ELEMENTS)
    chunks = [bytes(bytes_of(values[number : number + 1])) for number in range(ELEMENTS)]
    digests = tuple(blake3(chunk).digest() for chunk in chunks)
    begin = swarm._signer.sign(
        Begin(
            tip=swarm.tip,
            ballot=Ballot(1, swarm.me.key),
            members=(swarm.me,),
            weights=(50.0,),
            machines=("",),
            states=(b"",),
            averages=(b"",),
            chunk_elements=1,
            starts=(0, ELEMENTS),
            with_state=False,
            timeout=60.0,
        )
    )
    turns: dict[Any, asyncio.Lock] = {}
    asked: list[bytes] = []

    async def drip(peer: Any, message: Fetch) -> Reply:
        asked.append(message.round)
        async with turns.setdefault(peer, asyncio.Lock()):
            await asyncio.sleep(answer_after)
        return Reply(Result(message.round, message.chunk, message.round), [chunks[message.chunk]])

    def handle(peer: Any, message: Any, buffers: Any) -> Any:
        if isinstance(message, Digests | Fetch) and message.round == begin.round:
            return Committed(begin, digests) if isinstance(message, Digests) else drip(peer, message)
        return handler(peer, message, buffers)

    liar.peer.node.stop_serving(swarm.service)
    liar.peer.node.serve(swarm.service, handle)
    members, view = (swarm.me.key,), swarm.peer.view.snapshot()
    commit = swarm._signer.sign(Commit(swarm.tip, begin.round, root_of(digests), 50.0, members, view, swarm.me.key))
    liar.peer.node.notify([other.peer.node.peer_id for other in others], swarm.service, commit)
    return commit, asked


def test_a_result_that_its_only_holder_sends_drop_by_drop_is_void_after_a_while() -> None:
    """Each chunk comes within the time that an answer may take."""

    async def scenario() -> None:
        world = World(6)
        trainers = await trainers_of(world, 4)
        await asyncio.gather(*(trainer.train(1) for trainer in trainers))
        _, asked = await lone_commit(trainers, answer_after=1.6)
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(other.train_on(trainers[1:], 5) for other in trainers[1:]))
        assert asked, "the scenario tests nothing"
        assert asyncio.get_running_loop().time() - began < 60.0
        assert_alike(trainers[1:])

    run(scenario(), until=20_000.0)


def test_one_that_sends_a_missed_result_drop_by_drop_does_not_hold_up_the_others_that_hold_it() -> None:
    async def scenario() -> None:
        world = World(2)
        late, *others = trainers = await trainers_of(world, 4)
        await asyncio.gather(*(trainer.train(2) for trainer in trainers))
        await asyncio.gather(*(other.train(3) for other in others))
        await missed_by(late)

        async def after(seconds: float, handle: Any, message: Any) -> Any:
            await asyncio.sleep(seconds)
            return handle(message)

        def answers(trainer: Trainer, kind: type[Digests | Fetch], seconds: float) -> None:
            participant = trainer.peer.swarm.peer.participant
            handle = participant.on_fetch

            def answer(message: Any) -> Any:
                return after(seconds, handle, message) if isinstance(message, kind) else handle(message)

            participant.on_fetch = answer  # type: ignore[method-assign]

        answers(others[0], Fetch, 14.0)
        answers(others[1], Digests, 0.5)  # the one that drips is the first to say that it has the result
        answers(others[2], Digests, 0.5)
        began = asyncio.get_running_loop().time()
        await late.train(3)
        assert asyncio.get_running_loop().time() - began < 10.0
        assert_alike(trainers)

    run(scenario(), until=500.0)
