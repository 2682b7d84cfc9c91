"""A message that never ends is noticed, and a loop that was held up is not mistaken for one."""

from __future__ import annotations

import asyncio

import zmq

from shoal.p2p import flood
from shoal.p2p.flood import MAX_MESSAGE_BYTES, FloodGauge
from shoal.p2p.greeting import hello
from shoal.p2p.identity import Identity
from shoal.p2p.tcp import counts
from tests.p2p.recorder import LOOPBACK, zeromq


def test_much_without_a_message_is_a_flood_when_seen_twice():
    gauge = FloodGauge()
    assert not gauge.is_flooding(10, 0)
    assert not gauge.is_flooding(10 + MAX_MESSAGE_BYTES, 0)
    assert not gauge.is_flooding(11 + MAX_MESSAGE_BYTES, 0)
    assert gauge.is_flooding(11 + MAX_MESSAGE_BYTES, 0)


def test_messages_that_waited_for_the_loop_are_none():
    gauge = FloodGauge()
    assert not gauge.is_flooding(0, 3)
    assert not gauge.is_flooding(5 * MAX_MESSAGE_BYTES, 3)
    assert not gauge.is_flooding(6 * MAX_MESSAGE_BYTES, 4)
    assert not gauge.is_flooding(8 * MAX_MESSAGE_BYTES, 4)
    assert not gauge.is_flooding(8 * MAX_MESSAGE_BYTES, 5)


def test_a_descriptor_that_is_no_connection_received_nothing(tmp_path):
    with (tmp_path / "file").open("w") as file:
        assert counts(file.fileno()) == (0, 0)
    assert counts(-1) == (0, 0)


def test_who_sends_it_is_cut_off_before_it_ends(monkeypatch):
    monkeypatch.setattr(flood, "INTERVAL", 0.005)
    monkeypatch.setattr(flood, "MAX_MESSAGE_BYTES", 16 << 20)

    async def main():
        async with zeromq(None, None) as (listener, friend):
            address = await listener.transport.listen(LOOPBACK)
            await friend.transport.dial(address)
            attacker = Identity()
            with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
                dealer.curve_publickey, dealer.curve_secretkey = attacker.curve_keys()
                dealer.curve_serverkey = listener.transport.peer_id.curve_key()
                dealer.linger = 0
                dealer.connect(f"tcp://{address.host}:{address.port}")
                dealer.send(hello(attacker.peer_id, bytes(8)))
                await asyncio.to_thread(dealer.recv)
                dealer.send_multipart([bytes(1 << 20)] * 200)
                assert await listener.until_lost(attacker.peer_id) == "it sent a message over its bound"
            # Messages of a good size pass, however many there are.
            for number in range(60):
                friend.transport.send([listener.transport.peer_id], b"%d" % number, [bytes(1 << 20)])
            await listener.until_messages(60)
            assert len(listener.lost) == 1

    asyncio.run(main())
