"""The gate of a closed run: which peers one node admits, and how it answers all others (*strangers*).

Each node of a closed run has one gate, for the run and all runs within it (`<run id>/grad`, …). Peers show each other
their memberships before anything else (`Show`), and pass on the newest words of the owner, which are revocations and
pins (`News`). Services ask the gate before they decode a message. An open run has no gate.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypeVar

import msgspec
from blake3 import blake3

from shoal.dht.records import get_dht_time
from shoal.membership.holder import Holder, when
from shoal.membership.membership import MEMBERSHIP, Membership, Part
from shoal.membership.pin import PIN, Pin
from shoal.membership.revocations import REVOCATIONS, Revocations
from shoal.membership.run import ClosedRun
from shoal.membership.signed import StatementKind
from shoal.p2p.errors import P2PError, Refused, Unanswered
from shoal.p2p.identity import PeerID
from shoal.p2p.node import Answer, Node, Service

log = logging.getLogger(__name__)

T = TypeVar("T")
Said = TypeVar("Said", Revocations, Pin)

REFUSAL = "members only"
MAX_REFUSALS = 3  # replies to one stranger in all, less than 1 kB with their envelopes
AGAIN_SECONDS = 1.0  # the gate checks a membership from a stranger at most once in this time
MAX_STRANGERS = 4096
MAX_ADMITTED = 4096
MAX_WORTHLESS = 16384
LOOK_SECONDS = 2.0  # how often the gate looks for expired memberships
RETRY_SECONDS = 60.0  # the longest time between two attempts to renew a membership
SHOW_TIMEOUT = 5.0

Document = Annotated[str, msgspec.Meta(max_length=MEMBERSHIP.max_text)]
LongDocument = Annotated[str, msgspec.Meta(max_length=REVOCATIONS.max_text)]
Known = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


class Show(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """The sender's membership, and the numbers of the revocations and of the pin that the sender has (0: none)."""

    membership: Document
    revocations: Known
    pin: Known


class News(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """The owner's newest words, or "" for none."""

    revocations: LongDocument
    pin: Document


class NotAdmitted(P2PError):
    """The peer has no membership of the run that is valid now."""


@dataclass(frozen=True, slots=True)
class _Admitted:
    """A member.

    Attributes:
        membership: the checked membership; it was valid when it arrived.
        text: its text form.
        parts: all parts that it permits.
    """

    membership: Membership
    text: str
    parts: frozenset[Part]


@dataclass(slots=True)
class _Stranger:
    """A peer without a membership that has sent a request.

    Attributes:
        refusals: how many refusals it was sent.
        look_at: a membership that it shows before this time is not checked, on the loop's clock.
    """

    refusals: int = 0
    look_at: float = float("-inf")


class Gate:
    """Who is admitted to a closed run, as one node knows it. Its methods are called on the node's loop.

    Args:
        node: the node of this peer.
        run: the closed run.
        holder: holds this peer's membership.
        clock: returns the seconds since 1970.

    Attributes:
        run, holder: as given.
        revocations, pin: the newest ones of the owner that are known here; any thread may read them.
        texts: the text forms of revocations and pin.
        words_read_at: when a service last looked for them in the DHT, on the gate's clock.
    """

    def __init__(self, node: Node, run: ClosedRun, holder: Holder, clock: Callable[[], float] = get_dht_time) -> None:
        self.run, self._node, self.holder, self._clock = run, node, holder, clock
        self.revocations: Revocations | None = None
        self.pin: Pin | None = None
        self.texts = ["", ""]
        self.words_read_at = float("-inf")
        self._service = Service(f"admission/{run.run_id}", Show | News, admit=self._admit_to_show)
        self._admitted: dict[bytes, _Admitted] = {}
        self._strangers: dict[bytes, _Stranger] = {}
        self._worthless: dict[bytes, None] = {}  # hashes of texts that are no memberships
        self._shown: set[bytes] = set()  # the connected peers that have this peer's membership
        self._showing: dict[bytes, asyncio.Task[None]] = {}
        self._removed: list[Callable[[bytes], None]] = []
        self._pinned: list[Callable[[], None]] = []
        self._users = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._stop_listening: Callable[[], None] = lambda: None
        self._warned: set[str] = set()

    # -- life

    def enter(self, removed: Callable[[bytes], None], pinned: Callable[[], None]) -> Callable[[], None]:
        """Register a service of the run, which begins. Returns a function to call when the service ends.

        Args:
            removed: called with the key of each peer whose membership has ended.
            pinned: called when the owner has pinned a state.
        """
        self._users += 1
        self._removed.append(removed)
        self._pinned.append(pinned)
        if self._users == 1:
            self._node.serve(self._service, self._handle)
            self._stop_listening = self._node.on_lost(lambda peer, reason: self._shown.discard(peer.key))
            # Two tasks, since a user's function may never return, and then only the renewal must wait for it.
            self._tasks = [self._node.spawn(self._keep_valid()), self._node.spawn(self._keep_renewed())]

        def leave() -> None:
            if removed not in self._removed:
                return
            self._removed.remove(removed)
            self._pinned.remove(pinned)
            self._users -= 1
            if self._users == 0:
                self._node.stop_serving(self._service)
                self._stop_listening()
                self._shown.clear()
                for task in self._tasks:
                    task.cancel()

        return leave

    @property
    def in_use(self) -> bool:
        """Whether a service of the run is registered."""
        return self._users > 0

    # -- who is admitted

    def admits(self, key: bytes) -> bool:
        """Whether that peer is a member of the run now."""
        held = self._admitted.get(key)
        return key == self._node.peer_id.key or (held is not None and held.membership.is_valid(self._clock()))

    def admit(self, peer: PeerID) -> None:
        """Raise Refused if that peer is no member of the run. The error says the same whatever the peer asks."""
        if not self.admits(peer.key):
            self._refuse(peer)

    def require(self, peer: PeerID, *parts: Part) -> None:
        """Raise Refused if the peer's membership permits none of these parts."""
        held = self._admitted.get(peer.key)
        if peer != self._node.peer_id and (held is None or held.parts.isdisjoint(parts)):
            raise Refused(f"the membership of this peer does not permit to {' or '.join(p.value for p in parts)}")

    def learn(self, text: str, key: bytes, *parts: Part) -> bool:
        """A peer, or a record that it has signed, shows a membership.

        Args:
            text: the membership.
            key: the key of the peer.
            parts: the peer needs one of these parts; without any, every membership will do.

        Returns:
            Whether the peer is a member with one of these parts.
        """
        held = self._admitted.get(key)
        if held is None or held.text != text:
            shown = self._read(text)
            if shown is not None and self._counts(shown, key):
                held = _Admitted(shown, text, frozenset(part for part in Part if shown.permits(part)))
                self._admitted.pop(key, None)
                self._admitted[key] = held
                if len(self._admitted) > MAX_ADMITTED:
                    del self._admitted[next(iter(self._admitted))]
        if held is None or not self.admits(key):
            return False
        self._strangers.pop(key, None)
        return not parts or not held.parts.isdisjoint(parts)

    def _read(self, text: str) -> Membership | None:
        """Parse a membership; None if the text is no membership of this run. Invalid texts are remembered and not
        parsed again, because anybody may fill the DHT with them."""
        digest = blake3(text.encode(errors="replace")).digest(length=16)
        if digest in self._worthless:
            return None
        try:
            return MEMBERSHIP.read(text, self.run)
        except ValueError as error:
            log.debug("%s", error)
        self._worthless[digest] = None
        if len(self._worthless) > MAX_WORTHLESS:
            del self._worthless[next(iter(self._worthless))]
        return None

    def _counts(self, membership: Membership, key: bytes) -> bool:
        """Whether this is a valid membership of that peer, and its newest one."""
        held = self._admitted.get(key)
        is_newest = held is None or membership.serial >= held.membership.serial
        is_void = self.revocations is not None and self.revocations.voids(membership)
        return membership.peer == key and membership.is_valid(self._clock()) and is_newest and not is_void

    # -- strangers

    def _refuse(self, peer: PeerID) -> None:
        stranger = self._strangers.setdefault(peer.key, _Stranger())
        if len(self._strangers) > MAX_STRANGERS:
            del self._strangers[next(iter(self._strangers))]
        stranger.refusals += 1
        raise (Refused if stranger.refusals <= MAX_REFUSALS else Unanswered)(REFUSAL)

    def _admit_to_show(self, peer: PeerID) -> None:
        """Anybody may show a membership. A stranger that has shown invalid ones is answered only now and then."""
        stranger = self._strangers.get(peer.key)
        if stranger is None or self.admits(peer.key):
            return
        now = asyncio.get_running_loop().time()
        if stranger.refusals >= MAX_REFUSALS and now < stranger.look_at:
            raise Unanswered(REFUSAL)
        stranger.look_at = now + AGAIN_SECONDS

    # -- what peers show each other

    def _handle(self, peer: PeerID, message: Any, _buffers: object) -> Answer:
        match message:
            case Show():
                if not self.learn(message.membership, peer.key):
                    self._refuse(peer)
                self._tell_news(peer, message)
                self._shown.add(peer.key)
                return self._show()
            case News():
                self.admit(peer)
                self.hear(message.revocations, message.pin)
        return None

    def _show(self) -> Show:
        numbers = [0 if said is None else said.number for said in (self.revocations, self.pin)]
        return Show(self.holder.text, *numbers)

    def _tell_news(self, peer: PeerID, shown: Show) -> None:
        mine = self._show()
        if mine.revocations > shown.revocations or mine.pin > shown.pin:
            self._node.notify([peer], self._service, News(*self.texts))

    def ready(self, keys: Iterable[bytes]) -> list[bytes]:
        """The members among these peers, to which a message may be sent now. If one has not seen this peer's membership
        on this connection, this call sends it first."""
        me, admitted = self._node.peer_id.key, [key for key in keys if self.admits(key)]
        for key in admitted:
            if key not in self._shown and key != me and self._node.is_connected(PeerID(key)):
                self._node.notify([PeerID(key)], self._service, self._show())
                self._shown.add(key)
        return admitted

    async def introduce(self, peer: PeerID, timeout: float = SHOW_TIMEOUT) -> None:
        """Exchange memberships with that peer, unless that was done. Connects to the peer if needed.

        Raises:
            P2PError: if the peer can't be reached.
            TimeoutError: if it does not answer in time.
            NotAdmitted: if it has no valid membership.
            Refused: if it does not admit this peer.
        """
        if peer == self._node.peer_id or (peer.key in self._shown and self.admits(peer.key)):
            return
        task = self._showing.get(peer.key)
        if task is None:
            task = self._showing[peer.key] = self._node.spawn(self._introduce(peer, timeout))
            task.add_done_callback(lambda _: self._showing.pop(peer.key, None))
        await asyncio.wait([task])  # unlike `await task`, this does not cancel the task for other callers
        if task.cancelled():
            raise NotAdmitted("this node was closed")
        task.result()

    def refused(self, peer: PeerID) -> None:
        """That peer says that it has not seen this peer's membership, so show it again before the next message."""
        self._shown.discard(peer.key)

    async def _introduce(self, peer: PeerID, timeout: float) -> None:
        try:
            shown = await self._node.call(peer, self._service, self._show(), Show, timeout=timeout)
        except Refused as error:
            if str(error) == REFUSAL:
                text = f"{peer!r} does not take this peer's membership of {self.run.run_id}: it was revoked"
                advice = f"or that peer's clock differs; {self.holder.advice}"
                self._warn(f"refused by {peer}", f"{text}, {advice}")
            raise
        if not self.learn(shown.membership, peer.key):
            raise NotAdmitted(f"{peer!r} shows no membership of {self.run.run_id} that is valid now")
        self._shown.add(peer.key)
        self._tell_news(peer, shown)

    # -- what the owner says

    def hear(self, revocations: str, pin: str) -> None:
        """Another peer passes on the owner's revocations and pin; "" for none. Newer ones take effect, and are passed
        on to all connected members."""
        is_new = self._hear_revocations(revocations) | self._hear_pin(pin)
        if is_new:
            connected = [PeerID(key) for key in self._admitted if self._node.is_connected(PeerID(key))]
            self._node.notify(connected, self._service, News(*self.texts))

    def _newer(self, kind: StatementKind[Said], text: str, known: Said | None, what: str) -> Said | None:
        """What the owner says in that text, if it is newer than what is `known` here; else None."""
        if text in ("", *self.texts):
            return None
        try:
            said = kind.read(text, self.run)
        except ValueError as error:
            log.debug("%s is not followed: %s", what, error)
            return None
        return said if known is None or said.number > known.number else None

    def _hear_revocations(self, text: str) -> bool:
        if (said := self._newer(REVOCATIONS, text, self.revocations, "a list of revocations")) is None:
            return False
        self.revocations, self.texts[0] = said, text
        void = [key for key, held in self._admitted.items() if said.voids(held.membership)]
        log.info("the owner of %s has revoked the memberships of %d peers", self.run.run_id, len(said.revoked))
        for key in void:
            self._remove(key, "its membership was revoked")
        if said.voids(self.holder.membership):
            text = f"the owner of {self.run.run_id} has revoked this peer's membership: no member talks to it any more"
            self._warn(f"revoked {self.holder.membership.serial}", f"{text}; {self.holder.advice}")
        return True

    def _hear_pin(self, text: str) -> bool:
        if (said := self._newer(PIN, text, self.pin, "a pin")) is None:
            return False
        self.pin, self.texts[1] = said, text
        log.info("the owner of %s has pinned the state %s (pin %d)", self.run.run_id, said.tip, said.number)
        for pinned in list(self._pinned):
            pinned()
        return True

    def believes(self, pin: int) -> bool:
        """Whether a tip with that pin can exist: this peer knows a pin of the owner with that number or a higher
        one."""
        return pin <= (0 if self.pin is None else self.pin.number)

    def _remove(self, key: bytes, reason: str) -> None:
        self._admitted.pop(key, None)
        self._shown.discard(key)
        for removed in list(self._removed):
            removed(key)
        peer = PeerID(key)
        if self._node.is_connected(peer):
            log.info("%r is put out of %s: %s", peer, self.run.run_id, reason)
            self._node.disconnect(peer, reason)

    # -- time

    async def _keep_valid(self) -> None:
        """Remove members whose memberships expire."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = self._clock()
            for key in [key for key, held in self._admitted.items() if not held.membership.is_valid(now)]:
                self._remove(key, "its membership has expired")
            mine = self.holder.membership
            if not mine.is_valid(now):
                text = f"this peer's membership of {self.run.run_id} has expired ({when(mine.expires)})"
                self._warn(f"ended {mine.serial}", f"{text}, and no member talks to it any more: {self.holder.advice}")

    async def _keep_renewed(self) -> None:
        """Renew this peer's own membership before it expires."""
        holder, retry, ask_at = self.holder, 1.0, self.holder.renew_at
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = self._clock()
            if holder is not self.holder:  # see `admit_to`
                holder, retry, ask_at = self.holder, 1.0, self.holder.renew_at
            mine, ends = self.holder.membership, when(self.holder.membership.expires)
            if now >= ask_at and holder.renewable:
                try:
                    renewed = holder.take(*await _in_a_thread(partial(holder.fetch, now)), now)
                except Exception as error:  # noqa: BLE001 - a user's function may raise whatever it likes
                    log.warning(
                        "the membership of %s, which expires %s, could not be renewed, and is asked for again in "
                        "%.0f s: %s", self.run.run_id, ends, retry, error,
                    )  # fmt: skip
                    ask_at, retry = now + retry, min(2 * retry, RETRY_SECONDS)
                else:
                    ask_at, retry = max(self.holder.renew_at, now + RETRY_SECONDS / 12), 1.0
                    if renewed:
                        log.info("the membership of %s was renewed until %s", self.run.run_id,
                                 when(self.holder.membership.expires))  # fmt: skip
                        connected = [PeerID(key) for key in self._shown]
                        self._node.notify(connected, self._service, self._show())
            elif now >= ask_at:
                self._warn(
                    f"ends {mine.serial}",
                    f"this peer's membership of {self.run.run_id} expires {ends}: {self.holder.advice}, and give the "
                    "new one as membership= of a new optimizer; with a file or a function it is renewed by itself",
                )

    def _warn(self, about: str, text: str) -> None:
        """Log a warning, once for each `about`."""
        if about not in self._warned:
            self._warned.add(about)
            log.warning("%s", text)


async def _in_a_thread(function: Callable[[], T]) -> T:
    """Call a function in a thread, and return its result. (With `asyncio.to_thread`, the process would wait for the
    function when it exits, and a user's function may never return.)"""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def tell(set_it: Callable[[Any], None], what: object) -> None:
        if not future.done():
            set_it(what)

    def work() -> None:
        told: tuple[Callable[[Any], None], object]
        try:
            told = future.set_result, function()
        except Exception as error:  # noqa: BLE001 - a user's function may raise whatever it likes
            told = future.set_exception, error
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(tell, *told)

    threading.Thread(target=work, name="shoal-membership", daemon=True).start()
    return await future
