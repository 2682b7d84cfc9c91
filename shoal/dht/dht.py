"""The DHT as users hold it: a plain synchronous object; what it does happens on the reactor."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import Any, Literal, TypeVar, overload

from shoal.dht.created import CreatedNode as DHTNode
from shoal.dht.records import (
    DHTExpiration,
    DHTKey,
    DHTValue,
    Subkey,
    ValueWithExpiration,
    encode_key,
    get_dht_time,
    make_record,
)
from shoal.dht.validation import RecordValidator
from shoal.p2p.identity import Identity, PeerID
from shoal.p2p.limit import LEAST_RATE
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.node import Node
from shoal.p2p.reactor import Reactor

log = logging.getLogger(__name__)

T = TypeVar("T")
_NOT_STARTED = "this DHT was not started: call run_in_background(), or pass start=True"
_SHUT_DOWN = "this DHT was shut down"

Found = ValueWithExpiration[DHTValue] | None


class DHT:
    """A peer's place in a DHT: `store` and `get` small public records, and be found by others.

    >>> with shoal.DHT(start=True) as first, shoal.DHT(first.get_visible_maddrs(), start=True) as second:
    ...     first.store("key", "value", expiration_time=shoal.get_dht_time() + 60)
    ...     second.get("key").value
    'value'

    All methods may be called from any thread but the reactor's. Names and meanings are those of `hivemind.DHT`; there
    is no other process, so `run_coroutine` takes any function, and what it changes is changed for all.

    Args:
        initial_peers: addresses of nodes of the DHT, each ending in /p2p/<peer id>; none to begin a new one. Those that
            are not connected are dialled every 5 to 60 s.
        start: start right away (`run_in_background`).
        host_maddrs: where to listen; port 0 means any free one. By default on loopback only, where no other machine
            reaches it: a script that is tried opens no port to the network. Use /ip4/0.0.0.0/tcp/<port> (all
            interfaces, as `shoal node` does) to be reached from elsewhere.
        announce_maddrs: addresses to tell others besides those, such as that of a router which forwards a port.
        identity_path: file that keeps who this peer is (made if it does not exist); None makes a new identity.
        client_mode: True: never listen and keep nothing for others; needs initial peers. False: be a node, with a
            warning if nobody reaches it. None: find out: when it joins through another machine, others dial it back,
            and if nobody reaches it, it is reached through relays that it knows, or becomes a client, with a warning
            that names the ways out.
        record_validators: rules for records, beside that of owned keys, which always holds (`SignatureValidator`).
        num_replicas: nodes that keep each record; what that means for its safety is told in `DHTNode`.
        bootstrap_timeout: seconds that initial peers have to answer.
        await_ready: with `start`, wait until it has joined.
        port_mapping: ask the router at home to send a port to this peer, by NAT-PMP or UPnP (that needs the extra
            `shoal[nat]`), for as long as the peer lives; others are told when one has reached it there.
        upload_limit: bytes per second that this peer sends at most, on a line that others use too; None for no limit.
        download_limit: bytes per second that it receives at most; None for no limit.
        relay: lead other peers to those that nobody can dial, as `shoal node --relay` does: for a machine that others
            reach, with bandwidth to spare.
        relay_bandwidth: bytes per second that this peer passes on as a relay at most; None for no limit.
        shutdown_timeout: seconds that `shutdown` may take; what is not ended by then is left behind, with a warning.

    Raises:
        TypeError, ValueError: for an argument that makes no sense, before anything is started.
        PeerUnreachable: when it starts and no initial peer answers; names each, and why.
        OSError: when it starts and an address to listen on is taken, or the identity's file can't be read.
    """

    def __init__(
        self,
        initial_peers: Sequence[Multiaddr | str] | None = (),
        *,
        start: bool = False,
        host_maddrs: Sequence[Multiaddr | str] = ("/ip4/127.0.0.1/tcp/0",),
        announce_maddrs: Sequence[Multiaddr | str] = (),
        identity_path: str | os.PathLike[str] | None = None,
        client_mode: bool | None = None,
        record_validators: Iterable[RecordValidator] = (),
        num_replicas: int = 10,
        bootstrap_timeout: float = 10.0,
        await_ready: bool = True,
        port_mapping: bool = False,
        upload_limit: float | None = None,
        download_limit: float | None = None,
        relay: bool = False,
        relay_bandwidth: float | None = None,
        shutdown_timeout: float = 3.0,
    ) -> None:
        self.initial_peers = _addresses("initial_peers", initial_peers or ())
        self.host_maddrs = _addresses("host_maddrs", host_maddrs)
        self.announce_maddrs = _addresses("announce_maddrs", announce_maddrs)
        for address in self.initial_peers:
            if address.peer_id is None:
                raise ValueError(
                    f"initial_peers: {address} does not say who answers there: it must end in /p2p/<peer id>"
                )
        if client_mode and not self.initial_peers:
            raise ValueError(
                "client_mode=True needs initial_peers: a client is reached by nobody, so it must reach others"
            )
        if not (client_mode or self.host_maddrs):
            raise ValueError("host_maddrs is empty: name an address to listen on, or set client_mode=True")
        if port_mapping and (client_mode or all(address.is_loopback for address in self.host_maddrs)):
            raise ValueError(
                "port_mapping=True needs an address that the router reaches, as host_maddrs=['/ip4/0.0.0.0/tcp/0'], "
                "and no client mode"
            )
        if num_replicas < 1:
            raise ValueError(f"num_replicas must be at least 1, not {num_replicas}")
        if relay and client_mode:
            raise ValueError("relay=True is for a node that others reach: leave client_mode=True out")
        if relay_bandwidth is not None and not relay:
            raise ValueError("relay_bandwidth limits what a relay passes on: add relay=True")
        limits = {"upload_limit": upload_limit, "download_limit": download_limit, "relay_bandwidth": relay_bandwidth}
        for name, limit in limits.items():
            if limit is not None and not limit >= LEAST_RATE:
                raise ValueError(f"{name} must be at least {LEAST_RATE} bytes per second, or None, not {limit:g}")
        self.upload_limit, self.download_limit = upload_limit, download_limit
        self.relay, self.relay_bandwidth = relay, relay_bandwidth
        self.identity_path = identity_path
        self._client_mode = client_mode
        self.port_mapping = port_mapping
        self.num_replicas = num_replicas
        self.bootstrap_timeout = bootstrap_timeout
        self.shutdown_timeout = shutdown_timeout
        self._validators = list(record_validators)
        self._lock = threading.Lock()
        self._reactor: Reactor | None = None
        self._dht_node: DHTNode | None = None
        self._ready: Future[None] | None = None
        self._starting: asyncio.Task[None] | None = None
        self._peer_id: PeerID | None = None
        self._pending: set[Future[Any]] = set()
        if start:
            self.run_in_background(await_ready)

    # -- life

    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        """Start: listen, and join the DHT. With `await_ready`, wait until that is done.

        Raises as the class says, TimeoutError after `timeout` seconds (None: as long as `bootstrap_timeout` allows),
        RuntimeError if it was started before. After an error nothing of it runs any more.
        """
        with self._lock:
            if self._ready is not None:
                raise RuntimeError("this DHT was started before: make a new one")
            identity = Identity.from_file(self.identity_path) if self.identity_path is not None else Identity()
            self._peer_id = identity.peer_id
            self._reactor = Reactor.acquire()
            self._ready = self._reactor.submit(self._start(identity))
        if await_ready:
            try:
                self.wait_until_ready(timeout)
            except BaseException:  # Ctrl-C too: a DHT that was not made leaves nothing running
                self.shutdown()
                raise

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until this peer has joined the DHT; raises what `run_in_background` does.

        TimeoutError ends the waiting only: it goes on to join, and can be waited for again.
        """
        if self._ready is None:
            raise RuntimeError(_NOT_STARTED)
        try:
            self._ready.result(timeout)
        except CancelledError:
            raise RuntimeError(_SHUT_DOWN) from None
        except BaseException:  # whatever ended the start; raised again, as in all of this file
            if self._ready.done() and self._dht_node is None:
                self.shutdown()
            raise
        if self._dht_node is None:
            raise RuntimeError(_SHUT_DOWN)

    async def _start(self, identity: Identity) -> None:
        self._starting = asyncio.current_task()
        self._dht_node = await DHTNode.create(
            self.initial_peers,
            host_maddrs=self.host_maddrs,
            announce_maddrs=self.announce_maddrs,
            identity=identity,
            client_mode=self._client_mode,
            validators=self._validators,
            num_replicas=self.num_replicas,
            port_mapping=self.port_mapping,
            upload_limit=self.upload_limit,
            download_limit=self.download_limit,
            relay=self.relay,
            relay_bandwidth=self.relay_bandwidth,
            bootstrap_timeout=self.bootstrap_timeout,
        )

    def shutdown(self) -> None:
        """Leave: stop listening, end all connections, cancel what is under way. Calling it again does nothing."""
        with self._lock:
            reactor, self._reactor = self._reactor, None
        if reactor is None:
            return
        try:
            reactor.run(asyncio.wait_for(self._stop(), self.shutdown_timeout))
        except TimeoutError:
            log.warning("the DHT did not end within %g s: what is left of it is abandoned", self.shutdown_timeout)
        finally:
            reactor.release()

    async def _stop(self) -> None:
        assert self._starting is not None  # it began before this did
        self._starting.cancel()
        await asyncio.gather(self._starting, return_exceptions=True)
        for future in list(self._pending):
            future.cancel()
        dht_node, self._dht_node = self._dht_node, None
        if dht_node is not None:
            await dht_node.shutdown()

    def is_alive(self) -> bool:
        """Whether it was started, has joined, and was not shut down."""
        return self._reactor is not None and self._dht_node is not None

    def __enter__(self) -> DHT:
        if self._ready is None:
            self.run_in_background()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    # -- who it is

    @property
    def reactor(self) -> Reactor:
        """The reactor on whose thread this peer's network activity runs."""
        if self._reactor is None:
            raise RuntimeError(_NOT_STARTED if self._ready is None else _SHUT_DOWN)
        return self._reactor

    @property
    def dht_node(self) -> DHTNode:
        """The node of the DHT; to be used on the reactor's thread only. Waits until it has joined."""
        self.wait_until_ready()
        if (dht_node := self._dht_node) is None:  # shut down at this moment
            raise RuntimeError(_SHUT_DOWN)
        return dht_node

    @property
    def node(self) -> Node:
        """The p2p node, by which other rooms talk to peers; to be used on the reactor's thread only."""
        return self.dht_node.node

    @property
    def peer_id(self) -> PeerID:
        """Who this peer is; known as soon as it was started."""
        if self._peer_id is None:
            raise RuntimeError(_NOT_STARTED)
        return self._peer_id

    @property
    def client_mode(self) -> bool:
        """Whether nobody can dial this peer: it was made a client, or has found that nobody reaches it. Waits until it
        has joined, if that is to be found out."""
        return self.dht_node.is_client if self._client_mode is None else self._client_mode

    def get_visible_maddrs(self, latest: bool = False) -> list[Multiaddr]:
        """Addresses at which others can reach this peer, to be passed on as their `initial_peers`; none of a client.

        Those at which others have reached it come first, then those of `announce_maddrs`; those of loopback last.
        Where it listens on all interfaces (0.0.0.0), each interface has its own; `latest` looks again which there are.
        A forked child may ask for its parent's.
        """
        dht_node = self.dht_node
        if not self.reactor.is_alive():
            return dht_node.visible_addresses(latest)
        return self._result(self.submit(_call(lambda: dht_node.visible_addresses(latest))))

    # -- records

    @overload
    def store(
        self,
        key: DHTKey,
        value: DHTValue,
        expiration_time: DHTExpiration,
        subkey: Subkey | None = None,
        return_future: Literal[False] = False,
    ) -> bool: ...
    @overload
    def store(
        self,
        key: DHTKey,
        value: DHTValue,
        expiration_time: DHTExpiration,
        subkey: Subkey | None = None,
        *,
        return_future: Literal[True],
    ) -> Future[bool]: ...

    def store(
        self,
        key: DHTKey,
        value: DHTValue,
        expiration_time: DHTExpiration,
        subkey: Subkey | None = None,
        return_future: bool = False,
    ) -> bool | Future[bool]:
        """Keep `value` under `key` until `expiration_time`, on this peer or others.

        Args:
            key: a str, bytes or int.
            value: plain data (bool, int, float, str, bytes, list, tuple, dict, None) of at most 64 KiB. A tuple is
                found as a list.
            expiration_time: in seconds of `get_dht_time()`, at most one day ahead. Of two values the one that expires
                later is kept.
            subkey: write only this entry of the dictionary under `key`, which others write as well. A key or subkey
                that contains `[owner:<peer id>]` can be written by that peer only.
            return_future: return at once, with the result to come.

        Returns:
            Whether it is stored: False if something newer is there, it has expired, or a validator refuses it.

        Raises:
            TypeError, ValueError: for a key or value that can't be stored.
        """
        # Here and not on the reactor's thread: the caller is told of what makes no sense, and may change `value` then.
        record = make_record(key, value, expiration_time, subkey, get_dht_time())
        future = self.submit(self.dht_node.store_record(record))
        return future if return_future else self._result(future)

    @overload
    def get(self, key: DHTKey, latest: bool = False, return_future: Literal[False] = False) -> Found: ...
    @overload
    def get(self, key: DHTKey, latest: bool = False, *, return_future: Literal[True]) -> Future[Found]: ...

    def get(self, key: DHTKey, latest: bool = False, return_future: bool = False) -> Found | Future[Found]:
        """What is stored under `key`.

        Args:
            key: as given to `store`.
            latest: ask all peers that should keep it for the newest; otherwise the first that is found will do.
            return_future: return at once, with the result to come.

        Returns:
            (value, expiration_time), or None if nothing is found. For a key with subkeys the value is a dictionary,
            {subkey: (value, expiration_time)}.
        """
        encode_key(key)
        future = self.submit(self.dht_node.get(key, latest))
        return future if return_future else self._result(future)

    def add_validators(self, record_validators: Iterable[RecordValidator]) -> None:
        """Have records checked by these too, from now on; what this peer keeps and they refuse is dropped."""
        dht_node, validators = self.dht_node, list(record_validators)
        self._result(self.submit(_call(lambda: dht_node.add_validators(validators))))

    @overload
    def run_coroutine(
        self, coro: Callable[[DHT, DHTNode], Awaitable[T]], return_future: Literal[False] = False
    ) -> T: ...
    @overload
    def run_coroutine(
        self, coro: Callable[[DHT, DHTNode], Awaitable[T]], return_future: Literal[True]
    ) -> Future[T]: ...

    def run_coroutine(self, coro: Callable[[DHT, DHTNode], Awaitable[T]], return_future: bool = False) -> T | Future[T]:
        """Run `coro(self, dht_node)` on the reactor's thread, and return its result; it must not block that thread.

        With `return_future`, return at once; cancelling the future cancels it.
        """
        dht_node = self.dht_node

        async def run() -> T:
            return await coro(self, dht_node)

        future = self.submit(run())
        return future if return_future else self._result(future)

    # -- crossing over to the reactor

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `coroutine` on the reactor's thread, until `shutdown` at the latest, which cancels it."""
        with self._lock:  # so that shutdown() cancels it, or it is refused
            try:
                future = self.reactor.submit(coroutine)
            except BaseException:  # it was not taken, and would warn that nobody awaits it
                coroutine.close()
                raise
            self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        return future

    def _result(self, future: Future[T]) -> T:
        try:
            running: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self.reactor.loop:
            future.cancel()
            raise RuntimeError(
                "the DHT was called on the reactor's thread, where it can't wait: use its dht_node there"
            )
        try:
            return future.result()
        except CancelledError:
            raise RuntimeError(_SHUT_DOWN) from None
        except BaseException:  # Ctrl-C too: nobody waits for it any more
            future.cancel()
            raise


async def _call(function: Callable[[], T]) -> T:
    return function()


def _addresses(argument: str, addresses: Sequence[Multiaddr | str]) -> list[Multiaddr]:
    if isinstance(addresses, (str, Multiaddr)) or not isinstance(addresses, Sequence):
        raise TypeError(f"{argument} must be a list of addresses, not {addresses!r}")
    try:
        return [Multiaddr(address) for address in addresses]
    except ValueError as error:
        raise ValueError(f"{argument}: {error}") from error
