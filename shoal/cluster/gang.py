"""The ties between the ranks of a cluster: a connection of each to rank 0, over which they report and hear verdicts,
and which ends when a rank dies.

Collectives of `torch.distributed` do not serve for that. Their errors name an address at most, and only ranks that are
in a collective hear of a loss: rank 0, in a round with other peers, would not.
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

log = logging.getLogger(__name__)

CONNECT_SECONDS = 60.0  # for all ranks to come
HELLO_SECONDS = 5.0  # for one that has come to say who it is
LOSS_SECONDS = 3.0  # after a collective has failed, for the loss of a rank to be seen
SILENT_SECONDS = 6  # of a machine, after which the kernel ends its connections; a process that stands still is there
MAX_BYTES = 1 << 24  # of a message
MAX_HELLO_BYTES = 256

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


class ClusterError(RuntimeError):
    """This cluster cannot go on: a rank is lost, has left, or has raised an error. It says which."""


Said = Report | Verdict | Go | Do | Done


class Gang:
    """This rank's part in the ties of its cluster. Made by all ranks at once.

    Args:
        group: the process group; None for a process that is alone.

    Attributes:
        rank, size: of this process, and of the group.
        names: of all ranks, for people.
        left_in_order: whether this rank has left, and neither an error nor a loss was why.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.rank, self.size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        found = [("this process", "", "")] if group is None else _introduced(group)
        self.names = [name for name, _, _ in found]
        self._changed = threading.Condition()
        self._inbox: dict[int, deque[Said]] = {rank: deque() for rank in range(self.size)}
        self._unsaid = b""  # what goes with the next message
        self._news: list[Future[None]] = []  # of those who wait for whatever comes next
        self._left: set[int] = set()
        self._lost: Lost | None = None
        self._closed = self.left_in_order = False
        self._owed: set[int] = set()  # at rank 0: who has reported, and has no verdict; else rank 0, if this one waits
        self._sending = threading.Lock()  # a loss is told from the thread that sees it
        self._on_lost: Callable[[], object] = lambda: None
        self._sockets = {} if group is None else self._meet(group, [host for _, host, _ in found])
        self._wake, self._woken = socket.socketpair()
        threading.Thread(target=self._listen, name="shoal-cluster", daemon=True).start()
        atexit.register(self._at_exit)
        _gangs.add(self)

    # -- how they meet

    def _meet(self, group: dist.ProcessGroup, hosts: list[str]) -> dict[int, socket.socket]:
        """The connections of this rank: to all others at rank 0, else to rank 0.

        Raises:
            ClusterError: if they cannot be made.
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
                tie.close()  # a stranger
        return ties

    # -- what they tell each other

    def say(self, message: Said, *, at_once: bool = True) -> None:
        """Tell rank 0, or all others as rank 0. Raises ClusterError.

        Args:
            at_once: if not, it goes with the next message: each wakes those who hear it.
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
        """Within, collectives that fail because a rank is lost raise ClusterError."""
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
        """The report of each other rank, in their order. Raises ClusterError."""
        heard = [self._hear(rank) for rank in sorted(self._sockets)]
        return [message for message in heard if isinstance(message, Report)]

    def hear_answers(self) -> list[Done]:
        """The answer of each other rank to the oldest `Do` that they have not answered. Raises ClusterError."""
        heard = [self._hear(rank) for rank in sorted(self._sockets)]
        return [message for message in heard if isinstance(message, Done)]

    def wait_for_answers(self, count: int, over: Future[None]) -> bool:
        """Wait until each other rank has answered so often, at most until `over` is done. Returns whether they have.
        Raises ClusterError."""

        def are_here() -> bool:
            return all(len(self._inbox[rank]) >= count for rank in self._sockets)

        over.add_done_callback(lambda _: self._tell_change())
        with self._changed:
            self._changed.wait_for(lambda: are_here() or over.done() or self._lost is not None or self._closed)
        self.check()
        return are_here()

    def _tell_change(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def news(self) -> Future[None]:
        """A future that is done when there is a message that was not heard, or a rank is lost."""
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
        """What rank 0 has done, or what all are to do in the call. Raises ClusterError."""
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
        """Raises ClusterError if a rank is lost."""
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
        """Call that, in a thread of its own, when a rank is lost; at once, if one is."""
        with self._changed:
            self._on_lost = do
            is_late = self._lost is not None
        if is_late:
            self._call_on_lost()

    def _call_on_lost(self) -> None:
        threading.Thread(target=self._on_lost, name="shoal-cluster-lost", daemon=True).start()

    def _wait_for_why(self, error: BaseException | None) -> None:
        """If that is what torch raises where a rank is lost, wait for the news which it is: the log has it then. Who
        ended at once would be taken for the lost one itself."""
        if isinstance(error, RuntimeError):
            with self._changed:
                self._changed.wait_for(lambda: self._lost is not None or self._closed, LOSS_SECONDS)

    def let_go(self) -> None:
        """Close the connections without a word, and know no others: this process is a fork."""
        for each in (self._wake, self._woken, *self._sockets.values()):
            each.close()
        self._closed = True
        atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        error = getattr(sys, "last_value", None)  # what has ended this process
        if error is None or _is_own(error):
            self.leave(error)
        else:
            self._wait_for_why(error)

    def leave(self, error: BaseException | None = None) -> None:
        """Tell the others that this rank waits for nobody any more; if an error has ended its training, which."""
        error = sys.exc_info()[1] if error is None else error
        self._wait_for_why(error)
        with self._changed:
            if self._closed:
                return
            self._closed, self.left_in_order = True, error is None and self._lost is None
            is_why = _is_own(error) and self._lost is None
            goodbye = Bye(f"{type(error).__name__}: {error}".removesuffix(": ")[:4096] if is_why else "")
            self._changed.notify_all()
        self._tell_news()
        atexit.unregister(self._at_exit)
        lost = self._lost if self.rank == 0 else None
        for rank, tie in self._sockets.items():
            try:
                with self._sending:
                    if lost is not None and rank != lost.rank:  # `_lose` may not have come so far
                        _send(tie, lost)
                    _send(tie, goodbye)
            except OSError as error:
                log.debug("a rank is gone already: %s", error)
        self._wake.shutdown(socket.SHUT_RDWR)  # also where a process that was forked from this one has it, too
        self._wake.close()

    # -- who is lost

    def _listen(self) -> None:
        """In a thread of its own, until this rank leaves."""
        with selectors.DefaultSelector() as selector:
            for rank, tie in self._sockets.items():
                selector.register(tie, selectors.EVENT_READ, rank)
            selector.register(self._woken, selectors.EVENT_READ)
            leaves = False
            while not leaves:
                for key, _ in selector.select():
                    if key.data is None:  # `leave` has said goodbye to all; before that no connection may be closed
                        leaves = True
                    elif not self._read(key.data, self._sockets[key.data]):
                        selector.unregister(key.fileobj)
        for each in (self._woken, *self._sockets.values()):
            each.close()

    def _read(self, rank: int, tie: socket.socket) -> bool:
        """Take the next message of a rank. Returns whether more may come."""
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
                self._changed.notify_all()
            if message.error:
                self._lose(rank, f"it has raised {message.error}")
            elif is_owed:
                self._lose(rank, "it has ended in the middle of a call")
        elif not isinstance(message, Hello):
            with self._changed:
                if isinstance(message, Report):
                    self._owed.add(rank)
                self._inbox[rank].append(message)
                self._changed.notify_all()
            self._tell_news()
        return True

    def _lose(self, rank: int, reason: str) -> None:
        with self._changed:
            if self._lost is not None or self._closed:
                return
            self._lost = Lost(rank, reason)
            self._changed.notify_all()
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
    """Whether the training of this rank ends by that, and the others do not know."""
    return isinstance(error, Exception | KeyboardInterrupt) and not isinstance(error, ClusterError | StopIteration)


Introduction = tuple[str, str, str]  # a rank's name, its host, and why it has not made its optimizer


def _introduced(group: dist.ProcessGroup, error: str = "") -> list[Introduction]:
    """All ranks say who they are. Raises ClusterError if one of them has an error."""
    rank, host = dist.get_rank(group), f"{socket.gethostname()} {_boot()}"
    name = f"rank {rank} (process {os.getpid()} on {socket.gethostname()})"
    found: list[Introduction] = [("", "", "")] * dist.get_world_size(group)
    dist.all_gather_object(found, (name, host, error), group=group)
    for theirs, _, failed in found:
        if failed:
            raise ClusterError(f"{theirs} has raised {failed}")
    return found


def _boot() -> str:
    """Tells machines apart whose names are alike."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@contextlib.contextmanager
def told_to_all(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Within, before a `Gang` is made, an error is told to the other ranks, where it is raised, too."""
    try:
        yield
    except Exception as error:
        if group is not None:
            with contextlib.suppress(ClusterError):  # which is this very error
                _introduced(group, f"{type(error).__name__}: {error}"[:4096])
        raise


_gangs: weakref.WeakSet[Gang] = weakref.WeakSet()


def _let_go() -> None:
    """In a process that was forked from this one, such as a worker of a DataLoader: the ties end with this one."""
    for gang in _gangs:
        gang.let_go()


os.register_at_fork(after_in_child=_let_go)


def _addresses(other: str, *, is_master: bool) -> list[str]:
    """Where ranks on other hosts, of which `other` is one, may reach this host."""
    found = [os.environ["MASTER_ADDR"]] if is_master and "MASTER_ADDR" in os.environ else []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))  # sends nothing: the kernel chooses the address
        found.append(probe.getsockname()[0])
    return list(dict.fromkeys([*found, socket.gethostname()]))


def _held(tie: socket.socket) -> socket.socket:
    """That socket, with the kernel watching whether the other machine is there."""
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
    """Raises OSError where the connection has ended, and MsgspecError for what is no message."""
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
