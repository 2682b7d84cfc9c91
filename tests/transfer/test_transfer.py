"""A newcomer downloads a state: from many donors, some of which lie, die, dawdle or differ."""

from __future__ import annotations

import asyncio
import random
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
import torch

from shoal.compression import Codec, Float16Compression
from shoal.p2p.errors import Refused
from shoal.p2p.identity import Identity, PeerID
from shoal.p2p.memory_transport import MemoryNetwork, MemoryTransport
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.node import Answer, Node, Reply
from shoal.simulation.clock import run
from shoal.simulation.world import World
from shoal.swarm.protocol.tip import Tip
from shoal.transfer.donor import (
    KEEP_SECONDS,
    Chunk,
    EncodedState,
    FrozenState,
    GetChunk,
    GetManifest,
    Offer,
    StateDonor,
    chunk_name,
    encoded,
    transfer_service,
)
from shoal.transfer.manifest import CHUNK_ELEMENTS, LARGE_BYTES, BufferShape, Manifest
from shoal.transfer.transfer import OFFER_SECONDS, Downloaded, DownloadFailed, NothingWanted, download_state
from tests.codecs import codecs_of

NAME = "state/test"


def snapshot(epoch: int = 7, chunks: int = 12, codec: Codec | None = None) -> FrozenState:
    """A state of float32, int64 and bool buffers, about `chunks` chunks altogether; the same for the same epoch."""
    generator = torch.Generator().manual_seed(epoch)
    buffers = [
        torch.randn((chunks - 5) * CHUNK_ELEMENTS + 3, generator=generator),
        torch.randint(1 << 60, (CHUNK_ELEMENTS,), generator=generator),
        torch.rand(100, generator=generator) < 0.5,
        torch.empty(0),
    ]
    return FrozenState(
        Tip(epoch, bytes([epoch]) * 32, 32.0 * epoch),
        b"layout",
        buffers,
        random.Random(epoch).randbytes(1_100_000),
        codecs_of(buffers, codec),
    )


def donate(node: Node, state: FrozenState | None = None) -> list[FrozenState]:
    """Let `node` serve `state`; returns the list of snapshots taken, of which the first entry is what it serves."""
    current = [state or snapshot()]
    taken: list[FrozenState] = []

    async def take() -> EncodedState:
        await asyncio.sleep(0.1)
        taken.append(current[0])
        return encoded(current[0])

    StateDonor(node, NAME, take, lambda: current[0].tip)
    return taken


def donate_by(node: Node, manifest: Manifest, answer: Callable[[int], Answer | Awaitable[Answer]]) -> None:
    """Let `node` offer what `manifest` says, and answer requests for chunks as the test likes."""

    def handler(_peer: PeerID, message: object, _buffers: object) -> Answer | Awaitable[Answer]:
        if isinstance(message, GetManifest):
            return Reply(Offer(), [manifest.encode()])
        assert isinstance(message, GetChunk)
        return answer(message.chunk)

    node.serve(transfer_service(NAME), handler)


async def swarm(world: World, donors: int) -> tuple[Node, list[Node]]:
    """A newcomer, and others that it knows."""
    nodes = [await world.spawn_node() for _ in range(donors + 1)]
    world.introduce()
    return nodes[0], nodes[1:]


async def download(
    newcomer: Node, donors: list[Node], *, timeout: float = 300, max_nbytes: int = 1 << 30
) -> Downloaded:
    peers = [donor.peer_id for donor in donors]
    return await download_state(newcomer, NAME, peers, timeout=timeout, rng=random.Random(1), max_nbytes=max_nbytes)


def assert_same(result: Downloaded, expected: FrozenState) -> None:
    assert result.manifest.tip == expected.tip
    assert result.manifest.layout == expected.layout
    assert result.scalars == expected.scalars
    assert len(result.buffers) == len(expected.buffers)
    for got, wanted in zip(result.buffers, expected.buffers, strict=True):
        assert got.dtype is wanted.dtype
        assert torch.equal(got, wanted)


def test_a_state_comes_bit_by_bit_from_several_donors():
    async def scenario() -> None:
        newcomer, donors = await swarm(World(1), 3)
        for donor in donors:
            donate(donor)
        result = await download(newcomer, [newcomer, *donors])
        assert_same(result, snapshot())
        assert sum(result.chunks_from.values()) == 12
        assert set(result.chunks_from) == {donor.peer_id for donor in donors}
        assert result.dropped == {}
        assert result.nbytes == result.manifest.nbytes
        assert 0 < result.seconds < 5

    run(scenario())


@pytest.mark.parametrize("direct_one_is_right", [True, False])
def test_who_is_relayed_is_asked_for_chunks_if_nobody_else_has_them(direct_one_is_right: bool) -> None:
    async def scenario() -> None:
        newcomer, donors = await swarm(World(3), 3)
        peers = [donor.peer_id for donor in donors]
        for donor in donors[1:] if not direct_one_is_right else donors:
            donate(donor)
        if not direct_one_is_right:
            donate_by(donors[0], encoded(snapshot()).manifest, lambda chunk: Reply(Chunk(), [b"wrong"]))
        rng = random.Random(1)
        result = await download_state(newcomer, NAME, peers, timeout=30, rng=rng, relayed=peers[1:])
        assert_same(result, snapshot())
        assert set(result.chunks_from) == set(peers[:1] if direct_one_is_right else peers[1:])
        assert set(result.dropped) == set([] if direct_one_is_right else peers[:1])

    run(scenario())


def test_on_a_real_loop_too():
    async def scenario() -> None:
        network = MemoryNetwork()
        nodes = [Node(identity, MemoryTransport(network, identity.peer_id)) for identity in (Identity(), Identity())]
        for node in nodes:
            await node.listen(Multiaddr("/ip4/127.0.0.1/tcp/0"))
        nodes[0].learn(nodes[1].peer_id, nodes[1].addresses)
        donate(nodes[1])
        assert_same(await download(nodes[0], nodes[1:], timeout=30), snapshot())
        for node in nodes:
            await node.close()

    asyncio.run(scenario())


def test_five_donors_of_which_one_lies_one_dies_one_dawdles_and_one_differs():
    async def scenario() -> None:
        world = World(2, bandwidth=4e6)
        state = snapshot(chunks=40)
        manifest = encoded(state).manifest
        newcomer, (honest, liar, mortal, slow, other) = await swarm(world, 5)
        donate(honest, state)
        donate(mortal, state)
        donate(other, snapshot(8))

        def lies(number: int) -> Reply:
            chunk = manifest.chunks[number]
            return Reply(Chunk(), [bytes((chunk.stop - chunk.start) * 4)])

        async def dawdles(number: int) -> Reply:
            await asyncio.sleep(1000)
            raise AssertionError

        donate_by(liar, manifest, lies)
        donate_by(slow, manifest, dawdles)
        asyncio.get_running_loop().call_later(1.0, world.kill, mortal.peer_id)
        result = await download(newcomer, [honest, liar, mortal, slow, other])
        assert_same(result, state)
        assert set(result.dropped) >= {liar.peer_id, mortal.peer_id}
        assert "wrong" in result.dropped[liar.peer_id]
        assert "lost" in result.dropped[mortal.peer_id]
        assert set(result.chunks_from) <= {honest.peer_id, mortal.peer_id}
        assert result.chunks_from[mortal.peer_id] >= 1
        assert result.seconds < 30

    run(scenario())


@pytest.mark.parametrize("codec", [None, Float16Compression()], ids=["whole", "half"])
def test_who_reserves_hears_how_many_bytes_will_be_sent(codec: Codec | None) -> None:
    """From that it follows how long the run would have to wait."""

    async def scenario() -> None:
        newcomer, [donor] = await swarm(World(1), 1)
        donate(donor, snapshot(codec=codec))
        told: list[int] = []

        async def reserve(_tip: Tip, _holders: object, nbytes: int) -> bool:
            told.append(nbytes)
            return True

        result = await download_state(
            newcomer, NAME, [donor.peer_id], timeout=300, rng=random.Random(1), reserve=reserve
        )
        assert told == [result.nbytes]

    run(scenario())


def test_a_slow_donor_does_not_hold_up_the_last_chunks():
    async def scenario() -> None:
        state = snapshot()
        manifest = encoded(state).manifest
        newcomer, (good, slow) = await swarm(World(3), 2)
        donate(good, state)

        async def dawdles(number: int) -> Reply:
            await asyncio.sleep(15)
            raise Refused("too late anyway")

        donate_by(slow, manifest, dawdles)
        result = await download(newcomer, [good, slow])
        assert_same(result, state)
        assert 5 < result.seconds < 7  # the patience with which a donor is waited for, and a little

    run(scenario())


def test_a_state_that_its_only_donor_sends_drop_by_drop_is_given_up():
    """It is never silent for long, and could go on so for hours."""

    async def scenario() -> None:
        buffers = [torch.zeros(1) for _ in range(250)]
        state = encoded(FrozenState(Tip(7, bytes(32), 7.0), b"layout", buffers, b"", codecs_of(buffers)))
        newcomer, (donor,) = await swarm(World(3), 1)
        turn = asyncio.Lock()

        async def drips(number: int) -> Reply:
            async with turn:
                await asyncio.sleep(4.5)
            return Reply(Chunk(), [state.payloads[number]])

        donate_by(donor, state.manifest, drips)
        began = asyncio.get_running_loop().time()
        with pytest.raises(DownloadFailed, match="less than 32 KiB/s"):
            await download(newcomer, [donor])
        assert asyncio.get_running_loop().time() - began < 30

    run(scenario(), until=5000.0)


def test_a_state_comes_from_one_donor_on_a_slow_line():
    async def scenario() -> None:
        world = World(3)
        world.lines.out = 140_000.0  # bytes a second: 15 s for the largest chunk, of which nothing is seen before
        newcomer, (donor,) = await swarm(world, 1)
        donate(donor)
        result = await download(newcomer, [donor])
        assert_same(result, snapshot())
        assert result.seconds > 60

    run(scenario(), until=5000.0)


def test_if_all_donors_of_the_majority_fail_the_next_state_is_tried():
    async def scenario() -> None:
        newcomer, donors = await swarm(World(4), 3)
        manifest = encoded(snapshot(8)).manifest

        def refuses(number: int) -> Reply:
            raise Refused("changed my mind")

        donate_by(donors[0], manifest, refuses)
        donate_by(donors[1], manifest, refuses)
        donate(donors[2])
        result = await download(newcomer, donors)
        assert_same(result, snapshot())
        assert set(result.dropped) == {donor.peer_id for donor in donors[:2]}

    run(scenario())


def test_a_donor_that_offers_late_still_helps():
    async def scenario() -> None:
        world = World(5, bandwidth=2e6)
        newcomer, donors = await swarm(world, 3)
        state = snapshot(chunks=30)
        for donor in donors[:2]:
            donate(donor, state)

        async def takes_its_time() -> EncodedState:
            await asyncio.sleep(3)
            return encoded(state)

        StateDonor(donors[2], NAME, takes_its_time, lambda: state.tip)
        result = await download(newcomer, donors)
        assert_same(result, state)
        assert result.chunks_from[donors[2].peer_id] > 2

    run(scenario())


def test_without_a_usable_donor_the_error_names_each_with_its_reason():
    async def scenario() -> None:
        world = World(6)
        newcomer, donors = await swarm(world, 5)
        unwilling, ignorant, corrupt, gone, garbled = donors
        StateDonor(unwilling, NAME, snapshot, lambda: snapshot().tip, offered=lambda: None)  # type: ignore[arg-type]
        manifest = encoded(snapshot()).manifest
        donate_by(corrupt, manifest, lambda number: Reply(Chunk(), [b"short"]))
        garbled.serve(transfer_service(NAME), lambda peer, message, buffers: Reply(Offer(), [b"not a manifest"]))
        world.kill(gone.peer_id)
        with pytest.raises(DownloadFailed) as failure:
            await download(newcomer, donors)
        text = str(failure.value)
        for donor, reason in (
            (unwilling, "this peer does not share its state"),
            (ignorant, "unknown service"),
            (corrupt, "wrong size"),
            (gone, "nobody answers"),
            (garbled, "not a manifest"),
        ):
            mine = next(part for part in text.split("; ") if repr(donor.peer_id) in part)
            assert reason in mine

    run(scenario())


def test_with_nobody_to_ask_or_nobody_that_answers_it_says_so():
    async def scenario() -> None:
        newcomer, (silent,) = await swarm(World(7), 1)
        with pytest.raises(DownloadFailed, match="nobody to ask"):
            await download(newcomer, [newcomer])

        async def never(*_: object) -> Reply:
            await asyncio.sleep(10_000)
            raise AssertionError

        silent.serve(transfer_service(NAME), never)
        with pytest.raises(DownloadFailed, match=r"no part of a state has arrived for 100 s\..*has not answered"):
            await download(newcomer, [silent], timeout=100)
        assert asyncio.get_running_loop().time() < 110

    run(scenario())


def test_who_offers_nothing_is_not_waited_for_when_the_others_have_nothing_newer():
    """One that says that it has a better state, and then nothing, would hold up all trainers for `timeout`."""

    async def scenario() -> None:
        peer, donors = await swarm(World(9), 3)
        for donor in donors[:2]:
            donate(donor)

        async def never(*_: object) -> Reply:
            await asyncio.sleep(10_000)
            raise AssertionError

        donors[2].serve(transfer_service(NAME), never)
        peers = [donor.peer_id for donor in donors]
        with pytest.raises(NothingWanted):
            await download_state(peer, NAME, peers, timeout=600, rng=random.Random(1), wanted=lambda tip: tip.epoch > 7)
        assert asyncio.get_running_loop().time() < OFFER_SECONDS + 1

    run(scenario())


def test_time_counts_from_the_last_chunk_and_its_end_says_how_far_it_came():
    async def scenario() -> None:
        newcomer, donors = await swarm(World(8, bandwidth=1e6, lost_after=1e6), 1)
        donate(donors[0], snapshot(chunks=40))
        loop, transport = asyncio.get_running_loop(), newcomer.transport
        assert isinstance(transport, MemoryTransport)
        loop.call_later(30.0, transport.network.cut, newcomer.peer_id, donors[0].peer_id)
        with pytest.raises(
            DownloadFailed,
            match=r"no part of a state has arrived for 10 s\. \d\d of \d\d chunks .* epoch 7 .* are missing",
        ):
            await download(newcomer, donors, timeout=10)
        assert 30 < loop.time() < 45, "it was not given up while chunks came"

    run(scenario())


def test_a_state_larger_than_the_newcomer_allows_is_refused_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
):
    async def scenario() -> None:
        newcomer, donors = await swarm(World(9), 1)
        shape = BufferShape("float64", 1 << 33)
        huge = Manifest(Tip(1, bytes(32), 1.0), b"", ("none",), ((1 << 33, 0),), (shape,), 0, bytes(32 << 14))
        donate_by(donors[0], huge, lambda number: Reply(Chunk(), [b""]))
        monkeypatch.setattr(torch, "empty", None)
        with pytest.raises(
            DownloadFailed, match=f"offers a state of {8 << 33} bytes, more than the {1 << 30} allowed here: max_state"
        ):
            await download(newcomer, donors)

    run(scenario())


def test_a_codec_shrinks_what_is_sent_and_all_newcomers_decode_the_same():
    async def scenario() -> None:
        world = World(10)
        nodes = [await world.spawn_node() for _ in range(4)]
        world.introduce()
        for donor in nodes[2:]:
            donate(donor, snapshot(codec=Float16Compression()))
        one, other = await asyncio.gather(download(nodes[0], nodes[2:]), download(nodes[1], nodes[2:]))
        assert one.nbytes < 0.8 * one.manifest.nbytes
        assert one.manifest.codecs == ("float16",)
        assert one.lossy
        state = snapshot()
        assert torch.equal(one.buffers[0], state.buffers[0].half().float())
        assert torch.equal(one.buffers[1], state.buffers[1])
        for mine, theirs in zip(one.buffers, other.buffers, strict=True):
            assert torch.equal(mine, theirs)

    run(scenario())


def test_a_chunk_is_encoded_once_for_all_newcomers_and_the_snapshot_is_let_go_of(monkeypatch: pytest.MonkeyPatch):
    async def scenario() -> None:
        world = World(17)
        *newcomers, donor = [await world.spawn_node() for _ in range(4)]
        world.introduce()
        snapshots: list[weakref.ref[torch.Tensor]] = []

        async def take() -> EncodedState:
            state = snapshot(codec=Float16Compression())
            snapshots.append(weakref.ref(state.buffers[0]))
            return encoded(state)

        StateDonor(donor, NAME, take, lambda: snapshot().tip)
        for newcomer in newcomers:
            await download(newcomer, [donor])
        assert len(snapshots) == 1
        assert sorted(encodings) == sorted([CHUNK_ELEMENTS] * 8 + [3, 100])
        assert snapshots[0]() is None, "what was encoded is held beside its payloads"

    encodings: list[int] = []
    encode = Codec.encode

    def counting(self: Codec, chunk: torch.Tensor) -> memoryview:
        encodings.append(chunk.numel())
        return encode(self, chunk)

    monkeypatch.setattr(Codec, "encode", counting)
    run(scenario())


def test_what_no_codec_changes_is_sent_from_the_snapshots_own_memory():
    state = snapshot()
    payloads = encoded(state).payloads[2:]  # behind the scalars
    first = state.buffers[0]
    first[CHUNK_ELEMENTS] = 7.5
    assert payloads[1][:4] == torch.tensor([7.5]).numpy().tobytes()


@pytest.mark.long
def test_a_large_state_comes_in_larger_chunks():
    async def scenario() -> None:
        newcomer, (donor,) = await swarm(World(18, bandwidth=1e9), 1)
        state = torch.arange(LARGE_BYTES, dtype=torch.float32)  # four times that in bytes: chunks of 3 MiB
        large = FrozenState(Tip(1, bytes(32), 1.0), b"", [state], b"", codecs_of([state]))
        manifest = encoded(large).manifest
        asked: list[int] = []
        most = 0

        async def answer(number: int) -> Reply:
            nonlocal most
            asked.append(number)
            most = max(most, len(asked))
            await asyncio.sleep(0.01)
            asked.remove(number)
            chunk = manifest.chunks[number]
            return Reply(Chunk(), [memoryview(state.numpy()).cast("B")[4 * chunk.start : 4 * chunk.stop]])

        donate_by(donor, manifest, answer)
        result = await download(newcomer, [donor])
        assert torch.equal(result.buffers[0], state)
        assert len(manifest.chunks) == -(-LARGE_BYTES // (3 * CHUNK_ELEMENTS))
        assert most == 4

    run(scenario())


def test_the_state_is_one_moments_while_the_donor_trains_on():
    async def scenario() -> None:
        world = World(11, bandwidth=3e6)
        newcomer, donors = await swarm(world, 2)
        parameters = torch.zeros(20 * CHUNK_ELEMENTS)
        epoch = 0

        def tip() -> Tip:
            return Tip(epoch, bytes(32), float(epoch))

        async def take() -> EncodedState:
            return encoded(FrozenState(tip(), b"", [parameters.clone()], b"", codecs_of([parameters])))

        async def trains() -> None:
            nonlocal epoch
            while True:
                await asyncio.sleep(0.5)
                parameters.add_(1)
                epoch += 1

        for donor in donors:
            StateDonor(donor, NAME, take, tip)
        donors[0].spawn(trains())
        await asyncio.sleep(10.1)
        result = await download(newcomer, donors)
        assert result.seconds > 3
        assert result.manifest.tip.epoch == 20
        assert bool(result.buffers[0].eq(20).all())

    run(scenario())


def test_those_who_ask_together_share_a_snapshot_and_it_is_dropped_when_nobody_asks():
    async def scenario() -> None:
        world = World(12)
        nodes = [await world.spawn_node() for _ in range(5)]
        world.introduce()
        taken = donate(nodes[4])
        for _ in range(2):
            results = await asyncio.gather(*(download(node, nodes[4:]) for node in nodes[:4]))
            assert len(taken) == 1
        for result in results:
            assert_same(result, snapshot())
        await asyncio.sleep(KEEP_SECONDS + 1)
        request = GetChunk(results[0].manifest.id, 0)
        with pytest.raises(Refused, match="not held any more"):
            await nodes[0].call(nodes[4].peer_id, transfer_service(NAME), request, Chunk, timeout=1)
        await download(nodes[0], nodes[4:])
        assert len(taken) == 2

    run(scenario())


def test_a_download_in_progress_is_not_cut_off_by_newer_snapshots():
    async def scenario() -> None:
        world = World(13, bandwidth=2e6)
        nodes = [await world.spawn_node() for _ in range(4)]
        world.introduce()
        state = snapshot(1, chunks=20)
        epoch = 1

        async def take() -> EncodedState:
            return encoded(replace(state, tip=tip()))

        def tip() -> Tip:
            return Tip(epoch, bytes(32), float(epoch))

        StateDonor(nodes[3], NAME, take, tip)
        downloads = []
        for epoch in (1, 2, 3):  # `tip` reads it
            downloads.append(asyncio.create_task(download(nodes[epoch - 1], nodes[3:])))
            await asyncio.sleep(2)
        epochs = [result.manifest.tip.epoch for result in await asyncio.gather(*downloads)]
        assert epochs == [1, 2, 2]

    run(scenario())


def test_who_asks_again_gets_the_newest_state():
    async def scenario() -> None:
        newcomer, (node,) = await swarm(World(16), 1)
        state = snapshot(1, chunks=7)

        async def take() -> EncodedState:
            return encoded(replace(state, tip=tip()))

        def tip() -> Tip:
            return Tip(epoch, bytes(32), float(epoch))

        StateDonor(node, NAME, take, tip)
        for epoch in range(1, 6):  # `tip` reads it
            assert (await download(newcomer, [node])).manifest.tip.epoch == epoch
        assert asyncio.get_running_loop().time() < 5, "no snapshot was idle for so long that it is dropped for that"

    run(scenario())


def test_bad_requests_are_refused_with_the_reason():
    async def scenario() -> None:
        newcomer, (donor,) = await swarm(World(14), 1)
        donate(donor)
        service = transfer_service(NAME)
        id = (await download(newcomer, [donor])).manifest.id
        for request, reason in (
            (GetChunk(id, 12), "the state has 12 chunks, there is no number 12"),
            (GetChunk(bytes(32), 0), "not held any more"),
            (GetChunk(id, 1 << 40), "not a message"),
            (GetChunk(b"", 0), "not a message"),
            (Offer(), "not a request"),
        ):
            with pytest.raises(Refused, match=reason):
                await newcomer.call(donor.peer_id, service, request, Chunk, timeout=1)

    run(scenario())


def test_a_donor_that_stops_tells_those_who_wait():
    async def scenario() -> None:
        newcomer, (node,) = await swarm(World(15), 1)

        async def never() -> EncodedState:
            await asyncio.sleep(10_000)
            raise AssertionError

        donor = StateDonor(node, NAME, never, lambda: snapshot().tip)
        asyncio.get_running_loop().call_later(1, donor.close)
        with pytest.raises(DownloadFailed, match="does not share its state any more"):
            await download(newcomer, [node])
        assert asyncio.get_running_loop().time() < 2

    run(scenario())


def test_chunks_that_no_codec_has_changed_are_opened_where_they_belong(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        newcomer, donors = await swarm(World(21), 2)
        for donor in donors:
            donate(donor)
        assert_same(await download(newcomer, donors), snapshot())
        assert not newcomer.transport.leases._targets

    copied: list[int] = []
    decode = Codec.decode

    def counting(self: Codec, payload: memoryview, dtype: torch.dtype, numel: int) -> torch.Tensor:
        copied.append(numel)
        return decode(self, payload, dtype, numel)

    monkeypatch.setattr(Codec, "decode", counting)
    run(scenario())
    assert copied == [100], "all but the booleans, of which a byte may be wrong"


def test_a_state_that_is_not_held_any_more_is_not_queued_either(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        newcomer, (donor,) = await swarm(World(22), 1)
        cancelled: list[bytes] = []
        monkeypatch.setattr(donor.transport, "cancel", cancelled.append)
        donate(donor)
        result = await download(newcomer, [donor])
        assert not cancelled
        await asyncio.sleep(2 * KEEP_SECONDS)
        assert cancelled == [chunk_name(result.manifest.id, 0)[:-4]]

    run(scenario())


def payload_of(state: FrozenState, number: int) -> bytes:
    return bytes(encoded(state).payloads[number])


def floats(chunks: int) -> FrozenState:
    buffers = [torch.randn(chunks * CHUNK_ELEMENTS, generator=torch.Generator().manual_seed(1))]
    return FrozenState(Tip(1, bytes(32), 1.0), b"layout", buffers, b"", codecs_of(buffers, None))


def test_a_chunk_that_is_here_is_not_overwritten_by_another_donor_that_was_asked_too() -> None:
    async def scenario() -> None:
        state = floats(4)
        manifest = encoded(state).manifest
        newcomer, (late, liar) = await swarm(World(23), 2)
        asked: list[int] = []

        async def answers_late(number: int) -> Reply:
            asked.append(number)
            await asyncio.sleep(4 + 2 * len(asked))  # the first one when the liar was asked, too; the second one last
            return Reply(Chunk(), [payload_of(state, number)], chunk_name(manifest.id, number))

        async def lies(number: int) -> Reply:
            if number in asked:  # at 5 s
                await asyncio.sleep(2)
                return Reply(Chunk(), [bytes(4 * CHUNK_ELEMENTS)], chunk_name(manifest.id, number))
            await asyncio.sleep(4)
            return Reply(Chunk(), [payload_of(state, number)], chunk_name(manifest.id, number))

        donate_by(late, manifest, answers_late)
        donate_by(liar, manifest, lies)
        result = await download(newcomer, [late, liar])
        assert "wrong digest" in result.dropped[liar.peer_id]
        assert_same(result, state)

    run(scenario())


def test_what_was_opened_in_place_is_what_is_verified() -> None:
    async def scenario() -> None:
        state = floats(2)
        manifest = encoded(state).manifest
        newcomer, (liar, honest) = await swarm(World(24), 2)

        async def brings_two(number: int) -> Reply:
            name, service = chunk_name(manifest.id, number), transfer_service(NAME)
            liar.notify([newcomer.peer_id], service, Chunk(), [bytes(4 * CHUNK_ELEMENTS)], name)  # opened in place
            return Reply(Chunk(), [payload_of(state, number)], name)

        donate_by(liar, manifest, brings_two)
        donate(honest, state)
        result = await download(newcomer, [liar, honest])
        assert_same(result, state)
        assert "wrong digest" in result.dropped[liar.peer_id]

    run(scenario())


def test_two_downloads_of_one_state_at_a_time() -> None:
    async def scenario() -> None:
        newcomer, (donor,) = await swarm(World(25), 1)
        donate(donor)
        for result in await asyncio.gather(*(download(newcomer, [donor]) for _ in range(2))):
            assert_same(result, snapshot())
            assert result.seconds < 5
        assert not newcomer.transport.leases._targets

    run(scenario())


def test_a_donor_of_equal_snapshots_keeps_one_timer_and_none_when_it_is_closed() -> None:
    async def scenario() -> None:
        newcomer, (node,) = await swarm(World(26), 1)
        timers: list[asyncio.TimerHandle] = []
        loop = asyncio.get_running_loop()
        call_at = loop.call_at

        def counting(when: float, callback: Callable[..., object], *args: object, **more: object) -> object:
            timer = call_at(when, callback, *args, **more)  # type: ignore[arg-type]
            if "StateDonor" in callback.__qualname__:
                timers.append(timer)
            return timer

        loop.call_at = counting  # type: ignore[method-assign, assignment]
        state = encoded(snapshot())

        async def take() -> EncodedState:
            return state

        donor = StateDonor(node, NAME, take, lambda: None)
        for _ in range(5):
            await download(newcomer, [node])
        assert len([timer for timer in timers if not timer.cancelled()]) == 1
        donor.close()
        assert all(timer.cancelled() for timer in timers), "the averager of a closed donor stays for 30 s"

    run(scenario())
