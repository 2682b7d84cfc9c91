"""The connections (*ties*) between the ranks of a cluster. Each rank has a TCP connection to rank 0. When a rank dies,
its connection ends, and all ranks hear of the loss.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import msgspec
from torch import distributed as dist

from shoal.cluster.messages import Bye, LostRank, Message, RankHello
from shoal.interrupts import has_rung, raised_by, unbroken

log = logging.getLogger(__name__)

CONNECT_SECONDS = 60.0  # within this time all ranks must connect
HELLO_SECONDS = 5.0  # within this time a rank that has connected must say who it is
LOSS_SECONDS = 3.0  # how long to wait, after a collective has failed, for the news which rank is lost
# The kernel ends connections to a machine that is silent for so long. The kernel of a machine answers for its
# processes, even for stopped ones.
SILENT_SECONDS = 6
MAX_BYTES = 1 << 24  # of a message
MAX_HELLO_BYTES = 256
RECEIVE_BYTES = 1 << 16  # the most that the listening thread takes at a time
HAS_LEFT = "this rank has shut its optimizer down"

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


class ClusterError(RuntimeError):
    """This cluster cannot continue: a rank is lost, has left, or has raised an error. The message says which rank."""


class Ties:
    """The ties of this rank: at rank 0 to all others, at other ranks to rank 0. A thread receives the messages.

    Args:
        rank: the rank of this process.
        names: readable names of all ranks, for messages.
        sockets: by rank, the connections of this rank. See `meet`.

    Attributes:
        rank, names: as given.
        size: the number of ranks.
        inbox: by rank, the messages that have arrived and were not taken.
        in_call: whether this rank is in a call of all ranks. If it leaves now, the others take it for lost.
        has_left: whether this rank has left.
        left_in_order: whether it has, and the reason was neither an error nor a loss.
    """

    def __init__(self, rank: int, names: Sequence[str], sockets: Mapping[int, socket.socket]) -> None:
        self.rank, self.names, self.size = rank, list(names), len(names)
        self.inbox: dict[int, deque[Message]] = {other: deque() for other in sockets}
        self.in_call = self.left_in_order = self.has_left = False
        self._sockets = dict(sockets)
        self._lock = threading.Lock()  # for all fields below
        self._bells: list[threading.Lock] = []  # of callers that wait for a change, see `until`
        self._watched: list[tuple[Callable[[], object], Future[None]]] = []
        self._left: set[int] = set()
        self._lost: LostRank | None = None
        self._on_lost: Callable[[], object] = lambda: None
        self._sending = threading.Lock()  # the listening thread sends, too: it tells others of a loss
        self._wake, self._woken = socket.socketpair()
        threading.Thread(target=self._listen, name="shoal-cluster", daemon=True).start()
        atexit.register(self._at_exit)
        _all_ties.add(self)

    # -- messages

    def send(self, data: bytes, ranks: Iterable[int] | None = None) -> None:
        """Send `framed` messages to these ranks; to all that have not left when None. Raises ClusterError if a rank is
        lost."""
        self.check()
        for rank in self._sockets if ranks is None else ranks:
            if rank in self._left:
                continue
            try:
                with self._sending:
                    self._sockets[rank].sendall(data)
            except OSError as error:
                with unbroken():  # the listening thread may be about to read its goodbye
                    self.until(partial(self._left.__contains__, rank), LOSS_SECONDS)
                if rank not in self._left:
                    self._lose(rank, str(error))
        self.check()

    def has_news(self, rank: int) -> bool:
        """Whether `take` does not return None."""
        return bool(self.inbox[rank]) or rank in self._left

    def take(self, rank: int) -> Message | None:
        """Take the oldest message of a rank; None if none is there.

        Raises:
            ClusterError: if none is there, and a rank is lost, that rank has left, or this one has.
        """
        with self._lock:
            if self.inbox[rank]:
                return self.inbox[rank].popleft()
            has_left = rank in self._left
        self.check()
        if has_left:
            raise ClusterError(f"{self.names[rank]} has shut its optimizer down, and {self.names[self.rank]} has not")
        return None

    def hear(self, rank: int) -> Message:
        """Wait for a message of a rank. Raises ClusterError as `take` does."""
        while (message := self.take(rank)) is None:
            self.until(lambda: self.has_news(rank))
        return message

    # -- waits

    def until(self, is_so: Callable[[], object], timeout: float | None = None) -> bool:
        """Wait until `is_so()`, or until a rank is lost or this one has left. Signal handlers run meanwhile.

        Args:
            is_so: a quick function, which must not use these ties. It is asked when a message arrives, and after
                `wake`.
            timeout: the longest time to wait, in seconds; None: no limit.

        Returns:
            False if the time is over.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                if is_so() or self.is_over:
                    return True
                bell = threading.Lock()
                bell.acquire()
                self._bells.append(bell)
            if not has_rung(bell, None if deadline is None else deadline - time.monotonic()):
                return False

    def watch(self, is_so: Callable[[], object]) -> Future[None]:
        """A future that is done as soon as `is_so()`, or a rank is lost, or this one has left; see `until`. Cancel it
        if nobody waits for it any more."""
        future: Future[None] = Future()
        with self._lock:
            self._watched.append((is_so, future))
        self.wake()
        return future

    def wake(self) -> None:
        """Ask each `is_so` again: something has changed."""
        with self._lock:
            bells, self._bells = self._bells, []
            watched, self._watched = self._watched, []
            done = []
            for is_so, future in watched:
                if self.is_over or is_so():
                    done.append(future)
                elif not future.cancelled():
                    self._watched.append((is_so, future))
        for bell in bells:
            bell.release()
        for future in done:
            if future.set_running_or_notify_cancel():
                future.set_result(None)

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

    # -- losses

    @property
    def is_over(self) -> bool:
        """Whether a rank is lost, or this one has left."""
        return self._lost is not None or self.has_left

    def check(self) -> None:
        """Raise ClusterError if a rank is lost, or this one has left."""
        if self._lost is not None:
            raise ClusterError(
                f"{self.names[self._lost.rank]} of this cluster is lost ({self._lost.reason}): a cluster lives and "
                "dies as one; end this process, and start all of its ranks again"
            )
        if self.has_left:
            raise ClusterError(HAS_LEFT)

    @property
    def is_whole(self) -> bool:
        """Whether no rank is lost."""
        return self._lost is None

    def when_lost(self, do: Callable[[], object]) -> None:
        """Call a function in a thread of its own when a rank is lost; now, if one is lost already."""
        with self._lock:
            self._on_lost = do
            is_late = self._lost is not None
        if is_late:
            self._call_on_lost()

    def _call_on_lost(self) -> None:
        threading.Thread(target=self._on_lost, name="shoal-cluster-lost", daemon=True).start()

    def _wait_for_why(self, error: BaseException | None) -> None:
        """If torch may have raised that error because a rank is lost, wait until this rank hears which one, so that the
        log names it. If this rank ended at once, others would take it for the lost one."""
        if isinstance(error, RuntimeError) and not isinstance(error, ClusterError):
            with unbroken():
                self.until(lambda: False, LOSS_SECONDS)

    def leave(self, error: BaseException | None = None) -> None:
        """Tell the other ranks that this one has left, and which error has ended its training, if one has."""
        error = raised_by(sys.exc_info()[1] if error is None else error)
        self._wait_for_why(error)
        with self._lock:
            if self.has_left:
                return
            self.has_left, self.left_in_order = True, error is None and self._lost is None
            is_why = _is_own(error) and self._lost is None
            goodbye = Bye(text_of(error) if is_why else "", self.in_call and self._lost is None)
        self.wake()
        atexit.unregister(self._at_exit)
        lost = self._lost if self.rank == 0 else None
        for rank, tie in self._sockets.items():
            try:
                with self._sending:
                    if lost is not None and rank != lost.rank:  # `_lose` may not have told this rank yet
                        tie.sendall(framed(lost))
                    tie.sendall(framed(goodbye))
            except OSError as gone:
                log.debug("a rank is gone already: %s", gone)
        self._wake.shutdown(socket.SHUT_RDWR)  # wakes the thread even if a forked process has the socket open, too
        self._wake.close()

    def _at_exit(self) -> None:
        error = getattr(sys, "last_value", None)  # the error that has ended this process
        if error is None or _is_own(error):
            self.leave(error)
        else:
            self._wait_for_why(error)

    def let_go(self) -> None:
        """Close the connections without a message, because this process is a fork."""
        for each in (self._wake, self._woken, *self._sockets.values()):
            each.close()
        self.has_left = True
        atexit.unregister(self._at_exit)

    # -- the listening thread

    def _listen(self) -> None:
        """Receive messages until this rank leaves."""
        arrived = {rank: bytearray() for rank in self._sockets}
        with selectors.DefaultSelector() as selector:
            for rank, tie in self._sockets.items():
                selector.register(tie, selectors.EVENT_READ, rank)
            selector.register(self._woken, selectors.EVENT_READ)
            leaves = False
            while not leaves:
                for key, _ in selector.select():
                    if key.data is None:  # `leave` has told all ranks; before that, no connection may be closed
                        leaves = True
                    elif not self._read(key.data, arrived[key.data]):
                        selector.unregister(key.fileobj)
        for each in (self._woken, *self._sockets.values()):
            each.close()

    def _read(self, rank: int, arrived: bytearray) -> bool:
        """Receive what a rank has sent. Returns whether more may come."""
        try:
            data = self._sockets[rank].recv(RECEIVE_BYTES)
            if not data:
                raise ConnectionResetError("its connection has ended")
            arrived += data
            messages = list(_taken_from(arrived))
        except (OSError, msgspec.MsgspecError) as error:
            if rank not in self._left:
                self._lose(rank, str(error))
            return False
        lost: LostRank | None = None
        with self._lock:  # messages that were sent together wake a caller once
            for message in messages:
                match message:
                    case LostRank():
                        lost = lost or message
                    case Bye() if message.error or message.in_call:
                        raised = f"it has raised {message.error}" if message.error else ""
                        lost = lost or LostRank(rank, raised or "it has ended in the middle of a call")
                    case Bye():
                        self._left.add(rank)
                    case RankHello():
                        pass
                    case _:
                        self.inbox[rank].append(message)
        if lost is not None:
            self._lose(lost.rank, lost.reason)
        elif messages:
            self.wake()
        return True

    def _lose(self, rank: int, reason: str) -> None:
        with self._lock:
            if self.is_over:
                return
            self._lost = lost = LostRank(rank, reason[:4096])
        self.wake()
        log.error("%s of this cluster is lost: %s; all of its ranks end", self.names[rank], reason)
        for other, tie in self._sockets.items():
            if self.rank == 0 and other != rank:
                try:
                    with self._sending:
                        tie.sendall(framed(lost))
                except OSError as error:
                    log.debug("%s is gone, too: %s", self.names[other], error)
        self._call_on_lost()


# -- how the ranks meet


def meet(group: dist.ProcessGroup) -> tuple[int, list[str], dict[int, socket.socket]]:
    """Connect the ranks of a process group. A collective.

    Returns:
        The arguments of `Ties`.

    Raises:
        ClusterError: if the ranks can't connect, or one of them has failed before (see `told_to_all`).
    """
    found = _introduced(group)
    rank, names, hosts = dist.get_rank(group), [name for name, _, _ in found], [host for _, host, _ in found]
    source = dist.get_global_rank(group, 0)
    told: list[tuple[list[str], int, bytes]] = [([], 0, b"")]
    if rank:
        dist.broadcast_object_list(told, source, group=group)
        addresses, port, token = told[0]
        tie = _dial(names, rank, addresses, port)
        tie.sendall(framed(RankHello(rank, token)))
        return rank, names, {0: _held(tie)}
    others = [host.split()[0] for host in hosts if host != hosts[0]]
    with socket.create_server(("0.0.0.0" if others else "127.0.0.1", 0)) as server:
        token = secrets.token_bytes(32)
        addresses = ["127.0.0.1"] if not others else _addresses(others[0], is_master=source == 0)
        told[0] = (addresses, server.getsockname()[1], token)
        dist.broadcast_object_list(told, source, group=group)
        return rank, names, _accept(names, server, token)


@contextlib.contextmanager
def told_to_all(group: dist.ProcessGroup | None) -> Iterator[None]:
    """A context for the time before the ranks `meet`: an error in it is sent to the other ranks, which raise it as
    well."""
    try:
        yield
    except Exception as error:
        if group is not None:
            with contextlib.suppress(ClusterError):  # it repeats this error
                _introduced(group, text_of(error))
        raise


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


def _dial(names: Sequence[str], rank: int, addresses: Sequence[str], port: int) -> socket.socket:
    failed = []
    for address in addresses:
        try:
            return socket.create_connection((address, port), CONNECT_SECONDS / len(addresses))
        except OSError as error:
            failed.append(f"{address} port {port}: {error}")
    raise ClusterError(f"{names[rank]} does not reach {names[0]} at {'; '.join(failed)}")


def _accept(names: Sequence[str], server: socket.socket, token: bytes) -> dict[int, socket.socket]:
    ties: dict[int, socket.socket] = {}
    until = time.monotonic() + CONNECT_SECONDS
    while len(ties) < len(names) - 1:
        try:
            server.settimeout(max(0.001, until - time.monotonic()))
            tie, _ = server.accept()
        except TimeoutError:
            missing = [name for rank, name in enumerate(names) if rank and rank not in ties]
            raise ClusterError(f"{', '.join(missing)} did not connect in {CONNECT_SECONDS:g} s") from None
        tie.settimeout(HELLO_SECONDS)
        try:
            hello = receive(tie, MAX_HELLO_BYTES)
        except (OSError, msgspec.MsgspecError):
            hello = None
        is_one = isinstance(hello, RankHello) and 0 < hello.rank < len(names)
        if is_one and isinstance(hello, RankHello) and hmac.compare_digest(hello.token, token):
            ties[hello.rank] = _held(tie)
        else:
            tie.close()  # not a rank of this cluster
    return ties


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


_all_ties: weakref.WeakSet[Ties] = weakref.WeakSet()


def _let_go() -> None:
    """Close all ties in a process that was forked from this one, such as a worker of a DataLoader: otherwise they would
    outlive this process."""
    for ties in _all_ties:
        ties.let_go()


os.register_at_fork(after_in_child=_let_go)


# -- what they send


def text_of(error: BaseException | None) -> str:
    """How other ranks are told of an error; "" if there is none."""
    error = raised_by(error)
    return "" if error is None else f"{type(error).__name__}: {error}".removesuffix(": ")[:4096]


def _is_own(error: BaseException | None) -> bool:
    """Whether that error ends the training of this rank, and the others do not know of it."""
    return isinstance(error, Exception | KeyboardInterrupt) and not isinstance(error, ClusterError | StopIteration)


def framed(message: Message) -> bytes:
    """The bytes of a message. Raises ValueError if it is too large."""
    data = _encode(message)
    if len(data) > MAX_BYTES:
        raise ValueError(f"a message of {len(data)} bytes to other ranks of the cluster: at most {MAX_BYTES} pass")
    return struct.pack("!I", len(data)) + data


def receive(tie: socket.socket, at_most: int = MAX_BYTES) -> Message:
    """Receive a message. Raises OSError if the connection has ended, and MsgspecError if the data are no message."""
    arrived = bytearray()
    while True:
        for message in _taken_from(arrived, at_most):
            return message
        length = 4 if len(arrived) < 4 else 4 + int.from_bytes(arrived[:4], "big")
        more = tie.recv(length - len(arrived))
        if not more:
            raise ConnectionResetError("its connection has ended")
        arrived += more


def _taken_from(arrived: bytearray, at_most: int = MAX_BYTES) -> Iterator[Message]:
    """Take all messages from the bytes that have arrived.

    Raises:
        OSError: for a message that is too large.
        MsgspecError: if the data are no message.
    """
    while len(arrived) >= 4:
        (length,) = struct.unpack_from("!I", arrived)
        if length > at_most:
            raise OSError(f"a message of {length} bytes")
        if len(arrived) < 4 + length:
            return
        data = bytes(arrived[4 : 4 + length])
        del arrived[: 4 + length]
        yield _decode(data)
