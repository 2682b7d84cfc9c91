"""Nodes: typed messages, requests that always end, refusals that say why; a stranger's bytes can do nothing."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal.p2p.node
import shoal.p2p.race
from shoal.p2p.errors import MessageTooLarge, Outrun, P2PError, PeerLost, PeerUnreachable, Refused, Unavailable
from shoal.p2p.identity import Identity, PeerID
from shoal.p2p.memory_transport import MemoryNetwork, MemoryTransport
from shoal.p2p.node import Envelope, Node, Reply, Service
from shoal.p2p.sockets import SocketTransport
from shoal.p2p.transport import MAX_BUFFER_BYTES
from tests.p2p.recorder import LOOPBACK, eventually


class Ask(msgspec.Struct, tag="ask", array_like=True, frozen=True):
    number: int


class Told(msgspec.Struct, tag="told", array_like=True, frozen=True):
    number: int


ECHO = Service("echo", Ask | Told)


@asynccontextmanager
async def nodes(number: int, kind: str = "memory") -> AsyncIterator[list[Node]]:
    """So many nodes that know each other's addresses."""
    network = MemoryNetwork()
    made = []
    for _ in range(number):
        identity = Identity()
        over = SocketTransport(identity) if kind == "sockets" else MemoryTransport(network, identity.peer_id)
        made.append(Node(identity, over))
    for node in made:
        await node.listen(LOOPBACK)
    for node in made:
        for other in made:
            node.learn(other.peer_id, other.addresses)
    try:
        yield made
    finally:
        await asyncio.gather(*(node.close() for node in made))


@pytest.fixture(params=["memory", "sockets"])
def kind(request):
    return request.param


def test_a_request_is_answered_with_message_and_buffers(kind):
    async def answer(peer, ask, buffers):
        await asyncio.sleep(0)
        return Reply(Told(ask.number + 1), [bytes(buffer)[::-1] for buffer in buffers])

    async def main():
        async with nodes(2, kind) as (one, other):
            other.serve(ECHO, answer)
            reply = await one.call_for_buffers(
                other.peer_id, ECHO, Ask(1), timeout=5, buffers=[b"abc", memoryview(b"xyz")]
            )
            assert reply.body == Told(2)
            assert [bytes(buffer) for buffer in reply.buffers] == [b"cba", b"zyx"]
            assert await one.call(other.peer_id, ECHO, Ask(5), Told, timeout=60) == Told(6)
            assert (one.bytes_sent, one.bytes_received, other.bytes_received) == (6, 6, 6)

    asyncio.run(main())


@pytest.mark.parametrize("error", [TimeoutError(), PeerLost("it went"), ValueError("ours")])
def test_of_its_tasks_only_errors_of_ours_are_logged(error, caplog):
    async def failing():
        raise error

    async def main():
        async with nodes(1) as (node,):
            await asyncio.wait([node.spawn(failing())])

    asyncio.run(main())
    logged = [record for record in caplog.records if "a task of" in record.getMessage()]
    assert len(logged) == isinstance(error, ValueError)


def test_a_node_talks_to_itself_through_the_same_door():
    async def main():
        async with nodes(1) as (node,):
            order = []

            def handle(peer, ask, buffers):
                order.append("handled")
                return Told(ask.number)

            node.serve(ECHO, handle)
            node.notify([node.peer_id], ECHO, Ask(1))
            order.append("sent")
            assert await node.call(node.peer_id, ECHO, Ask(3), Told, timeout=1) == Told(3)
            assert order == ["sent", "handled", "handled"]

    asyncio.run(main())


def test_messages_of_a_peer_are_handled_in_order(kind):
    async def main():
        async with nodes(3, kind) as (one, two, three):
            seen: dict[PeerID, list[int]] = {one.peer_id: [], two.peer_id: []}
            three.serve(ECHO, lambda peer, ask, buffers: seen[peer].append(ask.number))
            for node in (one, two):
                await node.connect(three.peer_id)
            for number in range(300):
                for node in (one, two):
                    node.notify([three.peer_id], ECHO, Ask(number))
            await eventually(lambda: all(len(numbers) == 300 for numbers in seen.values()))
            assert list(seen.values()) == [list(range(300))] * 2

    asyncio.run(main())


def decline(peer, ask, buffers):
    raise Refused("I would rather not")


async def decline_later(peer, ask, buffers):
    raise Refused("I would rather not")


def fail(peer, ask, buffers):
    raise KeyError("a defect")


async def fail_later(peer, ask, buffers):
    raise KeyError("a defect")


def time_out(peer, ask, buffers):
    raise TimeoutError


async def lose_another(peer, ask, buffers):
    raise PeerLost("another peer was lost")


async def dawdle(peer, ask, buffers):
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        (decline, "I would rather not"),
        (decline_later, "I would rather not"),
        (fail, "internal error"),
        (fail_later, "internal error"),
        (time_out, "could not be handled: deadline passed"),
        (lose_another, "could not be handled: another peer was lost"),
        (lambda *_: None, "this is a notice, not a request"),
        (lambda *_: Reply(Told(0), [bytes(MAX_BUFFER_BYTES + 1)]), "internal error"),
        (lambda *_: Told(cast(int, "no number")), "not an"),
        (None, "unknown service 'echo'"),
    ],
)
def test_a_refusal_says_why_and_the_connection_goes_on(kind, handler, reason):
    async def main():
        async with nodes(2, kind) as (one, other):
            if handler is not None:
                other.serve(ECHO, handler)
            fine = Service("fine", Ask | Told)
            other.serve(fine, lambda peer, ask, buffers: Told(ask.number))
            if reason == "not an":
                with pytest.raises(P2PError, match="invalid reply"):
                    await one.call(other.peer_id, ECHO, Ask(1), Told, timeout=60)
            else:
                with pytest.raises(Refused, match=reason):
                    await one.call(other.peer_id, ECHO, Ask(1), Told, timeout=60)
            assert await one.call(other.peer_id, fine, Ask(7), Told, timeout=60) == Told(7)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "level"), [(Refused, "WARNING"), (Outrun, "INFO"), (Unavailable, "DEBUG")], ids=lambda each: str(each)
)
def test_a_refusal_that_nobody_waits_for_is_told_by_its_kind(kind, error, level, caplog):
    """One that follows from a race, as both sides work, is no warning."""

    def refuse(peer, ask, buffers):
        raise error("not now")

    async def main():
        async with nodes(2, kind) as (one, other):
            other.serve(ECHO, refuse)
            await one.connect(other.peer_id)
            one.notify([other.peer_id], ECHO, Ask(1))

            def told():
                return [each for each in caplog.records if "refused a message to" in each.getMessage()]

            await eventually(told)
            assert [each.levelname for each in told()] == [level]

    with caplog.at_level(logging.DEBUG, "shoal"):
        asyncio.run(main())


def test_a_message_of_an_unknown_type_is_refused_before_any_handler_sees_it(kind):
    class Other(msgspec.Struct, tag="other", array_like=True):
        text: str

    async def main():
        async with nodes(2, kind) as (one, other):
            seen = []
            other.serve(ECHO, lambda *arguments: seen.append(arguments))
            for message in (Other("?"), Ask(cast(int, "not a number"))):
                with pytest.raises(Refused, match="not a message of 'echo'"):
                    await one.call(other.peer_id, ECHO, message, Told, timeout=60)
            one.notify([other.peer_id], ECHO, Other("?"))
            with pytest.raises(Refused):
                await one.call(other.peer_id, ECHO, Other("?"), Told, timeout=60)
            assert seen == []

    asyncio.run(main())


def test_a_reply_of_another_type_than_expected_is_an_error():
    async def main():
        async with nodes(2) as (one, other):
            other.serve(ECHO, lambda peer, ask, buffers: ask)
            with pytest.raises(P2PError, match="answered Ask with Ask, not Told"):
                await one.call(other.peer_id, ECHO, Ask(1), Told, timeout=60)

    asyncio.run(main())


def test_a_request_ends_at_its_deadline_on_both_sides(kind):
    async def main():
        cancelled = asyncio.Event()

        async def handler(peer, ask, buffers):
            try:
                await asyncio.sleep(3600)
            finally:
                cancelled.set()

        async with nodes(2, kind) as (one, other):
            other.serve(ECHO, handler)
            with pytest.raises(TimeoutError):
                await one.call(other.peer_id, ECHO, Ask(1), Told, timeout=0.5)  # on a busy machine it has come by then
            await asyncio.wait_for(cancelled.wait(), 60)
            assert one._calls == {}

    asyncio.run(main())


def test_a_request_ends_when_its_peer_is_lost(kind):
    async def main():
        async with nodes(2, kind) as (one, other):
            lost, stopped = [], []

            def fail_to_handle(peer, reason):
                raise KeyError("a defect")

            one.on_lost(fail_to_handle)
            one.on_lost(lambda peer, reason: lost.append(peer))
            stop = one.on_lost(lambda peer, reason: stopped.append(peer))
            stop()
            stop()
            other.serve(ECHO, dawdle)
            call = asyncio.create_task(one.call(other.peer_id, ECHO, Ask(1), Told, timeout=60))
            await eventually(lambda: other._handling)
            await other.close()
            with pytest.raises(PeerLost):
                await asyncio.wait_for(call, 60)
            assert (lost, stopped) == ([other.peer_id], [])

    asyncio.run(main())


def test_closing_a_node_ends_what_it_waits_for(kind):
    async def main():
        async with nodes(2, kind) as (one, other):
            other.serve(ECHO, dawdle)
            call = asyncio.create_task(one.call(other.peer_id, ECHO, Ask(1), Told, timeout=60))
            await eventually(lambda: other._handling)
            await one.close()
            with pytest.raises(PeerUnreachable, match="closed"):
                await asyncio.wait_for(call, 60)
            with pytest.raises(PeerUnreachable, match="closed"):
                await one.call(one.peer_id, ECHO, Ask(1), Told, timeout=60)
            one.notify([other.peer_id], ECHO, Ask(1))
            await one.close()

    asyncio.run(main())


def test_a_request_that_comes_as_the_node_closes_leaves_nothing_behind(kind):
    """Its handling is cancelled before it has begun; a coroutine that nobody awaits would complain."""

    async def main():
        async with nodes(2, kind) as (one, other):
            begun = asyncio.Event()

            async def late():
                begun.set()

            def handler(peer, message, buffers):
                closing.append(asyncio.ensure_future(other.close()))
                return late()

            closing: list[asyncio.Future[None]] = []
            other.serve(ECHO, handler)
            with pytest.raises((PeerLost, PeerUnreachable, TimeoutError)):
                await one.call(other.peer_id, ECHO, Ask(1), Told, timeout=60)
            await closing[0]
            assert not begun.is_set()

    asyncio.run(main())


def test_closing_a_node_ends_a_dial():
    async def main():
        silent = socket.create_server(("127.0.0.1", 0))  # connects, and never greets
        node, stranger = Node(identity := Identity(), SocketTransport(identity)), Identity().peer_id
        node.learn(stranger, [LOOPBACK.with_port(silent.getsockname()[1])])
        waiting = [asyncio.create_task(node.connect(stranger)) for _ in range(2)]
        await asyncio.sleep(0.05)
        await node.close()
        for task in waiting:
            with pytest.raises(PeerUnreachable, match="closed"):
                await asyncio.wait_for(task, 60)
        silent.close()

    asyncio.run(main())


def test_a_peer_is_dialled_at_all_its_addresses(kind):
    async def main():
        async with nodes(2, kind) as (one, other):
            one.learn(other.peer_id, [LOOPBACK.with_port(9), LOOPBACK.with_port(11), *other.addresses])
            await one.connect(other.peer_id)
            assert one.is_connected(other.peer_id)
            with pytest.raises(PeerUnreachable, match="no address of it is known"):
                await one.connect(Identity().peer_id)
            stranger = Identity().peer_id
            one.learn(stranger, [LOOPBACK.with_port(9)])
            with pytest.raises(PeerUnreachable):
                await one.connect(stranger)

    asyncio.run(main())


def test_an_address_that_does_not_answer_does_not_hold_up_the_next(monkeypatch):
    monkeypatch.setattr(shoal.p2p.node, "DIAL_TIMEOUT", 120.0)

    async def main():
        async with nodes(2, "sockets") as (one, other):
            with socket.create_server(("127.0.0.1", 0)) as silent:
                black_hole = LOOPBACK.with_port(silent.getsockname()[1])
                one.learn(other.peer_id, [black_hole, *other.addresses])
                await one.connect(other.peer_id, timeout=50.0)  # the silent one would be waited for longer
            assert one.is_connected(other.peer_id)

    asyncio.run(main())


def test_a_peer_dialled_at_several_addresses_is_connected_once(monkeypatch):
    monkeypatch.setattr(shoal.p2p.race, "HEAD_START", 0.0)

    async def main():
        lost: list[str] = []
        for _ in range(10):
            async with nodes(2, "sockets") as (one, other):
                for node in (one, other):
                    node.on_lost(lambda peer, reason: lost.append(reason))
                for _ in range(3):
                    await other.listen(LOOPBACK)
                one.learn(other.peer_id, other.addresses)
                other.serve(ECHO, lambda peer, ask, buffers: Told(ask.number))
                for number in range(20):
                    assert await one.call(other.peer_id, ECHO, Ask(number), Told, timeout=60) == Told(number)
                    await asyncio.sleep(0.001)
                assert lost == []
                one.transport.disconnect(other.peer_id)
                await eventually(lambda: lost)
                lost.clear()

    asyncio.run(main())


def test_one_that_gives_up_does_not_end_the_dial_for_others():
    async def main():
        network = MemoryNetwork(delay=lambda *_: 0.05)
        one, other = (
            Node(identity, MemoryTransport(network, identity.peer_id)) for identity in (Identity(), Identity())
        )
        one.learn(other.peer_id, [await other.listen(LOOPBACK)])
        patient = asyncio.create_task(one.connect(other.peer_id))
        with pytest.raises(PeerUnreachable, match="did not answer within"):
            await one.connect(other.peer_id, timeout=0.01)
        await patient
        assert one.is_connected(other.peer_id)
        await one.close()
        await other.close()

    asyncio.run(main())


def test_the_book_of_addresses_is_bounded_and_keeps_to_its_peers(monkeypatch):
    monkeypatch.setattr(shoal.p2p.node, "MAX_KNOWN_PEERS", 3)

    async def main():
        async with nodes(1) as (node,):
            peers = [Identity().peer_id for _ in range(5)]
            for peer in peers:
                node.learn(peer, [LOOPBACK.with_port(1), LOOPBACK.with_port(2).with_peer(peers[0])])
            assert node.known_addresses(peers[4]) == [LOOPBACK.with_port(1).with_peer(peers[4])]
            assert [bool(node.known_addresses(peer)) for peer in peers] == [False, False, True, True, True]
            node.learn(peers[4], [LOOPBACK.with_port(port) for port in range(1, 100)])
            assert len(node.known_addresses(peers[4])) == shoal.p2p.node.MAX_ADDRESSES_PER_PEER
            node.learn(node.peer_id, [LOOPBACK])
            assert node.known_addresses(node.peer_id) == node.addresses

    asyncio.run(main())


def test_requests_of_one_peer_are_bounded(monkeypatch):
    monkeypatch.setattr(shoal.p2p.node, "MAX_CALLS_PER_PEER", 3)

    async def main():
        async with nodes(3) as (one, two, three):
            release = asyncio.Event()

            async def answer(peer, ask, buffers):
                await release.wait()
                return Told(ask.number)

            three.serve(ECHO, answer)
            calls = [asyncio.create_task(one.call(three.peer_id, ECHO, Ask(n), Told, timeout=60)) for n in range(5)]
            other = asyncio.create_task(two.call(three.peer_id, ECHO, Ask(9), Told, timeout=60))
            await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            await asyncio.sleep(0.01)
            release.set()
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            assert outcomes[:3] == [Told(0), Told(1), Told(2)]
            assert all("more than 3 requests" in str(outcome) for outcome in outcomes[3:])
            assert await other == Told(9)
            assert three._handling == {}

    asyncio.run(main())


def test_a_service_is_served_once():
    async def main():
        async with nodes(2) as (one, other):
            one.serve(ECHO, decline)
            with pytest.raises(ValueError, match="already served"):
                one.serve(Service("echo", Ask), decline)
            one.stop_serving(ECHO)
            one.stop_serving(ECHO)
            with pytest.raises(Refused, match="unknown service"):
                await other.call(one.peer_id, ECHO, Ask(1), Told, timeout=60)
            one.serve(ECHO, decline)

    asyncio.run(main())
    with pytest.raises(ValueError, match="longer than 128"):
        Service("x" * 129, Ask)


def test_one_whose_name_was_taken_does_not_stop_the_other_on_its_way_out():
    async def main():
        async with nodes(1) as (node,):
            node.serve(ECHO, lambda peer, ask, buffers: Told(ask.number))
            node.stop_serving(Service("echo", Ask | Told))
            assert await node.call(node.peer_id, ECHO, Ask(1), Told, timeout=1) == Told(1)

    asyncio.run(main())


def test_a_message_over_the_bounds_is_an_error_of_the_sender(kind):
    async def main():
        async with nodes(2, kind) as (one, other):
            await one.connect(other.peer_id)
            with pytest.raises(MessageTooLarge):
                one.notify([other.peer_id], ECHO, Ask(1), [bytes(MAX_BUFFER_BYTES + 1)])
            with pytest.raises(MessageTooLarge):
                await one.call_for_buffers(other.peer_id, ECHO, Ask(1), timeout=60, buffers=[b""] * 5)
            assert one._calls == {}

    asyncio.run(main())


ENVELOPES = st.tuples(
    st.integers(-1, 4),
    st.sampled_from(["echo", "", "other"]),
    st.integers(-1, 3),
    st.floats(-1, 10),
    st.recursive(
        st.none() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5) | st.sampled_from(["ask", "told"]),
        st.lists,
        max_leaves=5,
    ),
).map(msgspec.msgpack.encode)
NESTED = st.sampled_from(
    [b"\x91" * 3_000, b"\x95\x01\xa4echo\x01\x01" + b"\x91" * 3_000, b"\x95\x02\xa0\x01\x01" + b"\x91" * 3_000]
)


@settings(max_examples=100)
@given(st.lists(st.binary(max_size=60) | ENVELOPES | NESTED, max_size=5), st.lists(st.binary(max_size=9), max_size=4))
def test_any_bytes_of_a_peer_are_survived(headers, buffers):
    async def main():
        async with nodes(3) as (one, other, third):
            one.serve(ECHO, lambda peer, ask, buffers: Told(ask.number))
            other.serve(ECHO, dawdle)
            call = asyncio.create_task(one.call(other.peer_id, ECHO, Ask(1), Told, timeout=60))
            await eventually(lambda: one._calls)
            errors: list[object] = []
            asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
            for header in headers:
                one._on_message(other.peer_id, memoryview(header), [memoryview(buffer) for buffer in buffers])
            assert await third.call(one.peer_id, ECHO, Ask(4), Told, timeout=60) == Told(4)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            assert errors == []

    logging.getLogger("shoal").setLevel(logging.ERROR)
    try:
        asyncio.run(main())
    finally:
        logging.getLogger("shoal").setLevel(logging.NOTSET)


def test_a_reply_counts_only_from_the_peer_that_was_asked():
    async def main():
        async with nodes(3) as (one, other, thief):
            other.serve(ECHO, dawdle)
            call = asyncio.create_task(one.call(other.peer_id, ECHO, Ask(1), Told, timeout=0.2))
            await eventually(lambda: other._handling)
            ((_, number),) = one._calls
            await thief.connect(one.peer_id)
            for kind in (2, 3):
                body = msgspec.Raw(msgspec.msgpack.encode(Told(666) if kind == 2 else ["stolen"]))
                header = msgspec.msgpack.encode(Envelope(kind, "echo", number, 0.0, body))
                thief.transport.send([one.peer_id], header)
            with pytest.raises(TimeoutError):
                await call

    asyncio.run(main())
