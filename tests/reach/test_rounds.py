"""Peers that nobody can dial average through a relay that is a member of the run itself."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch

import shoal
from shoal.dht.created import CreatedNode
from shoal.p2p.identity import PeerID
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.sockets import SocketTransport
from shoal.reach import punch
from shoal.reach.finding import Reached, WayIn
from shoal.reach.probe import DialBack

ELEMENTS = 1 << 18


@pytest.fixture
def unreached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers on this machine take each other for peers on others, whom they do not reach."""

    async def nobody_answers(*_: object) -> bool:
        return False

    async def no_hole(*_: object) -> None:
        raise TimeoutError

    source = SocketTransport.source
    monkeypatch.setattr(DialBack, "_answers", nobody_answers)
    monkeypatch.setattr(SocketTransport, "source", lambda *asked: source(*asked) and "203.0.113.9")
    monkeypatch.setattr(punch, "_open", no_hole)
    monkeypatch.setattr(punch.Punch, "_inside", lambda *_: [])


@pytest.mark.usefixtures("unreached")
def test_a_round_of_a_relay_and_two_peers_that_it_leads_to_each_other() -> None:
    with ExitStack() as stack:
        relay = stack.enter_context(shoal.DHT(start=True, relay=True))
        dhts = [relay]
        for _ in range(2):
            dhts.append(stack.enter_context(shoal.DHT(relay.get_visible_maddrs(), start=True)))
            assert not dhts[-1].client_mode
            assert all(address.relay == relay.peer_id for address in dhts[-1].get_visible_maddrs())
        vectors = [torch.full((ELEMENTS,), float(rank)) for rank in range(3)]
        averagers = [
            shoal.DecentralizedAverager([vector], dht, prefix="run", min_matchmaking_time=10.0, start=True)
            for vector, dht in zip(vectors, dhts, strict=True)
        ]
        for averager in averagers:
            stack.callback(averager.shutdown)
        threads = stack.enter_context(ThreadPoolExecutor(3))
        for _ in range(2):
            for rank, vector in enumerate(vectors):
                vector.fill_(float(rank))
            list(threads.map(lambda averager: averager.step(timeout=60), averagers))
            assert all(torch.equal(vector, torch.ones(ELEMENTS)) for vector in vectors)
        assert [len(averager.last_round.members) for averager in averagers if averager.last_round] == [3, 3, 3]
        assert relay.dht_node.relay is not None
        assert relay.dht_node.relay.numbers[2] >= 1  # the link of the two
        averagers[0].shutdown()
        relay.shutdown()
        until = time.monotonic() + 20
        while not (dhts[1].client_mode and dhts[2].client_mode):
            assert time.monotonic() < until
            time.sleep(0.05)
        time.sleep(1.5)  # members look once a second how they are reached
        for averager in averagers[1:]:
            assert averager._engine.swarm is not None
            assert averager._engine.swarm.me.addresses, "where it is reached when the relay is back"
            assert averager._engine.swarm.me.is_relayed, "nobody else can dial it"


@pytest.mark.usefixtures("unreached")
def test_the_address_of_a_peer_at_a_relay_gets_others_in() -> None:
    with shoal.DHT(start=True, relay=True) as relay, shoal.DHT(relay.get_visible_maddrs(), start=True) as relayed:
        [address] = relayed.get_visible_maddrs()
        assert address.relay == relay.peer_id
        with shoal.DHT([address], start=True) as newcomer:
            assert relayed.store("key", "value", shoal.get_dht_time() + 60)
            found = newcomer.get("key")
            assert found is not None
            assert found.value == "value"


@pytest.mark.usefixtures("unreached")
def test_a_peer_that_came_by_itself_is_nobody_to_ask_for_ports() -> None:
    async def observers(_dht: shoal.DHT, node: CreatedNode) -> list[Multiaddr]:
        return node._observers()

    with shoal.DHT(start=True) as first, shoal.DHT(first.get_visible_maddrs(), start=True, client_mode=False) as second:
        assert second.peer_id in first.run_coroutine(contacts)
        assert first.run_coroutine(observers) == []
        assert set(second.run_coroutine(observers)) == set(first.get_visible_maddrs())


async def contacts(_dht: shoal.DHT, node: CreatedNode) -> list[PeerID]:
    return node.contacts()


@pytest.mark.usefixtures("unreached")
def test_who_has_lost_its_relay_is_not_taken_for_one_that_is_reached_directly() -> None:
    """All candidates for coordinator are in one order, by what each says of itself: relayed ones last."""

    async def lose_relays(_dht: shoal.DHT, node: CreatedNode) -> None:
        await node.found_out(WayIn(Reached.NOBODY))

    with shoal.DHT(start=True, relay=True) as relay, shoal.DHT(relay.get_visible_maddrs(), start=True) as relayed:
        averager = shoal.DecentralizedAverager([torch.zeros(1)], relayed, prefix="run", start=True)
        swarm = averager._engine.swarm
        assert swarm is not None
        before = swarm.me
        assert before.is_relayed
        relayed.run_coroutine(lose_relays)
        assert relayed.get_visible_maddrs() == []
        assert swarm.me == before
        averager.shutdown()
