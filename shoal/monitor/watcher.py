"""Watches a run: reads health records from the DHT, keeps connections to their peers, and makes snapshots."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from types import TracebackType
from typing import TypeVar

from shoal.dht.dht import DHT
from shoal.dht.records import get_dht_time
from shoal.health.board import HealthBoard
from shoal.health.record import Health
from shoal.membership.holder import Source
from shoal.membership.membership import Part
from shoal.monitor.picture import Picture
from shoal.monitor.snapshot import Snapshot
from shoal.p2p.errors import P2PError
from shoal.p2p.identity import PeerID
from shoal.p2p.redial import Redial
from shoal.swarm.directory import DHTDirectory
from shoal.swarm.gates import admit_to, gate_of

log = logging.getLogger(__name__)

SHORTEST, LONGEST = 2.0, 10.0  # seconds between two readings of the records
# Between these bounds, the time grows with the number of peers, so that a node that keeps the records sends at most 2
# kB per second.
SECONDS_A_PEER = 0.35
LIST_SECONDS = 10.0  # between two readings of the members and their addresses
AGAIN_SECONDS = 3.0  # a peer whose connection has ended must answer within this time
DIAL_SECONDS = 5.0
_LOST = "its connection was lost: "  # how a transport's reasons begin
MAX_CONNECTIONS = 256  # to peers of the run; the loss of others is noticed only when their records are late

T = TypeVar("T")


class Watcher:
    """A peer that trains nothing, and knows the state of all others.

    >>> with shoal.DHT(initial_peers=[...], client_mode=True, start=True) as dht, Watcher(dht, "my run") as watcher:
    ...     print(watcher.snapshot().sentence)

    It reads the records of all peers every 2 to 10 s (less often if there are many peers). It also keeps an idle
    connection to each peer that can be dialled: when that ends and can't be made again, the peer counts as lost.

    Args:
        dht: a `DHT` that runs; it may be a client. It keeps running when the watcher is closed.
        run_id: the name of the run.
        membership: for a closed run: the membership of this peer, see `shoal.Optimizer`; the role `watch` is enough.

    Raises:
        ValueError: if the run is closed and there is no membership that permits to watch it, or if the run is open and
            there is one.
    """

    def __init__(self, dht: DHT, run_id: str, *, membership: Source | None = None) -> None:
        admit_to(lambda: dht.node, run_id, membership)
        self.dht, self.run_id = dht, run_id
        gate = gate_of(dht.node, run_id)
        if gate is not None:
            gate.holder.require(Part.WATCH)
        self._picture = Picture(run_id)
        self._board, self._directory = HealthBoard(dht.dht_node, run_id), DHTDirectory(dht.dht_node, run_id)
        self._redial = Redial(random.Random(dht.peer_id.key))
        self._leave: list[Callable[[], None]] = []
        self._dialling: dict[PeerID, asyncio.Task[None]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._ready = asyncio.Event()

        async def start() -> None:
            self._leave.append(dht.node.on_lost(self._on_lost))
            if gate is not None:  # the gate renews this peer's membership, and removes revoked peers
                self._leave.append(gate.enter(lambda key: None, lambda: None))
            self._tasks = [dht.node.spawn(self._keep_watching())]

        dht.submit(start()).result()

    # -- for any thread except the reactor's

    def snapshot(self) -> Snapshot:
        """A snapshot of the run. Raises RuntimeError if the DHT was shut down."""
        return self._call(self._snapshot)

    def records(self) -> list[tuple[PeerID, Health]]:
        """The newest record of each peer that is there. Raises RuntimeError if the DHT was shut down."""
        return self._call(self._picture.records)

    def wait_until_ready(self, timeout: float) -> bool:
        """Wait until all records were read once and their peers were dialled, at most `timeout` seconds. Returns
        whether this is done."""

        async def wait() -> None:
            async with asyncio.timeout(timeout):
                await self._ready.wait()

        try:
            self.dht.submit(wait()).result()
        except (TimeoutError, CancelledError):
            return False
        return True

    def close(self) -> None:
        """Stop watching. Calling it again does nothing."""
        if not self.dht.is_alive():
            return

        async def stop() -> None:
            for leave in self._leave:
                leave()
            for task in [*self._tasks, *self._dialling.values()]:
                task.cancel()
            self._leave, self._tasks = [], []

        self.dht.submit(stop()).result()

    def __enter__(self) -> Watcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, function: Callable[[], T]) -> T:
        async def call() -> T:
            return function()

        try:
            return self.dht.submit(call()).result()
        except CancelledError:
            raise RuntimeError("the DHT was shut down") from None

    # -- on the reactor

    def _snapshot(self) -> Snapshot:
        now, wall = _now(), get_dht_time()
        self._picture.tick(now, wall)
        return self._picture.snapshot(now, wall)

    async def _keep_watching(self) -> None:
        members, list_at, has_failed = 0, _now(), False
        while True:
            began, has_read = _now(), False
            try:
                if began >= list_at:
                    listed = await self._directory.read()
                    members, list_at = len(listed), began + LIST_SECONDS
                    for member in listed:
                        self.dht.node.learn(member.peer, member.multiaddrs())
                posts = await self._board.read(members)
                self._picture.read(posts, began, _now(), get_dht_time())
                has_read = True
            except (P2PError, TimeoutError) as error:
                log.debug("the records could not be read: %s", error)
            except Exception as error:  # the next reading may succeed
                level = logging.DEBUG if has_failed else logging.WARNING
                log.log(level, "the records could not be read: %r", error, exc_info=error)
                has_failed = True
            self._connect()
            if has_read and not self._ready.is_set():
                if self._dialling:
                    await asyncio.wait(self._dialling.values())
                self._ready.set()
            pause = min(max(SHORTEST, SECONDS_A_PEER * members), LONGEST)
            await asyncio.sleep(max(0.0, began + pause - _now()))

    def _connect(self) -> None:
        """Dial peers that should be connected and are not."""
        node, now = self.dht.node, _now()
        expected = self._picture.expected()[:MAX_CONNECTIONS]
        for peer in expected:
            if node.is_connected(peer):
                self._redial.found(peer)
                self._picture.connected(peer)
            else:
                self._redial.missing(peer, now, at_once=True)
        wanted = set(expected)
        for peer in self._redial.due(now):
            if peer not in wanted:
                self._redial.found(peer)  # stop dialling it: it is gone
            elif peer not in self._dialling:
                self._start(peer, self._dial(peer))

    def _start(self, peer: PeerID, dialling: Coroutine[None, None, None]) -> None:
        task = self._dialling[peer] = self.dht.node.spawn(dialling)
        task.add_done_callback(lambda _: self._dialling.pop(peer, None))

    async def _dial(self, peer: PeerID) -> None:
        try:
            await self.dht.node.connect(peer, DIAL_SECONDS)
        except P2PError as error:
            self._picture.unreachable(peer, str(error))
        else:
            self._picture.connected(peer)

    def _on_lost(self, peer: PeerID, reason: str) -> None:
        """A connection has ended. The peer may still be alive, for example if a line was cut, so dial it again."""
        if peer in self._picture.expected() and peer not in self._dialling:
            self._start(peer, self._dial_again(peer, reason))

    async def _dial_again(self, peer: PeerID, reason: str) -> None:
        try:
            await self.dht.node.connect(peer, AGAIN_SECONDS)
        except P2PError as error:
            why = f"{reason.removeprefix(_LOST)}; dialled again: {str(error).replace(_LOST, '')}"
            self._picture.lost(peer, why, _now(), get_dht_time())
        else:
            self._picture.connected(peer)


def _now() -> float:
    return time.monotonic()
