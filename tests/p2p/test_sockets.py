"""The transport over TCP: who may connect, how connections come and go, and what is left when all is closed."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import threading
import time
from functools import partial
from pathlib import Path

import pytest

import shoal.p2p.router
import shoal.p2p.tcp
from shoal.p2p.errors import HandshakeFailed, PeerUnreachable
from shoal.p2p.identity import Identity, PeerID
from shoal.p2p.multiaddr import Multiaddr
from tests.p2p.recorder import LOOPBACK, eventually, sockets

SEED = bytes(range(32))


def test_a_dialler_that_claims_another_peer_id_is_refused():
    async def main():
        async with sockets(None, None, None) as (listener, impostor, friend):
            address = await listener.transport.listen(LOOPBACK)
            await friend.transport.dial(address)
            impostor.transport.peer_id = friend.transport.peer_id
            with pytest.raises(HandshakeFailed, match="the key of this connection is not that of"):
                await impostor.transport.dial(address)
            impostor.transport.send([listener.transport.peer_id], b"I am your friend")
            friend.transport.send([listener.transport.peer_id], b"unharmed")
            await listener.until_messages(1)
            assert listener.headers == [b"unharmed"]
            assert friend.lost == listener.lost == []

    asyncio.run(main())


def test_a_refused_dialler_that_stays_is_thrown_out(monkeypatch):
    monkeypatch.setattr("shoal.p2p.sockets.REFUSAL_TIME", 0.05)

    async def main():
        async with sockets(None, None) as (listener, impostor):
            address = await listener.transport.listen(LOOPBACK)
            impostor.transport.peer_id = Identity().peer_id
            # It looks away when the refusal comes, so it does not hang up by itself.
            impostor.transport._on_welcome = lambda connection, frames: None
            started = time.monotonic()
            with pytest.raises(PeerUnreachable, match="connection was lost"):
                await impostor.transport.dial(address)
            assert time.monotonic() - started < shoal.p2p.router.HELLO_TIMEOUT / 2, "something else has ended it"

    asyncio.run(main())


def test_one_that_connects_and_says_nothing_is_thrown_out(monkeypatch):
    monkeypatch.setattr(shoal.p2p.router, "HELLO_TIMEOUT", 0.1)

    async def main():
        async with sockets(None) as (listener,):
            address = await listener.transport.listen(LOOPBACK)
            reader, writer = await asyncio.open_connection(address.host, address.port)
            async with asyncio.timeout(60):
                await reader.read()  # ZeroMQ's greeting, and then the end
            writer.close()

    asyncio.run(main())


def test_a_peer_id_that_is_no_key_can_not_be_dialled():
    async def main():
        async with sockets(None) as (one,):
            with pytest.raises(HandshakeFailed, match="nobody can be"):
                await one.transport.dial(LOOPBACK.with_port(9).with_peer(PeerID(b"\xff" * 32)))

    asyncio.run(main())


@pytest.mark.parametrize("host", ["/ip4/127.0.0.1", "/ip6/::1", "/dns/localhost", "/dns4/localhost", "/dns6/localhost"])
def test_kinds_of_addresses(host):
    if "6" in host:
        try:
            socket.create_server(("localhost", 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("on this machine localhost has no IPv6 address")

    async def main():
        async with sockets(None, None) as (listener, dialler):
            address = await listener.transport.listen(Multiaddr(f"{host}/tcp/0"))
            with pytest.raises(PeerUnreachable, match="nobody listens there"):
                await asyncio.wait_for(dialler.transport.dial(address.with_port(9)), 60)
            await asyncio.wait_for(dialler.transport.dial(address), 60)
            dialler.transport.send([listener.transport.peer_id], b"hello")
            await listener.until_messages(1)

    asyncio.run(main())


def test_addresses_that_can_not_be_dialled():
    async def main():
        async with sockets(None) as (one,):
            peer = Identity().peer_id
            with pytest.raises(PeerUnreachable, match="nobody listens there"):
                await one.transport.dial(LOOPBACK.with_peer(peer))
            with pytest.raises(PeerUnreachable, match="no-such-host"):
                await one.transport.dial(Multiaddr(f"/dns/no-such-host.invalid/tcp/80/p2p/{peer}"))

    asyncio.run(main())


def test_an_abandoned_dial_leaves_nothing_and_may_be_repeated():
    async def main():
        async with sockets(None, None) as (listener, dialler):
            silent = socket.create_server(("127.0.0.1", 0))  # connects, and never greets
            nowhere = LOOPBACK.with_port(silent.getsockname()[1]).with_peer(listener.transport.peer_id)
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(dialler.transport.dial(nowhere), 0.05)
            router = dialler.transport._dialler
            assert (router.dialled, router._by_routing_id, router._by_fd) == ({}, {}, {})
            silent.close()
            await dialler.transport.dial(await listener.transport.listen(LOOPBACK))

    asyncio.run(main())


def test_two_dials_to_one_endpoint_do_not_disturb_each_other():
    async def main():
        async with sockets(None, None) as (listener, dialler):
            address = await listener.transport.listen(LOOPBACK)
            wrong = address.with_peer(Identity().peer_id)
            dials = [dialler.transport.dial(where) for where in (wrong, address, address, wrong)]
            outcomes = await asyncio.wait_for(asyncio.gather(*dials, return_exceptions=True), 60)
            assert [type(outcome) for outcome in outcomes] == [
                HandshakeFailed,
                type(None),
                type(None),
                HandshakeFailed,
            ]
            assert dialler.lost == listener.lost == []

    asyncio.run(main())


def test_two_that_dial_each_other_at_once_are_connected_and_lost_once():
    async def main():
        for _ in range(5):
            async with sockets(None, None) as (one, other):
                addresses = [await end.transport.listen(LOOPBACK) for end in (one, other)]
                await asyncio.gather(one.transport.dial(addresses[1]), other.transport.dial(addresses[0]))
                for number in range(50):
                    one.transport.send([other.transport.peer_id], b"%d" % number)
                    other.transport.send([one.transport.peer_id], b"%d" % number)
                await asyncio.gather(one.until_messages(50), other.until_messages(50))
                assert one.headers == other.headers == [b"%d" % number for number in range(50)]
                one.transport.disconnect(other.transport.peer_id)
                await other.until_lost(one.transport.peer_id)
                await asyncio.sleep(0.02)  # a second report would come now
                assert (len(other.lost), one.lost) == (1, [])

    asyncio.run(main())


def test_a_peer_that_was_started_anew_replaces_what_it_was(monkeypatch, caplog):
    """Its old connection may look alive for a while: a machine that lost power says no goodbye."""
    monkeypatch.setattr("shoal.p2p.sockets.ALIVE_TIMEOUT", 0.2)

    async def main():
        async with sockets(None, SEED, SEED) as (listener, before, after):
            address = await listener.transport.listen(LOOPBACK)
            await before.transport.dial(address)
            before.transport.send([listener.transport.peer_id], b"before")
            await listener.until_messages(1)
            before.transport._on_later = lambda *_: None  # it is gone, and answers nothing
            await after.transport.dial(address)
            assert await listener.until_lost(after.transport.peer_id) == "it was started anew"
            listener.transport.send([after.transport.peer_id], b"welcome back")
            await after.until_messages(1)
            assert listener.transport.is_connected(after.transport.peer_id)
            await before.until_lost(listener.transport.peer_id)
            assert not caplog.records

    asyncio.run(main())


def test_a_connection_may_be_announced_after_its_first_message():
    """ZeroMQ's threads race: one tells that it accepted, another may have received before that."""

    async def main():
        async with sockets(None, None) as (listener, dialler):
            address = await listener.transport.listen(LOOPBACK)
            router = listener.transport._listener
            read_monitor = router._read_monitor
            asyncio.get_running_loop().remove_reader(router._monitor.fileno())
            router._read_monitor = lambda: None
            dial = asyncio.create_task(dialler.transport.dial(address))
            await eventually(lambda: router._early)
            assert not dial.done()
            router._read_monitor = read_monitor
            router._read_monitor()
            await asyncio.wait_for(dial, 60)
            dialler.transport.send([address.peer_id], b"hello")
            await listener.until_messages(1)

    asyncio.run(main())


def test_a_connection_may_be_announced_after_its_end():
    async def main():
        async with sockets(None) as (listener,):
            await listener.transport.listen(LOOPBACK)
            router = listener.transport._listener
            fd = os.dup(0)
            os.close(fd)
            router._disconnected(fd)
            router._accepted(fd)
            assert (router._by_fd, router._gone) == ({}, set())
            router._accepted(fd)  # the number, reused
            assert list(router._by_fd) == [fd]

    asyncio.run(main())


def test_a_peer_that_comes_back_at_its_address_is_dialled_again_at_once():
    """ZeroMQ's own news of a reconnection, which it tells after a loss, must not be taken for the new dial's."""

    async def main():
        async with sockets(None, SEED) as (dialler, first):
            address = await first.transport.listen(LOOPBACK)
            await dialler.transport.dial(address)
            await first.transport.close()
            for times in range(1, 20):
                await dialler.until(partial(lambda number: len(dialler.lost) == number, times))
                async with sockets(SEED) as (again,):
                    await again.transport.listen(LOOPBACK.with_port(address.port))
                    await dialler.transport.dial(address)
                    dialler.transport.send([again.transport.peer_id], b"again")
                    await again.until_messages(1)

    asyncio.run(main())


def test_a_peer_whose_queue_is_full_is_lost_and_the_others_are_not(monkeypatch):
    monkeypatch.setattr(shoal.p2p.router, "SEND_QUEUE", 8)
    monkeypatch.setattr(shoal.p2p.router, "RECEIVE_QUEUE", 8)

    async def main():
        async with sockets(None, None, None) as (sender, slow, quick):
            await asyncio.gather(
                slow.transport.dial(await sender.transport.listen(LOOPBACK)),
                sender.transport.dial(await quick.transport.listen(LOOPBACK)),
            )
            router = slow.transport._dialler
            asyncio.get_running_loop().remove_reader(router.socket.fileno())
            sent = 0
            while not sender.lost:
                sender.transport.send([slow.transport.peer_id, quick.transport.peer_id], b"%d" % sent, [bytes(1 << 20)])
                sent += 1
                assert sent < 1000
                await quick.until_messages(sent)
            assert sender.lost == [(slow.transport.peer_id, "its queue is full")]
            assert not sender.transport.is_connected(slow.transport.peer_id)
            assert quick.headers == [b"%d" % number for number in range(sent)]
            # What the slow one did get is a beginning without a gap.
            asyncio.get_running_loop().add_reader(router.socket.fileno(), router._drain)
            router._drain()
            await slow.until_lost(sender.transport.peer_id)
            assert slow.headers == [b"%d" % number for number in range(len(slow.headers))]
            assert len(slow.headers) < sent

    asyncio.run(main())


def test_what_waits_for_a_peer_that_does_not_read_is_bounded_in_bytes(monkeypatch):
    monkeypatch.setattr(shoal.p2p.router, "SEND_QUEUE_BYTES", 16 << 20)
    monkeypatch.setattr(shoal.p2p.router, "RECEIVE_QUEUE", 8)

    async def main():
        async with sockets(None, None) as (sender, reader):
            await reader.transport.dial(await sender.transport.listen(LOOPBACK))
            for sent in range(1, 33):  # more than the bound in all, and never at a time
                sender.transport.send([reader.transport.peer_id], b"", [bytes(1 << 20)])
                await reader.until_messages(sent)
            asyncio.get_running_loop().remove_reader(reader.transport._dialler.socket.fileno())
            ((connection,),) = sender.transport._peers.values()
            waiting = 0
            while not connection.reason:
                sender.transport.send([reader.transport.peer_id], b"", [bytes(1 << 20)])
                waiting += 1
                assert waiting < 80  # also what the reader's ZeroMQ and TCP take
                await asyncio.sleep(0.001)
            assert await sender.until_lost(reader.transport.peer_id) == "its queue is full"

    asyncio.run(main())


def test_where_the_kernel_does_not_count_bytes_nobody_is_cut_off_for_them(monkeypatch):
    monkeypatch.setattr(shoal.p2p.router, "SEND_QUEUE_BYTES", 1 << 20)
    monkeypatch.setattr(shoal.p2p.tcp, "counts", lambda fd: (0, 0))

    async def main():
        async with sockets(None, None) as (sender, reader):
            await reader.transport.dial(await sender.transport.listen(LOOPBACK))
            for _ in range(8):
                sender.transport.send([reader.transport.peer_id], b"", [bytes(1 << 20)])
            await reader.until_messages(8)

    asyncio.run(main())


def test_a_defect_in_a_handler_stops_neither_loop_nor_connection(caplog):
    async def main():
        async with sockets(None, None) as (one, other):
            await one.transport.dial(await other.transport.listen(LOOPBACK))
            handler = other.transport._on_message
            other.transport._on_message = lambda *_: 1 / 0
            one.transport.send([other.transport.peer_id], b"first")
            await eventually(lambda: "ZeroDivisionError" in caplog.text)
            other.transport._on_message = handler
            one.transport.send([other.transport.peer_id], b"second")
            await other.until_messages(1)
            assert other.headers == [b"second"]

    asyncio.run(main())


def test_32_transports_share_a_handful_of_threads():
    async def main():
        before = len(os.listdir("/proc/self/task"))
        async with sockets(*[None] * 32) as ends:
            addresses = [await end.transport.listen(LOOPBACK) for end in ends]
            for number, end in enumerate(ends):
                await asyncio.gather(*(end.transport.dial(address) for address in addresses[:number]))
            everybody = [end.transport.peer_id for end in ends]
            for end in ends:
                end.transport.send([peer for peer in everybody if peer != end.transport.peer_id], b"hello all")
            await asyncio.gather(*(end.until_messages(31) for end in ends))
            assert len(os.listdir("/proc/self/task")) - before <= 4

    asyncio.run(main())


def test_nothing_is_left_when_all_is_closed():
    started_with = threading.active_count()

    def descriptors() -> set[str]:
        return {os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.exists()}

    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    def left_over() -> bool:
        return threads() > before[0] or len(descriptors()) > before[1]

    async def main():
        async with sockets(None, None, None) as (one, two, three):
            address = await one.transport.listen(LOOPBACK)
            await asyncio.gather(two.transport.dial(address), three.transport.dial(address))
            with pytest.raises(HandshakeFailed):
                await two.transport.dial(address.with_peer(Identity().peer_id))
            dial = asyncio.create_task(three.transport.dial(address.with_port(9).with_peer(Identity().peer_id)))
            await asyncio.sleep(0)
            two.transport.disconnect(one.transport.peer_id)
            assert left_over()
        with pytest.raises(PeerUnreachable):
            await dial
        # The kernel may list a thread for a moment after it was joined.
        await eventually(lambda: not left_over())
        with pytest.raises(PeerUnreachable, match="closed"):
            await two.transport.dial(address)
        with pytest.raises(RuntimeError, match="closed"):
            await one.transport.listen(LOOPBACK)
        two.transport.send([one.transport.peer_id], b"to nobody")
        two.transport.disconnect(one.transport.peer_id)
        await two.transport.close()

    gc.collect()
    before = (threads(), len(descriptors()) + 3)  # a loop has three
    asyncio.run(main())
    assert threading.active_count() <= started_with


def test_loops_in_different_threads_do_not_share_a_context():
    def run():
        async def main():
            async with sockets(None, None) as (one, other):
                await one.transport.dial(await other.transport.listen(LOOPBACK))
                for number in range(100):
                    one.transport.send([other.transport.peer_id], b"%d" % number)
                await other.until_messages(100)
                done.append(True)

        asyncio.run(main())

    done: list[bool] = []
    running = [threading.Thread(target=run) for _ in range(3)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(60)
    assert done == [True] * 3
