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

import shoal.p2p.link
import shoal.p2p.outgoing
import shoal.p2p.sockets
from shoal.p2p import tcp
from shoal.p2p.errors import HandshakeFailed, PeerUnreachable
from shoal.p2p.identity import Identity, PeerID
from shoal.p2p.link import Greeting, Stage
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.sockets import SocketTransport
from tests.p2p.recorder import LOOPBACK, Recorder, deafen, eventually, hear, sockets

SEED = bytes(range(32))


def test_a_dialler_that_claims_another_peer_id_is_refused():
    async def main():
        async with sockets(None, None, None) as (listener, impostor, friend):
            address = await listener.transport.listen(LOOPBACK)
            await friend.transport.dial(address)
            impostor.transport.peer_id = friend.transport.peer_id
            with pytest.raises(HandshakeFailed, match="it has not proven to be"):
                await impostor.transport.dial(address)
            impostor.transport.send([listener.transport.peer_id], b"I am your friend")
            friend.transport.send([listener.transport.peer_id], b"unharmed")
            await listener.until_messages(1)
            assert listener.headers == [b"unharmed"]
            assert friend.lost == listener.lost == []

    asyncio.run(main())


def test_a_refused_dialler_that_stays_is_thrown_out(monkeypatch):
    monkeypatch.setattr("shoal.p2p.link.REFUSAL_TIME", 0.05)

    async def main():
        async with sockets(None, None) as (listener, impostor):
            address = await listener.transport.listen(LOOPBACK)
            impostor.transport.peer_id = Identity().peer_id
            # It looks away when the refusal comes, so it does not hang up by itself.
            heard = impostor.transport.heard
            impostor.transport.heard = lambda link, payload: (
                None if link.greeting is Greeting.SAID_HELLO else heard(link, payload)
            )
            started = time.monotonic()
            with pytest.raises(PeerUnreachable, match="connection was lost"):
                await impostor.transport.dial(address)
            assert time.monotonic() - started < shoal.p2p.link.PROOF_TIMEOUT / 2, "something else has ended it"

    asyncio.run(main())


def test_one_that_connects_and_says_nothing_is_thrown_out(monkeypatch):
    monkeypatch.setattr(shoal.p2p.link, "PROOF_TIMEOUT", 0.1)

    async def main():
        async with sockets(None) as (listener,):
            address = await listener.transport.listen(LOOPBACK)
            reader, writer = await asyncio.open_connection(address.host, address.port)
            async with asyncio.timeout(60):
                assert await reader.read() == b""
            writer.close()

    asyncio.run(main())


def test_a_peer_id_that_is_no_key_can_not_be_dialled():
    async def main():
        async with sockets(None, None) as (one, other):
            with pytest.raises(HandshakeFailed, match="cannot prove to be that peer"):
                await one.transport.dial((await other.transport.listen(LOOPBACK)).with_peer(PeerID(b"\xff" * 32)))

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
            await eventually(lambda: not dialler.transport._links)
            silent.close()
            await dialler.transport.dial(await listener.transport.listen(LOOPBACK))

    asyncio.run(main())


def test_two_dials_to_one_endpoint_do_not_disturb_each_other(caplog):
    async def main():
        async with sockets(None, None) as (listener, dialler):
            address = await listener.transport.listen(LOOPBACK)
            wrong = address.with_peer(Identity().peer_id)
            dials = [dialler.transport.dial(where) for where in (wrong, address, address, wrong)]
            outcomes = await asyncio.wait_for(asyncio.gather(*dials, return_exceptions=True), 60)
            gc.collect()
            assert not caplog.records, "nothing is said of the dials that are not needed"
            assert [type(outcome) for outcome in outcomes] == [
                HandshakeFailed,
                type(None),
                type(None),
                HandshakeFailed,
            ]
            assert dialler.lost == listener.lost == []

    asyncio.run(main())


def test_two_that_dial_each_other_at_once_have_one_link_and_are_lost_once():
    async def main():
        for _ in range(20):
            async with sockets(None, None) as (one, other):
                addresses = [await end.transport.listen(LOOPBACK) for end in (one, other)]
                dials = one.transport.dial(addresses[1]), other.transport.dial(addresses[0])
                said: dict[Recorder, list[bytes]] = {one: [], other: []}
                for dial in asyncio.as_completed(dials):
                    await dial
                    for end, to in ((one, other), (other, one)):
                        for number in range(25):  # also as soon as one of the two believes that there is a link
                            if end.transport.is_connected(to.transport.peer_id):
                                said[to].append(b"%d" % number)
                            end.transport.send([to.transport.peer_id], b"%d" % number)
                await asyncio.gather(*(end.until_messages(len(said[end])) for end in (one, other)))
                assert (one.headers, other.headers) == (said[one], said[other])
                assert len(one.headers) >= 25 <= len(other.headers)
                assert one.lost == other.lost == []
                await eventually(lambda: all(len(end.transport._links) == 1 for end in (one, other)))
                one.transport.disconnect(other.transport.peer_id)
                await other.until_lost(one.transport.peer_id)
                await asyncio.sleep(0.02)  # a second report would come now
                assert (len(other.lost), one.lost) == (1, [])

    asyncio.run(main())


@pytest.mark.parametrize("lives", [True, False])
def test_a_peer_that_was_dialled_and_now_dials_is_asked_whether_it_has_lost_the_first_link(monkeypatch, lives):
    """Its hello may have been under way when the first link opened, or it has lost that one without a word."""
    monkeypatch.setattr("shoal.p2p.sockets.ALIVE_TIMEOUT", 100.0 if lives else 0.2)

    async def main():
        async with sockets(None, None) as (one, other):
            here = await one.transport.listen(LOOPBACK)
            await one.transport.dial(await other.transport.listen(LOOPBACK))
            await eventually(lambda: other.transport.is_connected(here.peer_id))
            link = other.transport._peers.pop(here.peer_id)  # so it dials
            deafen(other)
            dial = asyncio.create_task(other.transport.dial(here))
            if lives:
                await eventually(lambda: one.transport._rivals)
                other.transport._peers[here.peer_id] = link
                hear(other)
                with pytest.raises(HandshakeFailed, match="it is connected already"):
                    await dial
                assert one.lost == other.lost == []
            else:
                await dial
                assert [reason for _, reason in one.lost] == ["it was started anew"]
            other.transport.send([here.peer_id], b"still here")
            await one.until_messages(1)
            link.end("the test is over")

    asyncio.run(main())


def test_what_came_before_a_send_failed_is_still_read():
    async def main():
        async with sockets(None, None) as (one, other):
            await one.transport.dial(await other.transport.listen(LOOPBACK))
            peers = (other.transport.peer_id, one.transport.peer_id)
            one.transport.send([peers[0]], b"hello")
            await other.until_messages(1)
            deafen(other)
            for number in range(5):
                one.transport.send([peers[0]], b"%d" % number)
            [link] = one.transport._links
            link.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # it ends by RST
            link.socket.close()
            one.transport._links.clear()
            await asyncio.sleep(0.05)
            for _ in range(3):  # these find out
                other.transport.send([peers[1]], b"to nobody")
            assert other.lost == []
            hear(other)
            await other.until_lost(peers[1])
            assert other.headers == [b"hello", b"0", b"1", b"2", b"3", b"4"]

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
            deafen(before)  # it is gone, and answers nothing
            await after.transport.dial(address)
            assert await listener.until_lost(after.transport.peer_id) == "it was started anew"
            listener.transport.send([after.transport.peer_id], b"welcome back")
            await after.until_messages(1)
            assert listener.transport.is_connected(after.transport.peer_id)
            assert not caplog.records

    asyncio.run(main())


def test_a_peer_that_comes_back_at_its_address_is_dialled_again_at_once():
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
    monkeypatch.setattr(shoal.p2p.outgoing, "QUEUE_BYTES", 16 << 20)

    async def main():
        async with sockets(None, None, None) as (sender, slow, quick):
            await asyncio.gather(
                slow.transport.dial(await sender.transport.listen(LOOPBACK)),
                sender.transport.dial(await quick.transport.listen(LOOPBACK)),
            )
            sender.transport.send([slow.transport.peer_id], b"hello")
            await slow.until_messages(1)
            deafen(slow)
            sent = 0
            while not sender.lost:
                sender.transport.send([slow.transport.peer_id, quick.transport.peer_id], b"%d" % sent, [bytes(1 << 20)])
                sent += 1
                assert sent < 80  # also what the kernel takes
                await quick.until_messages(sent)
            assert sender.lost == [(slow.transport.peer_id, "its queue is full")]
            assert not sender.transport.is_connected(slow.transport.peer_id)
            assert quick.headers == [b"%d" % number for number in range(sent)]
            # What the slow one did get is a beginning without a gap.
            hear(slow)
            await slow.until_lost(sender.transport.peer_id)
            got = slow.headers[1:]
            assert got == [b"%d" % number for number in range(len(got))]
            assert len(got) < sent

    asyncio.run(main())


def test_a_link_does_not_wait_for_what_lanes_owe_to_the_limits():
    async def main():
        one, other = (Recorder(SocketTransport(Identity(), upload_limit=1e5, download_limit=1e5)) for _ in range(2))
        try:
            await one.transport.dial(await other.transport.listen(LOOPBACK))
            for limit in (one.transport.shared.upload, other.transport.shared.download):
                assert limit.charge(10_000_000) > 99
            for number in range(3):
                one.transport.send([other.transport.peer_id], b"ping")
                await other.until_messages(number + 1, timeout=10)
        finally:
            await asyncio.gather(one.transport.close(), other.transport.close())

    asyncio.run(main())


def test_no_more_than_a_bound_waits_for_all_peers_and_who_takes_nothing_goes(monkeypatch):
    """The link with the longest queue ends; one whose peer still takes bytes does not."""
    monkeypatch.setattr("shoal.p2p.sockets.STUCK_SECONDS", 0.5)
    monkeypatch.setattr("shoal.p2p.sockets.LOOK_INTERVAL", 0.05)

    async def main():
        async with sockets(None, None, None, None) as (sender, *readers):
            address = await sender.transport.listen(LOOPBACK)
            for reader in readers:
                await reader.transport.dial(address)
            await eventually(lambda: len(sender.transport._peers) == 3)
            least, most, quick = (reader.transport.peer_id for reader in readers)
            for reader in readers[:2]:
                deafen(reader)
            for peer, number in ((least, 12), (most, 14)):
                for _ in range(number):
                    sender.transport.send([peer], b"", [bytes(1 << 20)])
            queued = [sender.transport._peers[peer].outgoing.queued() for peer in (least, most)]
            assert 0 < queued[0] < queued[1]
            await asyncio.sleep(1.0)
            assert not sender.lost
            monkeypatch.setattr("shoal.p2p.sockets.QUEUES_BYTES", sum(queued) - 1)
            sender.transport.send([quick], b"", [bytes(4 << 20)])
            assert await sender.until_lost(most) == "it took nothing while too much waited for all"
            await readers[2].until_messages(1)
            assert len(sender.lost) == 1

    asyncio.run(main())


@pytest.mark.long
def test_no_more_than_the_bound_in_bytes_waits_for_a_peer(monkeypatch):
    """More may pass, and a message costs something though it is empty."""
    monkeypatch.setattr(shoal.p2p.outgoing, "QUEUE_BYTES", 4 << 20)

    async def main():
        async with sockets(None, None) as (sender, reader):
            await reader.transport.dial(await sender.transport.listen(LOOPBACK))
            await eventually(lambda: sender.transport.is_connected(reader.transport.peer_id))
            for sent in range(1, 33):
                sender.transport.send([reader.transport.peer_id], b"", [bytes(1 << 20)])
                await reader.until_messages(sent)
            [link] = sender.transport._links
            assert len(link.outgoing._unsent) == 0
            deafen(reader)
            for _ in range(10_000_000):
                assert len(link.outgoing._unsent) <= 4 << 20
                sender.transport.send([reader.transport.peer_id], b"")
                if link.stage is Stage.ENDED:
                    break
            assert await sender.until_lost(reader.transport.peer_id) == "its queue is full"
            assert len(link.outgoing._unsent) == 0

    asyncio.run(main())


def test_large_messages_that_pass_are_movement():
    async def main():
        async with sockets(None, None) as (one, other):
            await one.transport.dial(await other.transport.listen(LOOPBACK))
            peers = (other.transport.peer_id, one.transport.peer_id)
            assert [one.transport.moved(peers[0]), other.transport.moved(peers[1])] == [0, 0]
            one.transport.send([peers[0]], b"", [bytes(1000)])
            one.transport.send([peers[0]], b"", [bytes(1 << 20)])
            await other.until_messages(2)
            await eventually(lambda: one.transport.moved(peers[0]) >= 1 << 20)
            assert 1 << 20 <= other.transport.moved(peers[1]) < 1.1 * (1 << 20)
            assert one.transport.moved(peers[0]) < 1.1 * (1 << 20)
            before = one.transport.moved(peers[0])
            for _ in range(100):
                one.transport.send([peers[0]], b"", [bytes(1000)])  # is under way, and no movement either way
                assert one.transport.moved(peers[0]) == before
            await other.until_messages(102)
            deafen(other)
            for _ in range(32):
                one.transport.send([peers[0]], b"", [bytes(1 << 20)])
            await asyncio.sleep(0.2)
            # What the other side's kernel has is on its way, and no more; here nothing has come whole.
            received = tcp.counts(next(iter(other.transport._links)).socket)[1]
            assert 1 << 20 <= one.transport.moved(peers[0]) <= received < 16 << 20
            before = other.transport.moved(peers[1])
            hear(other)
            while (moved := other.transport.moved(peers[1])) == before:  # noqa: ASYNC110 - each turn of the loop
                await asyncio.sleep(0)
            assert len(other.messages) == 102
            assert moved < before + (1 << 20), "a part of a message is under way"
            assert one.transport.moved(Identity().peer_id) == 0

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


def test_a_defect_in_what_drives_a_link_ends_it_and_is_told(monkeypatch, caplog):
    async def main():
        async with sockets(None, None) as (one, other):
            address = await other.transport.listen(LOOPBACK)
            monkeypatch.setattr("shoal.p2p.tls.peer_of", lambda _: 1 / 0)
            with pytest.raises(PeerUnreachable, match="this side has failed"):
                await asyncio.wait_for(one.transport.dial(address), 5)
            assert [record.name for record in caplog.records if record.exc_info] == ["shoal.p2p.link"]
            await eventually(lambda: not one.transport._links)

    asyncio.run(main())


def test_who_looks_at_all_objects_of_the_process_costs_no_connection(monkeypatch):
    """A memory profiler in another thread holds the views that are sent from for a moment longer."""
    held: list[memoryview] = []
    send = socket.socket.send

    def profiled(connection, data):
        held.extend(thing for thing in gc.get_objects() if isinstance(thing, memoryview))
        return send(connection, data)

    async def main():
        async with sockets(None, None) as (listener, dialler):
            await dialler.transport.dial(await listener.transport.listen(LOOPBACK))
            monkeypatch.setattr(socket.socket, "send", profiled)
            dialler.transport.send([listener.transport.peer_id], b"hello")
            dialler.transport.send([listener.transport.peer_id], b"hello again")
            await listener.until_messages(2)
            assert listener.lost == dialler.lost == []

    asyncio.run(main())


@pytest.mark.long
def test_32_transports_that_all_dial_each_other_need_no_thread():
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
            assert len(os.listdir("/proc/self/task")) == before

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


def test_loops_in_different_threads_share_nothing():
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


def test_who_asks_from_one_port_at_two_peers_is_seen_at_that_port_by_both():
    async def main() -> None:
        async with sockets(None, None) as (one, other), sockets(None) as (third,):
            first = await one.transport.observe(await other.transport.listen(LOOPBACK))
            second = await one.transport.observe(await third.transport.listen(LOOPBACK), first.source_port)
            assert first == second
            assert first.port == first.source_port

    asyncio.run(main())
