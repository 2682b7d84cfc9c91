"""Real processes that die or stop: a lost peer is an event, and what it had sent comes first."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.tcp import LEAST_PATIENCE, counts
from tests.p2p.recorder import LOOPBACK, Recorder, eventually, sockets
from tests.soaked import only_in_soak

pytestmark = pytest.mark.timed

MESSAGES, SIZE = 100, 20_000
CHILD = textwrap.dedent(
    f"""
    import asyncio, os, sys
    from shoal.p2p.identity import Identity
    from shoal.p2p.multiaddr import Multiaddr
    from shoal.p2p.sockets import SocketTransport

    async def main(forks, address=None):
        transport = SocketTransport(Identity())
        asked = asyncio.get_running_loop().create_future()
        transport.start(lambda peer, header, buffers: asked.done() or asked.set_result(peer), lambda peer, reason: None)
        if address is None:
            print(await transport.listen(Multiaddr("/ip4/127.0.0.1/tcp/0")), flush=True)
            peer = await asked
        else:
            peer = Multiaddr(address).peer_id
            await transport.dial(Multiaddr(address))
        if forks == "forks" and os.fork() == 0:
            os.read(0, 1)  # until the test is over
            os._exit(0)
        for number in range({MESSAGES}):
            transport.send([peer], b"%d" % number, [bytes({SIZE})])
        await asyncio.sleep(60)

    asyncio.run(main(*sys.argv[1:]))
    """
)
ALL = [b"%d" % number for number in range(MESSAGES)]


@contextmanager
def child(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture(params=["it dialled", pytest.param("it listens", marks=only_in_soak)])
def meet(request):
    """Runs a scenario with an end of this process and a child, which sends all its messages once connected."""

    def run(scenario, forks: str = "alone"):
        async def main():
            async with sockets(None) as (end,):
                if request.param == "it dialled":
                    address = await end.transport.listen(LOOPBACK)
                    with child(forks, str(address)) as process:
                        await scenario(end, process)
                else:
                    with child(forks) as process:
                        assert process.stdout is not None
                        line = await asyncio.to_thread(process.stdout.readline)
                        address = Multiaddr(line.strip())
                        await end.transport.dial(address)
                        end.transport.send([address.peer_id], b"begin")
                        await scenario(end, process)

        asyncio.run(main())

    return run


@pytest.mark.parametrize("forks", ["alone", "forks"])
def test_a_killed_process_is_lost_at_once_and_after_its_messages(meet, forks):
    """Also if it has a child, such as a DataLoader's worker, that was forked while it was connected and lives on."""

    async def scenario(end: Recorder, process):
        await end.until_messages(MESSAGES)
        os.kill(process.pid, signal.SIGKILL)
        killed = time.monotonic()
        await end.until_lost(end.messages[0][0])
        assert time.monotonic() - killed < LEAST_PATIENCE / 2, "it was told by silence"
        assert end.headers == ALL
        assert not end.transport.is_connected(end.messages[0][0])

    meet(scenario, forks=forks)


def test_the_port_of_a_killed_process_is_free_although_its_child_lives():
    async def main():
        async with sockets(None, None) as (dialler, successor):
            with child("forks") as process:
                assert process.stdout is not None
                address = Multiaddr((await asyncio.to_thread(process.stdout.readline)).strip())
                await dialler.transport.dial(address)
                dialler.transport.send([address.peer_id], b"begin")
                await dialler.until_messages(MESSAGES)
                process.kill()
                process.wait()
                await dialler.until_lost(address.peer_id)
                await successor.transport.listen(LOOPBACK.with_port(address.port))

    asyncio.run(main())


def test_what_a_dead_process_had_sent_is_handled_before_its_loss(meet):
    """The loop is kept busy until the other process is long gone, so messages and loss wait side by side."""

    async def scenario(end: Recorder, process):
        await end.until_messages(1)
        [link] = end.transport._peers.values()
        # To keep the loop busy is the point: until the kernel's buffers are full.
        received = -1
        while received < counts(link.socket)[1]:
            received = counts(link.socket)[1]
            time.sleep(0.3)  # noqa: ASYNC251
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        time.sleep(0.2)  # noqa: ASYNC251
        arrived = received // (SIZE + 500) - 1  # with what TLS adds
        assert 0 < len(end.messages) < arrived
        await end.until_lost(end.messages[0][0])
        assert len(end.messages) >= arrived
        assert end.headers == ALL[: len(end.headers)]
        assert end.order == ["message"] * len(end.headers) + ["lost"]

    meet(scenario)


def test_a_process_killed_while_it_sends_leaves_no_gap(meet):
    async def scenario(end: Recorder, process):
        await end.until_messages(3)
        os.kill(process.pid, signal.SIGKILL)
        await end.until_lost(end.messages[0][0])
        assert end.headers == ALL[: len(end.headers)]
        assert end.order == ["message"] * len(end.headers) + ["lost"]

    meet(scenario)


@pytest.mark.long
def test_an_idle_connection_and_processes_that_hang_are_not_lost(meet):
    """The kernel answers for a process that hangs or is stopped: whether it is waited for, others decide."""

    async def scenario(end: Recorder, process):
        await end.until_messages(MESSAGES)
        os.kill(process.pid, signal.SIGSTOP)
        await asyncio.sleep(1.5 * LEAST_PATIENCE)
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.5)  # noqa: ASYNC251 - this side's Python, too
        await asyncio.sleep(0.1)
        assert end.lost == []

    meet(scenario)


@pytest.mark.long
def test_a_process_that_hangs_and_to_which_much_is_sent_is_not_lost(meet):
    """Its kernel has no room any more and says so, again and again. TCP_USER_TIMEOUT would end that connection."""

    async def scenario(end: Recorder, process):
        await end.until_messages(MESSAGES)
        peer = end.messages[0][0]
        os.kill(process.pid, signal.SIGSTOP)
        for _ in range(32):
            end.transport.send([peer], b"", [bytes(1 << 20)])
        await asyncio.sleep(3.5 * LEAST_PATIENCE)  # the kernel asks after 6, 13 and 26 s
        assert end.lost == []
        moved = end.transport.moved(peer)
        os.kill(process.pid, signal.SIGCONT)
        await eventually(lambda: end.transport.moved(peer) >= moved + (16 << 20))

    meet(scenario)
