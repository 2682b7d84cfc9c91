"""Two processes with one identity: both are told, and so is who meets both; and nobody's connection is taken away."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import textwrap

import pytest

from shoal.p2p.errors import HandshakeFailed, PeerUnreachable
from shoal.p2p.identity import Identity
from shoal.p2p.multiaddr import Multiaddr
from tests.p2p.recorder import LOOPBACK, deafen, eventually, sockets

pytestmark = pytest.mark.processes

SEED = bytes(range(32))
NAME = str(Identity(SEED).peer_id)
OWN = f"another process uses the identity of this one, peer {NAME}"
OTHERS = f"two processes use the identity of peer {NAME}"
WAY_OUT = "delete its copy of the identity file or give it another identity_path"


@pytest.fixture(autouse=True)
def who_lives_has_time_to_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.p2p.sockets.ALIVE_TIMEOUT", 100.0)  # and the tests do not wait for its end


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_process_that_dials_the_other_one_is_told_and_tells(caplog):
    async def main():
        async with sockets(SEED, SEED) as (listener, twin):
            address = await listener.transport.listen(LOOPBACK)
            for _ in range(2):
                with pytest.raises(HandshakeFailed, match="another process with the same identity"):
                    await twin.transport.dial(address)
        said = warnings(caplog)
        assert len(said) == 2, "one of each, however often they meet"
        assert all(text.startswith(OWN) and WAY_OUT in text for text in said)

    asyncio.run(main())


def test_a_peer_that_dials_itself_is_no_twin(caplog):
    async def main():
        async with sockets(SEED) as (one,):
            address = await one.transport.listen(LOOPBACK)
            with pytest.raises(PeerUnreachable, match="is this peer itself"):
                await one.transport.dial(address)
        assert not warnings(caplog)

    asyncio.run(main())


def test_whoever_meets_both_stays_with_the_first_and_all_three_are_told(caplog):
    async def main():
        async with sockets(None, SEED, SEED) as (listener, first, second):
            address = await listener.transport.listen(LOOPBACK)
            await first.transport.dial(address)
            for _ in range(3):
                with pytest.raises(HandshakeFailed, match="another process with the same identity"):
                    await second.transport.dial(address)
            first.transport.send([address.peer_id], b"still here")
            await listener.until_messages(1)
            assert listener.lost == first.lost == second.lost == []
            assert [len(end.messages) for end in (listener, first, second)] == [1, 0, 0]
        said = warnings(caplog)
        assert sorted(text[: len(OTHERS)] for text in said) == sorted([OWN[: len(OTHERS)]] * 2 + [OTHERS])
        assert all(WAY_OUT in text for text in said)

    asyncio.run(main())


def test_the_second_is_dialled_while_the_first_comes(caplog, monkeypatch):
    """Then it is the dialler who finds that another start of the peer is connected already."""

    async def main():
        async with sockets(None, SEED, SEED) as (dialler, first, second):
            address = await dialler.transport.listen(LOOPBACK)
            of_second = await second.transport.listen(LOOPBACK)
            transport, kept = dialler.transport, []
            on_kept = transport._on_kept
            transport._on_kept = lambda *arguments: kept.append(arguments)
            dial = asyncio.create_task(transport.dial(of_second))
            await eventually(lambda: kept)
            transport._on_kept = on_kept
            await first.transport.dial(address)
            on_kept(*kept[0])
            with pytest.raises(HandshakeFailed, match="another process with the same identity"):
                await dial
            await second.until_lost(address.peer_id)
            first.transport.send([address.peer_id], b"still here")
            await dialler.until_messages(1)
            assert dialler.lost == first.lost == []
        assert sorted(text[: len(OTHERS)] for text in warnings(caplog)) == sorted([OWN[: len(OTHERS)], OTHERS])

    asyncio.run(main())


def test_one_that_connects_once_more_shows_that_it_lives(caplog, monkeypatch):
    """Its first connection is gone without a word when the other says hello."""

    async def main():
        async with sockets(None, SEED, SEED) as (listener, first, second):
            address = await listener.transport.listen(LOOPBACK)
            await first.transport.dial(address)
            deafen(first)
            dial = asyncio.create_task(second.transport.dial(address))
            await eventually(lambda: listener.transport._rivals)
            first.transport._peers.clear()
            [gone] = first.transport._links
            await first.transport.dial(await listener.transport.listen(Multiaddr("/ip4/127.0.0.2/tcp/0")))
            with pytest.raises(HandshakeFailed, match="another process with the same identity"):
                await dial
            first.transport.send([address.peer_id], b"still here")
            await listener.until_messages(1)
            gone.end("the test is over")

    asyncio.run(main())


CHILD = textwrap.dedent(
    """
    import asyncio, sys
    from shoal.p2p.identity import Identity
    from shoal.p2p.multiaddr import Multiaddr
    from shoal.p2p.sockets import SocketTransport

    async def main(address):
        transport = SocketTransport(Identity(bytes(range(32))))
        transport.start(lambda peer, header, buffers: None, lambda peer, reason: None)
        await transport.dial(Multiaddr(address))
        transport.send([Multiaddr(address).peer_id], b"hello")
        await asyncio.sleep(60)

    asyncio.run(main(*sys.argv[1:]))
    """
)


def test_a_process_that_is_started_again_with_its_identity_is_no_twin(caplog):
    """Its predecessor was killed this very moment: the end of that connection and the new one come together."""

    async def main():
        async with sockets(None, SEED) as (listener, again):
            address = await listener.transport.listen(LOOPBACK)
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", CHILD, str(address))
            try:
                await listener.until_messages(1)
                os.kill(process.pid, signal.SIGKILL)
                await asyncio.wait_for(again.transport.dial(address), 60)
                again.transport.send([address.peer_id], b"back")
                await listener.until_messages(2)
                assert [peer for peer, _ in listener.lost] == [again.transport.peer_id]
            finally:
                # Not `process.kill()`, which may reap it before asyncio does, and then asyncio warns.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
                await process.wait()
        assert not warnings(caplog)

    asyncio.run(main())


def test_nothing_is_left_of_a_question_that_nobody_waits_for():
    async def main():
        async with sockets(None, SEED, SEED) as (listener, first, second):
            address = await listener.transport.listen(LOOPBACK)
            await first.transport.dial(address)
            deafen(first)
            dial = asyncio.create_task(second.transport.dial(address))
            await eventually(lambda: listener.transport._rivals)
            dial.cancel()
            await eventually(lambda: not listener.transport._rivals)
            assert listener.transport.is_connected(first.transport.peer_id)
            assert listener.lost == []

    asyncio.run(main())
