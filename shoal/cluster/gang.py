"""The connections (*ties*) between the ranks of a cluster. Each rank has a TCP connection to rank 0, over which it
sends reports and receives verdicts. When a rank dies, its connection ends, and all ranks hear of the loss.

Collectives of `torch.distributed` can't replace them. Their errors name an address at most, and only ranks that are in
a collective notice a loss: rank 0, in a round with other peers, would not.
"""

from __future__ import annotations

import atexit
import contextlib
import hmac
import logging
import os
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import msgspec
from torch import distributed as dist

from shoal.cluster.messages import Bye, Do, Done, Go, Hello, Lost, Message, Report, Verdict
from shoal.interrupts import has_rung, raised_by

log = logging.getLogger(__name__)

CONNECT_SECONDS = 60.0  # within this time all ranks must connect
HELLO_SECONDS = 5.0  # within this time a rank that has connected must say who it is
LOSS_SECONDS = 3.0  # how long to wait, after a collective has failed, for the news which rank is lost
# The kernel ends connections to a machine that is silent for so long. The kernel of a machine answers for its
# processes, even for stopped ones.
SILENT_SECONDS = 6
MAX_BYTES = 1 << 24  # of a message
MAX_HELLO_BYTES = 256

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


class ClusterError(RuntimeError):
    """This cluster cannot continue: a rank is lost, has left, or has raised an error. The message says which rank."""


Said = Report | Verdict | Go | Do | Done


class Gang:
    """The ties of this rank. All ranks create a `Gang` at the same time.

    Args:
        group: the process group; None for a single process.

    Attributes:
        rank: the rank of this process.
        size: the number of ranks.
        names: readable names of all ranks, for messages.
        left_in_order: whether this rank has left, and the reason was neither an error nor a loss.

    Raises:
        ClusterError: if the ranks can't connect, or one of them has failed before (see `told_to_all`).
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.rank, self.size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        found = [("this process", "", "")] if group is None else _introduced(group)
        self.names = [name for name, _, _ in found]
        self._changed = threading.Condition()
        self._bells: list[threading.Lock] = []  # of callers that wait for a change, see `_until`
        self._inbox: dict[int, deque[Said]] = {rank: deque() for rank in range(self.size)}
        self._unsaid = b""  # messages to be sent together with the next one
        self._news: list[Future[None]] = []  # futures of callers that wait for the next message
        self._left: set[int] = set()
        self._lost: Lost | None = None
        self._closed = self.left_in_order = False
        # At rank 0: ranks that have reported and have no verdict yet. At others: rank 0, while this rank waits for it.
        self._owed: set[int] = set()
        self._sending = threading.Lock()  # the listening thread sends, too: it tells others of a loss
        self._on_lost: Callable[[], object] = lambda: None
        self._sockets = {} if group is None else self._meet(group, [host for _, host, _ in found])
        self._wake, self._woken = socket.socketpair()
        threading.Thread(target=self._listen, name="shoal-cluster", daemon=True).start()
        atexit.register(self._at_exit)
        _gangs.add(self)

    # -- how they meet

    def _meet(self, group: dist.ProcessGroup, hosts: list[str]) -> dict[int, socket.socket]:
        """Make the connections of this rank: at rank 0 to all others, at other ranks to rank 0.

        Raises:
            ClusterError: if the connections cannot be made.
        """
        source = dist.get_global_rank(group, 0)
        told: list[tuple[list[str], int, bytes]] = [([], 0, b"")]
        if self.rank:
            dist.broadcast_object_list(told, source, group=group)
            addresses, port, token = told[0]
            tie = self._dial(addresses, port)
            _send(tie, Hello(self.rank, token))
            return {0: _held(tie)}
        others = [host.split()[0] for host in hosts if host != hosts[0]]
        with socket.create_server(("0.0.0.0" if others else "127.0.0.1", 0)) as server:
            token = secrets.token_bytes(32)
            addresses = ["127.0.0.1"] if not others else _addresses(others[0], is_master=source == 0)
            told[0] = (addresses, server.getsockname()[1], token)
            dist.broadcast_object_list(told, source, group=group)
            return self._accept(server, token)

    def _dial(self, addresses: list[str], port: int) -> socket.socket:
        failed = []
        for address in addresses:
            try:
                return socket.create_connection((address, port), CONNECT_SECONDS / len(addresses))
            except OSError as error:
                failed.append(f"{address} port {port}: {error}")
        raise ClusterError(f"{self.names[self.rank]} does not reach {self.names[0]} at {'; '.join(failed)}")

    def _accept(self, server: socket.socket, token: bytes) -> dict[int, socket.socket]:
        ties: dict[int, socket.socket] = {}
        until = time.monotonic() + CONNECT_SECONDS
        while len(ties) < self.size - 1:
            try:
                server.settimeout(max(0.001, until - time.monotonic()))
                tie, _ = server.accept()
            except TimeoutError:
                missing = [self.names[rank] for rank in range(1, self.size) if rank not in ties]
                raise ClusterError(f"{', '.join(missing)} did not connect in {CONNECT_SECONDS:g} s") from None
            tie.settimeout(HELLO_SECONDS)
            try:
                hello = _receive(tie, MAX_HELLO_BYTES)
            except (OSError, msgspec.MsgspecError):
                hello = None
            is_one = isinstance(hello, Hello) and 0 < hello.rank < self.size
            if is_one and isinstance(hello, Hello) and hmac.compare_digest(hello.token, token):
                ties[hello.rank] = _held(tie)
            else:
                tie.close()  # not a rank of this cluster
        return ties

    # -- what they tell each other

    def say(self, message: Said, *, at_once: bool = True) -> None:
        """Send a message to rank 0; at rank 0, to all others. Raises ClusterError if a rank is lost.

        Args:
            message: the message.
            at_once: if False, send it together with the next message, because each message wakes its receivers.
        """
        self.check()
        self._unsaid += _framed(message)
        if not at_once:
            return
        said, self._unsaid = self._unsaid, b""
        with self._changed:
            if isinstance(message, Report):
                self._owed = {0}
            elif isinstance(message, Verdict):
                self._owed = set()
        for rank, tie in self._sockets.items():
            try:
                with self._sending:
                    tie.sendall(said)
            except OSError as error:
                self._lose(rank, str(error))
        self.check()

    @contextlib.contextmanager
    def collectives(self) -> Iterator[None]:
        """A context in which collectives that fail because a rank is lost raise ClusterError."""
        try:
            yield
        except RuntimeError as error:
            self._wait_for_why(error)
            try:
                self.check()
            except ClusterError as why:
                raise why from error
            raise

    def hear_reports(self) -> list[Report]:
        """Wait for a report of each other rank. Returns them in the order of ranks. Raises ClusterError if a rank is
        lost. If a signal handler raises meanwhile, all reports stay for the next call.
        """
        self._until(lambda: all(self._inbox[rank] or rank in self._left for rank in self._sockets))
        heard = [self._hear(rank) for rank in sorted(self._sockets)]
        return [message for message in heard if isinstance(message, Report)]

    def hear_answers(self) -> list[Done]:
        """Wait for the answer of each other rank to the oldest `Do` that is not answered. Raises ClusterError if a rank
        is lost."""
        heard = [self._hear(rank) for rank in sorted(self._sockets)]
        return [message for message in heard if isinstance(message, Done)]

    def wait_for_answers(self, count: int, over: Future[None]) -> bool:
        """Wait until `count` answers of each other rank have arrived, or `over` is done. Returns whether they have
        arrived. Raises ClusterError if a rank is lost."""

        def are_here() -> bool:
            return all(len(self._inbox[rank]) >= count for rank in self._sockets)

        over.add_done_callback(lambda _: self._tell_change())
        with self._changed:
            self._changed.wait_for(lambda: are_here() or over.done() or self._lost is not None or self._closed)
        self.check()
        return are_here()

    def _tell_change(self) -> None:
        with self._changed:
            self._tell_waiting()

    def _tell_waiting(self) -> None:
        """Wake all callers that wait for a change. Call this while holding `_changed`."""
        self._changed.notify_all()
        bells, self._bells = self._bells, []
        for bell in bells:
            bell.release()

    def _until(self, is_so: Callable[[], object]) -> None:
        """Wait until `is_so()`, or until a rank is lost or this one has left. Signal handlers run meanwhile."""
        while True:
            with self._changed:
                if is_so() or self._lost is not None or self._closed:
                    return
                bell = threading.Lock()
                bell.acquire()
                self._bells.append(bell)
            has_rung(bell)

    def news(self) -> Future[None]:
        """A future that is done as soon as there is an unread message, or a rank is lost."""
        future: Future[None] = Future()
        with self._changed:
            self._news.append(future)
        self._tell_news()
        return future

    def _tell_news(self) -> None:
        with self._changed:
            if not (any(self._inbox.values()) or self._lost is not None or self._closed):
                return
            news, self._news = self._news, []
        for future in news:
            if future.set_running_or_notify_cancel():
                future.set_result(None)

    def hear_verdict(self) -> Verdict | Go | Do:
        """Wait for the next message of rank 0 in a call. Raises ClusterError if a rank is lost."""
        self._until(lambda: self._inbox[0] or 0 in self._left)
        message = self._hear(0)
        assert not isinstance(message, Report | Done)
        return message

    def _hear(self, rank: int) -> Said:
        with self._changed:
            self._changed.wait_for(
                lambda: self._inbox[rank] or self._lost is not None or self._closed or rank in self._left
            )
            if self._inbox[rank]:
                message = self._inbox[rank].popleft()
                if isinstance(message, Verdict):
                    self._owed.discard(rank)
                return message
        self.check()
        raise ClusterError(f"{self.names[rank]} has shut its optimizer down, and {self.names[self.rank]} has not")

    def check(self) -> None:
        """Raise ClusterError if a rank is lost, or this one has left."""
        if self._lost is not None:
            raise ClusterError(
                f"{self.names[self._lost.rank]} of this cluster is lost ({self._lost.reason}): a cluster lives and "
                "dies as one; end this process, and start all of its ranks again"
            )
        if self._closed:
            raise ClusterError("this rank has shut its optimizer down")

    @property
    def has_finished(self) -> bool:
        """Whether this rank has left in order, and collectives can still be made."""
        return self.left_in_order and (self.size == 1 or dist.is_initialized())

    @property
    def is_whole(self) -> bool:
        """Whether no rank is lost."""
        return self._lost is None

    def when_lost(self, do: Callable[[], object]) -> None:
        """Call a function in a thread of its own when a rank is lost; now, if one is lost already."""
        with self._changed:
            self._on_lost = do
            is_late = self._lost is not None
        if is_late:
            self._call_on_lost()

    def _call_on_lost(self) -> None:
        threading.Thread(target=self._on_lost, name="shoal-cluster-lost", daemon=True).start()

    def _wait_for_why(self, error: BaseException | None) -> None:
        """If torch may have raised that error because a rank is lost, wait until this rank hears which one, so that the
        log names it. If this rank ended at once, others would take it for the lost one."""
        if isinstance(error, RuntimeError):
            with self._changed:
                self._changed.wait_for(lambda: self._lost is not None or self._closed, LOSS_SECONDS)

    def let_go(self) -> None:
        """Close the connections without a message, because this process is a fork."""
        for each in (self._wake, self._woken, *self._sockets.values()):
            each.close()
        self._closed = True
        atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        error = getattr(sys, "last_value", None)  # the error that has ended this process
        if error is None or _is_own(error):
            self.leave(error)
        else:
            self._wait_for_why(error)

    def leave(self, error: BaseException | None = None) -> None:
        """Tell the other ranks that this one has left, and which error has ended its training, if one has."""
        error = raised_by(sys.exc_info()[1] if error is None else error)
        self._wait_for_why(error)
        with self._changed:
            if self._closed:
                return
            self._closed, self.left_in_order = True, error is None and self._lost is None
            is_why = _is_own(error) and self._lost is None
            goodbye = Bye(f"{type(error).__name__}: {error}".removesuffix(": ")[:4096] if is_why else "")
            self._tell_waiting()
        self._tell_news()
        atexit.unregister(self._at_exit)
        lost = self._lost if self.rank == 0 else None
        for rank, tie in self._sockets.items():
            try:
                with self._sending:
                    if lost is not None and rank != lost.rank:  # `_lose` may not have told this rank yet
                        _send(tie, lost)
                    _send(tie, goodbye)
            except OSError as error:
                log.debug("a rank is gone already: %s", error)
        self._wake.shutdown(socket.SHUT_RDWR)  # wakes the thread even if a forked process has the socket open, too
        self._wake.close()

    # -- losses

    def _listen(self) -> None:
        """Receive messages until this rank leaves. Runs in a thread of its own."""
        with selectors.DefaultSelector() as selector:
            for rank, tie in self._sockets.items():
                selector.register(tie, selectors.EVENT_READ, rank)
            selector.register(self._woken, selectors.EVENT_READ)
            leaves = False
            while not leaves:
                for key, _ in selector.select():
                    if key.data is None:  # `leave` has told all ranks; before that, no connection may be closed
                        leaves = True
                    elif not self._read(key.data, self._sockets[key.data]):
                        selector.unregister(key.fileobj)
        for each in (self._woken, *self._sockets.values()):
            each.close()

    def _read(self, rank: int, tie: socket.socket) -> bool:
        """Receive the next message of a rank. Returns whether more may come."""
        try:
            message = _receive(tie)
        except (OSError, msgspec.MsgspecError) as error:
            if rank not in self._left:
                self._lose(rank, str(error))
            return False
        if isinstance(message, Lost):
            self._lose(message.rank, message.reason)
        elif isinstance(message, Bye):
            with self._changed:
                is_owed = rank in self._owed and not (self._inbox[rank] and self.rank)
                self._left.add(rank)
                self._tell_waiting()
            if message.error:
                self._lose(rank, f"it has raised {message.error}")
            elif is_owed:
                self._lose(rank, "it has ended in the middle of a call")
        elif not isinstance(message, Hello):
            with self._changed:
                if isinstance(message, Report):
                    self._owed.add(rank)
                self._inbox[rank].append(message)
                self._tell_waiting()
            self._tell_news()
        return True

    def _lose(self, rank: int, reason: str) -> None:
        with self._changed:
            if self._lost is not None or self._closed:
                return
            self._lost = Lost(rank, reason)
            self._tell_waiting()
        self._tell_news()
        log.error("%s of this cluster is lost: %s; all of its ranks end", self.names[rank], reason)
        for other, tie in self._sockets.items():
            if self.rank == 0 and other != rank:
                try:
                    with self._sending:
                        _send(tie, self._lost)
                except OSError as error:
                    log.debug("%s is gone, too: %s", self.names[other], error)
        self._call_on_lost()


def _is_own(error: BaseException | None) -> bool:
    """Whether that error ends the training of this rank, and the others do not know of it."""
    return isinstance(error, Exception | KeyboardInterrupt) and not isinstance(error, ClusterError | StopIteration)


Introduction = tuple[str, str, str]  # a rank's name, its host, and why it has not made its optimizer


def _introduced(group: dist.ProcessGroup, error: str = "") -> list[Introduction]:
    """Exchange introductions between all ranks. A collective. Raises ClusterError if one of them has an error."""
    rank, host = dist.get_rank(group), f"{socket.gethostname()} {_boot()}"
    name = f"rank {rank} (process {os.getpid()} on {socket.gethostname()})"
    found: list[Introduction] = [("", "", "")] * dist.get_world_size(group)
    dist.all_gather_object(found, (name, host, error), group=group)
    for theirs, _, failed in found:
        if failed:
            raise ClusterError(f"{theirs} has raised {failed}")
    return found


def _boot() -> str:
    """An id of this machine's boot, which tells machines with equal names apart."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@contextlib.contextmanager
def told_to_all(group: dist.ProcessGroup | None) -> Iterator[None]:
    """A context for the time before a `Gang` exists: an error in it is sent to the other ranks, which raise it as
    well."""
    try:
        yield
    except Exception as error:
        if group is not None:
            with contextlib.suppress(ClusterError):  # it repeats this error
                _introduced(group, f"{type(error).__name__}: {error}"[:4096])
        raise


_gangs: weakref.WeakSet[Gang] = weakref.WeakSet()


def _let_go() -> None:
    """Close all ties in a process that was forked from this one, such as a worker of a DataLoader: otherwise they would
    outlive this process."""
    for gang in _gangs:
        gang.let_go()


os.register_at_fork(after_in_child=_let_go)


def _addresses(other: str, *, is_master: bool) -> list[str]:
    """Addresses at which ranks on other hosts may reach this host. `other` is one of these hosts."""
    found = [os.environ["MASTER_ADDR"]] if is_master and "MASTER_ADDR" in os.environ else []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))  # sends nothing: the kernel chooses the address
        found.append(probe.getsockname()[0])
    return list(dict.fromkeys([*found, socket.gethostname()]))


def _held(tie: socket.socket) -> socket.socket:
    """Set up a socket so that the kernel ends the connection if the other machine is gone. Returns the socket."""
    tie.settimeout(None)
    tie.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    tie.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    tie.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    tie.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    tie.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENT_SECONDS - 1)
    tie.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENT_SECONDS)
    return tie


def _send(tie: socket.socket, message: Message) -> None:
    tie.sendall(_framed(message))


def _framed(message: Message) -> bytes:
    data = _encode(message)
    return struct.pack("!I", len(data)) + data


def _receive(tie: socket.socket, at_most: int = MAX_BYTES) -> Message:
    """Receive a message. Raises OSError if the connection has ended, and MsgspecError if the data are no message."""
    (length,) = struct.unpack("!I", _exactly(tie, 4))
    if length > at_most:
        raise OSError(f"a message of {length} bytes")
    message: Message = _decode(_exactly(tie, length))
    return message


def _exactly(tie: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        more = tie.recv(length - len(data))
        if not more:
            raise ConnectionResetError("its connection has ended")
        data += more
    return bytes(data)
