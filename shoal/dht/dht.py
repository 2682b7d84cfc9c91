"""The DHT for users: an object with synchronous methods. Its work happens on the reactor's thread."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import Any, Literal, NoReturn, TypeVar, overload

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
from shoal.interrupts import check, finished, held, holding, result_of, unbroken
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
    """A peer's part in a DHT: `store` and `get` small public records, and let other peers find this one.

    >>> with shoal.DHT(start=True) as first, shoal.DHT(first.get_visible_maddrs(), start=True) as second:
    ...     first.store("key", "value", expiration_time=shoal.get_dht_time() + 60)
    ...     second.get("key").value
    'value'

    All methods may be called from any thread but the reactor's. Names and meanings are those of `hivemind.DHT`. Unlike
    hivemind, Shoal runs no second process for the DHT: `run_coroutine` takes any function, and objects that the
    function changes are changed for the caller too.

    Args:
        initial_peers: addresses of nodes of the DHT, each ending in /p2p/<peer id>; None or an empty list begins a new
            DHT. While an initial peer is not connected, this peer dials it again every 5 to 60 s.
        start: start at once, as `run_in_background` does. Default: False.
        host_maddrs: addresses to listen on; port 0 means any free port. The default is loopback only, which no other
            machine reaches: a script that somebody tries out opens no port to the network. To be reached from other
            machines, use /ip4/0.0.0.0/tcp/<port> (all interfaces, as `shoal node` does).
        announce_maddrs: further addresses to announce to other peers, such as that of a router which forwards a port.
        identity_path: file with this peer's identity, created if it does not exist. None makes a new identity.
        client_mode: True: never listen and keep no records for others; needs initial peers. False: be a node, and warn
            if nobody reaches it. None: find out. If the peer joins through another machine, other nodes dial it back.
            If none of them reaches it, relays that it knows make it reachable; without a relay it becomes a client,
            with a warning that names the remedies.
        record_validators: further rules for records. The rule for keys with an owner always holds
            (`SignatureValidator`).
        num_replicas: number of nodes that keep each record. `DHTNode` says how safe a record then is.
        bootstrap_timeout: seconds within which an initial peer must answer.
        await_ready: with `start`, wait until the peer has joined the DHT.
        port_mapping: ask the home router, by NAT-PMP or UPnP, to forward a port to this peer for as long as the peer
            lives. Needs the extra `shoal[nat]`. The peer announces the mapped address once another peer has reached it
            there.
        upload_limit: bytes per second that this peer sends at most, for a home line that others share; None for no
            limit.
        download_limit: bytes per second that this peer receives at most; None for no limit.
        relay: connect other peers, as a relay, to peers that nobody can dial, as `shoal node --relay` does. For a
            machine that others reach and that has bandwidth to spare.
        relay_bandwidth: bytes per second that this peer passes on as a relay at most; None for no limit.
        shutdown_timeout: seconds that `shutdown` may take. Whatever has not ended by then is abandoned, with a warning.

    Raises:
        TypeError, ValueError: if an argument makes no sense. Nothing has been started then.
        PeerUnreachable: on start, if no initial peer answers. The message names each peer and the reason.
        OSError: on start, if an address to listen on is taken, or the identity's file can't be read.
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
            self._run_or_end(await_ready)

    # -- life

    def _run_or_end(self, await_ready: bool = True) -> None:
        """Start. If a signal's handler raises, be it at the very end of this call, nobody has this DHT, so end it."""
        try:
            self.run_in_background(await_ready)
        except BaseException:  # what a handler raises may be anything; it is raised again
            self.shutdown()
            raise

    @holding
    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        """Start: listen, and join the DHT. After an error, nothing of this DHT runs any more.

        Args:
            await_ready: wait until the peer has joined.
            timeout: seconds to wait for that; None waits as long as `bootstrap_timeout` allows.

        Raises:
            PeerUnreachable, OSError: as the class says.
            TimeoutError: if the peer has not joined within `timeout`.
            RuntimeError: if this DHT was started before.
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
                check()
            except BaseException:  # Ctrl-C too: a DHT that failed to start leaves nothing running
                self.shutdown()
                raise

    @holding
    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until this peer has joined the DHT.

        Args:
            timeout: seconds to wait; None waits as long as joining takes. A timeout ends only the waiting: the peer
                goes on joining, and this method can be called again.

        Raises:
            PeerUnreachable, OSError: as the class says.
            TimeoutError: if the peer has not joined within `timeout`.
            RuntimeError: if this DHT was not started, or was shut down.
        """
        if self._ready is None:
            raise RuntimeError(_NOT_STARTED)
        if not finished(self._ready, timeout):
            raise TimeoutError(f"this peer has not joined the DHT within {timeout:g} s")
        try:
            self._ready.result()
        except CancelledError:
            raise RuntimeError(_SHUT_DOWN) from None
        # any error that ended the start; raised again, like every `except BaseException` of this file does
        except BaseException:
            if self._dht_node is None:
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
        """Leave the DHT: stop listening, end all connections, and cancel all calls under way. A second call does
        nothing.
        """
        with held(), unbroken():  # Ctrl-C, too, waits until nothing is left
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
        assert self._starting is not None  # `_start` ran before `_stop`
        self._starting.cancel()
        await asyncio.gather(self._starting, return_exceptions=True)
        for future in list(self._pending):
            future.cancel()
        dht_node, self._dht_node = self._dht_node, None
        if dht_node is not None:
            await dht_node.shutdown()

    def is_alive(self) -> bool:
        """Whether this peer has joined the DHT and was not shut down."""
        return self._reactor is not None and self._dht_node is not None

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a shoal.DHT is neither copied nor pickled, for it has an identity and connections: make a new one, with "
            "get_visible_maddrs() of this one as initial_peers"
        )

    def __enter__(self) -> DHT:
        if self._ready is None:
            self._run_or_end()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    # -- identity and addresses

    @property
    def reactor(self) -> Reactor:
        """The reactor on whose thread this peer's network activity runs. Raises RuntimeError before the start and after
        `shutdown`.
        """
        if self._reactor is None:
            raise RuntimeError(_NOT_STARTED if self._ready is None else _SHUT_DOWN)
        return self._reactor

    @property
    def dht_node(self) -> DHTNode:
        """The node of the DHT, for use on the reactor's thread only. Waits until it has joined; raises as
        `wait_until_ready`.
        """
        self.wait_until_ready()
        if (dht_node := self._dht_node) is None:  # shut down at this moment
            raise RuntimeError(_SHUT_DOWN)
        return dht_node

    @property
    def node(self) -> Node:
        """The p2p node, by which other rooms talk to peers, for use on the reactor's thread only. Raises as
        `wait_until_ready`.
        """
        return self.dht_node.node

    @property
    def peer_id(self) -> PeerID:
        """This peer's id, known as soon as the DHT is started. Raises RuntimeError before that."""
        if self._peer_id is None:
            raise RuntimeError(_NOT_STARTED)
        return self._peer_id

    @property
    def client_mode(self) -> bool:
        """Whether nobody can dial this peer: it was made a client, or it found that no peer reaches it.

        With `client_mode=None` this waits until the peer has joined, and raises as `wait_until_ready`.
        """
        return self.dht_node.is_client if self._client_mode is None else self._client_mode

    @holding
    def get_visible_maddrs(self, latest: bool = False) -> list[Multiaddr]:
        """The addresses at which others can reach this peer, for use as their `initial_peers`. A client has none.

        The addresses at which others have reached this peer come first, then those of `announce_maddrs`, and those of
        loopback last. A peer that listens on all interfaces (0.0.0.0) has one address for each interface. A forked
        child may ask for its parent's addresses.

        Args:
            latest: look again which interfaces the machine has.

        Returns:
            Addresses that end in /p2p/<peer id>.

        Raises:
            RuntimeError: if this DHT was not started, or was shut down.
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

    @holding
    def store(
        self,
        key: DHTKey,
        value: DHTValue,
        expiration_time: DHTExpiration,
        subkey: Subkey | None = None,
        return_future: bool = False,
    ) -> bool | Future[bool]:
        """Keep `value` under `key` until `expiration_time`, on the `num_replicas` nodes nearest to the key.

        Args:
            key: a str, bytes or int of at most 512 bytes when encoded by msgpack.
            value: plain data (bool, int of 64 bits, float, str, bytes, list, tuple, dict, None) of at most 64 KiB when
                encoded, nested at most 32 levels deep. `get` returns a tuple as a list.
            expiration_time: in seconds of `get_dht_time()`, at most one day ahead. Of two values for the same key, the
                DHT keeps the one that expires later.
            subkey: write only this entry of the dictionary under `key`; other peers can write other entries. A str,
                bytes or int. Only the peer `<peer id>` can write a key or subkey that contains `[owner:<peer id>]`.
            return_future: return a `concurrent.futures.Future` of the result at once.

        Returns:
            Whether any node keeps the value. False if no node could be reached, if the DHT has a value that expires
            later, if the value has expired, or if a validator refuses it.

        Raises:
            TypeError, ValueError: if the DHT can't store this key, value or expiration time.
            RuntimeError: if this DHT was not started, or was shut down, or if the caller is on the reactor's thread.
        """
        # Made here and not on the reactor's thread: the caller gets the error of a wrong argument, and may change
        # `value` as soon as this method returns.
        record = make_record(key, value, expiration_time, subkey, get_dht_time())
        future = self.submit(self.dht_node.store_record(record))
        return future if return_future else self._result(future)

    @overload
    def get(self, key: DHTKey, latest: bool = False, return_future: Literal[False] = False) -> Found: ...
    @overload
    def get(self, key: DHTKey, latest: bool = False, *, return_future: Literal[True]) -> Future[Found]: ...

    @holding
    def get(self, key: DHTKey, latest: bool = False, return_future: bool = False) -> Found | Future[Found]:
        """Find the value that is stored under `key`.

        Args:
            key: as given to `store`.
            latest: ask all nodes that should keep the key, and return the newest value. Otherwise the first value found
                is returned, which may be this peer's own copy.
            return_future: return a `concurrent.futures.Future` of the result at once.

        Returns:
            (value, expiration_time), or None if nothing is found. For a key with subkeys the value is a dictionary
            `{subkey: (value, expiration_time)}`.

        Raises:
            TypeError, ValueError: if the key is no key of a DHT.
            RuntimeError: if this DHT was not started, or was shut down, or if the caller is on the reactor's thread.
        """
        encode_key(key)
        future = self.submit(self.dht_node.get(key, latest))
        return future if return_future else self._result(future)

    @holding
    def add_validators(self, record_validators: Iterable[RecordValidator]) -> None:
        """Check records by these rules too, from now on. Records that this peer keeps and that a rule refuses are
        dropped.

        Args:
            record_validators: the further rules.

        Raises:
            RuntimeError: if this DHT was not started, or was shut down.
        """
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

    @holding
    def run_coroutine(self, coro: Callable[[DHT, DHTNode], Awaitable[T]], return_future: bool = False) -> T | Future[T]:
        """Run `coro(self, dht_node)` on the reactor's thread and return its result. It must not block that thread.

        Args:
            coro: an async function of this DHT and its `DHTNode`.
            return_future: return a `concurrent.futures.Future` of the result at once. Cancelling the future cancels the
                coroutine.

        Raises:
            RuntimeError: if this DHT was not started, or was shut down, or if the caller is on the reactor's thread.
            Exception: any error that `coro` raises.
        """
        dht_node = self.dht_node

        async def run() -> T:
            return await coro(self, dht_node)

        future = self.submit(run())
        return future if return_future else self._result(future)

    # -- crossing over to the reactor

    @holding  # a handler must not raise once the coroutine is on the loop: it would be closed while it runs
    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `coroutine` on the reactor's thread and return its future at once. `shutdown` cancels it."""
        with self._lock:  # so that shutdown() either cancels the coroutine or comes first, and it is refused
            try:
                future = self.reactor.submit(coroutine)
            except BaseException:  # without close(), Python would warn that nobody awaits the coroutine
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
            return result_of(future)
        except CancelledError:
            raise RuntimeError(_SHUT_DOWN) from None


async def _call(function: Callable[[], T]) -> T:
    return function()


def _addresses(argument: str, addresses: Sequence[Multiaddr | str]) -> list[Multiaddr]:
    if isinstance(addresses, (str, Multiaddr)) or not isinstance(addresses, Sequence):
        raise TypeError(f"{argument} must be a list of addresses, not {addresses!r}")
    try:
        return [Multiaddr(address) for address in addresses]
    except ValueError as error:
        raise ValueError(f"{argument}: {error}") from error
