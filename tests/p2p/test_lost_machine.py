"""A machine that vanishes says nothing: the kernel asks after it, whether there is something to send or not."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time

import pytest

from shoal.p2p.tcp import LEAST_PATIENCE
from shoal.p2p.transport import LARGE_BYTES, Movement
from tests.namespaces import ADDRESSES, cut, inside, wired

pytestmark = pytest.mark.timed

END = textwrap.dedent(
    """
    import asyncio, sys
    from shoal.p2p.identity import Identity
    from shoal.p2p.multiaddr import Multiaddr
    from shoal.p2p.sockets import SocketTransport

    async def main(talks, address):
        transport, lost = SocketTransport(Identity()), asyncio.Event()
        transport.start(lambda peer, header, buffers: None, lambda peer, reason: lost.set())
        if "/p2p/" not in address:
            print(await transport.listen(Multiaddr(address)), flush=True)
            await asyncio.sleep(60)
        peer = Multiaddr(address).peer_id
        await transport.dial(Multiaddr(address))
        print("connected", flush=True)
        while not lost.is_set():
            if talks == "talks":
                transport.send([peer], b"", [bytes(10_000)])
            await asyncio.sleep(0.1)
        print("lost", flush=True)

    asyncio.run(main(*sys.argv[1:]))
    """
)


@pytest.mark.long
@pytest.mark.parametrize("talks", ["talks", "is silent"])
def test_a_machine_that_is_gone_is_lost(talks: str) -> None:
    with wired():
        listener = subprocess.Popen(
            inside(0, sys.executable, "-c", END, talks, f"/ip4/{ADDRESSES[0]}/tcp/0"), stdout=subprocess.PIPE, text=True
        )
        assert listener.stdout is not None
        with listener, listener.stdout:
            try:
                command = inside(1, sys.executable, "-c", END, talks, listener.stdout.readline().strip())
                dialler = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
                assert dialler.stdout is not None
                with dialler, dialler.stdout:
                    assert dialler.stdout.readline() == "connected\n"
                    cut()
                    began = time.monotonic()
                    assert dialler.stdout.readline() == "lost\n"
                    assert LEAST_PATIENCE / 2 < time.monotonic() - began < 4 * LEAST_PATIENCE
                    dialler.wait(60)
            finally:
                listener.kill()


def test_only_large_messages_are_movement() -> None:
    movement = Movement(1000)
    assert not movement.goes_on(1000)
    assert not movement.goes_on(999 + LARGE_BYTES)
    assert movement.goes_on(1000 + LARGE_BYTES)
    assert not movement.goes_on(1000 + LARGE_BYTES)
    assert movement.goes_on(LARGE_BYTES), "another connection, which counts from its own beginning"
    assert not movement.goes_on(0)
