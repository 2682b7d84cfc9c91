"""What one peer knows of its run: the members, the state that each of them holds, and which of them may coordinate."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Annotated

import msgspec
from blake3 import blake3
from msgspec.structs import replace

from shoal.p2p.identity import PeerID
from shoal.p2p.multiaddr import MAX_LENGTH, Multiaddr
from shoal.swarm.protocol.tip import Digest, Tip

MAX_ADDRESSES = 8
MAX_MEMBERS = 1024
CIRCUIT = "/p2p-circuit/"  # part of an address through a relay
Address = Annotated[str, msgspec.Meta(max_length=MAX_LENGTH)]


class Role(Enum):
    """What a peer does in a round.

    Attributes:
        NODE: contributes its tensors, reduces, and receives the average; may coordinate.
        CLIENT: contributes and receives. Nobody can dial it, so it neither reduces nor coordinates.
        AUXILIARY: lends its bandwidth: it reduces, and may coordinate, but neither contributes nor receives.
    """

    NODE = "node"
    CLIENT = "client"
    AUXILIARY = "auxiliary"


class Reach(Enum):
    """How the other members reach a peer, as it says itself. A peer that lies gets work that it can't do in time, and
    is doubted or put out for that."""

    DIRECT = "direct"  # all members over direct connections
    RELAYED = "relayed"  # some members only through a relay, which all their bytes pass


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A peer of a run: its key, its addresses, and what it can do.

    Attributes:
        key: the bytes of its peer id.
        addresses: the addresses at which it listens; none for a client.
        role: see `Role`.
        bandwidth: its bandwidth as its user gives it, in any unit that is the same in the whole run. Members with more
            bandwidth reduce more. None: not given, and counts as the mean of the given ones. If no member of a round
            gives one, the measured rates count (`Rates`).
        reach: see `Reach`.
    """

    key: Digest
    addresses: Annotated[tuple[Address, ...], msgspec.Meta(max_length=MAX_ADDRESSES)]
    role: Role
    bandwidth: Annotated[float, msgspec.Meta(ge=0, le=1e18)] | None = None
    reach: Reach = Reach.DIRECT

    @property
    def peer(self) -> PeerID:
        return PeerID(self.key)

    @property
    def reduces(self) -> bool:
        return self.role is not Role.CLIENT and self.bandwidth != 0

    @property
    def contributes(self) -> bool:
        return self.role is not Role.AUXILIARY

    @property
    def is_relayed(self) -> bool:
        return self.reach is Reach.RELAYED

    @property
    def listens_at_relays(self) -> bool:
        """Whether all of its addresses are circuits through relays."""
        return bool(self.addresses) and all(CIRCUIT in text for text in self.addresses)

    def at(self, addresses: Iterable[Multiaddr]) -> Member:
        """This peer with these addresses. If all of them are circuits, it is relayed, until its connections show that
        it is not."""
        moved = replace(self, addresses=tuple(map(str, addresses))[:MAX_ADDRESSES])
        return replace(moved, reach=Reach.RELAYED if moved.listens_at_relays else Reach.DIRECT)

    def multiaddrs(self) -> list[Multiaddr]:
        """The parsed addresses. Invalid ones, which another peer may have sent, are left out."""
        parsed = []
        for text in self.addresses:
            with contextlib.suppress(ValueError):
                parsed.append(Multiaddr(text))
        return parsed


MAX_HEARSAY = 256  # members that one peer mentions and that have not sent a message themselves
HEARSAY_SECONDS = 60.0
# A state that no member could send is not asked for again for so many seconds, or for twice the time of the attempt.
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 60.0
# A run that has no room for a newcomer (see `Loading`) keeps it from epochs of its own for so many seconds at most, in
# tries that follow each other within the second time. Liars may claim to be the run.
LONGEST_WAIT, NEXT_TRY = 1200.0, 120.0


@dataclass(slots=True)
class _Heard:
    """A member that others mention, and that has not sent a message itself.

    Attributes:
        member: the description of the member.
        teller: the peer that has mentioned it.
        until: when it is forgotten.
        listed: whether this peer has seen its signed record.
    """

    member: Member
    teller: bytes
    until: float
    listed: bool = False


@dataclass(slots=True)
class _Claim:
    """The state that a member says it holds.

    Attributes:
        tip: the name of the state.
        said: the tip in its last message about it; `tip` may follow from a COMMIT.
        behind: whether this peer's state outranks it. Then the member will download, and is no candidate.
        ignored_until: before this time this peer does not ask for the state, because no member could send it.
        pause: for how many seconds the state is ignored the next time.
    """

    tip: Tip
    said: Tip | None = None
    behind: bool = False
    ignored_until: float = float("-inf")
    pause: float = FIRST_PAUSE

    def is_ahead_in_vain(self, tip: Tip) -> bool:
        """Whether the member says that it holds a state that outranks `tip`, and no member could send that one."""
        return self.ignored_until > float("-inf") and self.tip.outranks(tip)


class View:
    """The members that a peer knows, itself included. Other peers may know other members.

    A peer is a member from its first message (`returned`) until it is lost (`lose`). Peers that only others mention
    (`hear`) are kept apart: this peer dials them, but they count for nothing else.

    Args:
        run_id: the name of the run; the order of candidates depends on it.
        me: this peer.
        reaches: returns whether a message can be sent to the peer with that key now; true for this peer itself.
    """

    def __init__(self, run_id: str, me: Member, reaches: Callable[[bytes], bool]) -> None:
        self.run_id, self.me, self.reaches = run_id, me, reaches
        self.members: dict[bytes, Member] = {me.key: me}
        self.lost: dict[bytes, None] = {}  # in the order of the losses
        self._waits_since = self._waits_until = -math.inf
        self._claims: dict[bytes, _Claim] = {}
        self._heard: dict[bytes, _Heard] = {}

    def say(self, me: Member) -> None:
        """Change the description of this peer."""
        self.me = self.members[me.key] = me

    def learn(self, members: Iterable[Member]) -> list[Member]:
        """Add members that the caller names. Returns those that were not known."""
        unknown = {m.key: m for m in members if m.key not in self.members and m.key not in self.lost}
        new = list(unknown.values())[: max(0, MAX_MEMBERS - len(self.members))]
        self.members.update((member.key, member) for member in new)
        return new

    def hear(self, teller: bytes, members: Iterable[Member], now: float) -> list[Member]:
        """Another peer mentions members. Returns those that were not known; this peer should meet them."""
        told = {m.key: m for m in members if m.key not in self.members and m.key not in self.lost}
        room = MAX_HEARSAY - sum(heard.teller == teller for heard in self._heard.values())
        new: list[Member] = []
        for key, member in told.items():
            if (heard := self._heard.get(key)) is not None:
                heard.until = max(heard.until, now + HEARSAY_SECONDS)
            elif len(new) < room:
                self._heard[key] = _Heard(member, teller, now + HEARSAY_SECONDS)
                new.append(member)
        return new

    def is_known(self, key: bytes) -> bool:
        """Whether that peer is a member, or others mention it."""
        return key in self.members or key in self._heard

    def has_met(self, key: bytes) -> bool:
        """Whether that peer is a member, or was one until it was lost. Others may still reach it."""
        return key in self.members or key in self.lost

    def listed(self, members: Iterable[Member], now: float) -> None:
        """This peer has seen the signed records of these members."""
        for heard in (self._heard[member.key] for member in members if member.key in self._heard):
            heard.until, heard.listed = now + HEARSAY_SECONDS, True

    def forget(self, now: float) -> list[bytes]:
        """Forget members that others have mentioned and that gave no sign of life. Returns their keys."""
        over = [key for key, heard in self._heard.items() if heard.until <= now]
        for key in over:
            del self._heard[key]
        return over

    def returned(self, member: Member) -> bool:
        """The member itself has sent a message. Returns whether that changes what is known of it."""
        self.lost.pop(member.key, None)
        self._heard.pop(member.key, None)
        news = self.members.get(member.key) != member
        if news and member.key != self.me.key and (member.key in self.members or len(self.members) < MAX_MEMBERS):
            self.members[member.key] = member
        return news

    def lose(self, key: bytes) -> bool:
        """The connection to the member ended, or cannot be made. Returns whether it was a member."""
        if key == self.me.key:
            return False
        claim = self._claims.pop(key, None)
        if claim is not None and claim.ignored_until > float("-inf"):
            claim.behind = False
            self._claims[key] = claim  # a member that leaves and comes back is ignored for as long as before
        self.lost[key] = None
        if len(self.lost) > MAX_MEMBERS:
            longest = next(iter(self.lost))
            del self.lost[longest]
            self._claims.pop(longest, None)
        return self.members.pop(key, None) is not None

    def connected(self) -> list[Member]:
        """The members to which a message can be sent now, this peer included."""
        return [member for member in list(self.members.values()) if self.reaches(member.key)]

    def others(self) -> list[bytes]:
        """The keys of all members except this peer."""
        return [key for key in self.members if key != self.me.key]

    def fingerprint(self) -> bytes:
        """A hash (16 bytes) of the set of members; equal for peers that know the same members."""
        return blake3(b"".join(sorted(self.members))).digest(length=16)

    def snapshot(self) -> tuple[Member, ...]:
        """All members, ordered by key."""
        return tuple(self.members[key] for key in sorted(self.members))

    def num_clients(self) -> int:
        """The number of clients that train with this peer, itself included if it is a client.

        This peer knows the clients of other nodes only from those nodes, so they count if such a node is connected."""
        reached = self.connected()
        nodes = any(m.role is not Role.CLIENT and m.key != self.me.key for m in reached)
        others = [heard.member for heard in list(self._heard.values()) if heard.listed]
        return sum(m.role is Role.CLIENT for m in ([*list(self.members.values()), *others] if nodes else reached))

    # -- who coordinates

    def goes_back(self, key: bytes, tip: Tip) -> bool:
        """Whether a member that says that it holds the state `tip` has said before that it holds a better one."""
        claim = self._claims.get(key)
        return claim is not None and claim.said is not None and claim.said.outranks(tip)

    def said(self, key: bytes) -> Tip | None:
        """The tip in a member's last message about it; None if it has said none."""
        claim = self._claims.get(key)
        return None if claim is None else claim.said

    def newest(self, key: bytes, tip: Tip, asked: Tip | None) -> Tip:
        """The tip of a member that has answered with `tip`; `asked` is what it had `said` when it was asked. An answer
        is handled a moment later than the messages that come after it. So it does not take back what they have said."""
        said = self.said(key)
        return said if said not in (None, asked) and said.outranks(tip) else tip

    def is_behind(self, key: bytes) -> bool:
        """Whether this peer's state outranks the one that the member says it holds."""
        claim = self._claims.get(key)
        return claim is not None and claim.behind

    def misses(self, tip: Tip, keys: Iterable[bytes]) -> bool:
        """Whether a member that keeps a state was at that tip, and is not among the members of its round, `keys`."""
        at_it = {key for key, claim in self._claims.items() if claim.tip == tip}
        return any(map(self.keeps_state, at_it.difference(keys)))

    def told(self, key: bytes, tip: Tip, behind: bool) -> bool:
        """A member has said that it holds the state `tip`, which may be `behind` this peer's state. Returns whether the
        member becomes a candidate by that, or stops being one."""
        if key not in self.members:
            return False
        claim = self._claims.setdefault(key, _Claim(tip))
        if tip.pin > claim.tip.pin:
            claim.ignored_until = float("-inf")  # the owner wants all peers to follow that state
        was_behind, claim.tip, claim.said, claim.behind = claim.behind, tip, tip, behind
        return was_behind != behind

    def loads(self, key: bytes, tip: Tip) -> bool:
        """A member has said that it loads the state at which this peer is. Unless it is there already, it is behind.
        Returns whether the member stops being a candidate by that."""
        claim = self._claims.get(key)
        if claim is None or claim.behind or claim.said == tip:
            return False
        claim.behind = True
        return True

    def candidates(self, tip: Tip) -> list[Member]:
        """The members that may coordinate at this tip, best first. The order changes with each epoch, and all peers
        compute the same one.

        A candidate can be dialled by others and is, as far as this peer knows, at this peer's state. If there is none,
        this peer is the only candidate. Relayed members come last: they coordinate only if no other member can.
        """
        elsewhere = {key for key, claim in self._claims.items() if claim.behind or claim.is_ahead_in_vain(tip)}
        able = [m for m in self.members.values() if m.role is not Role.CLIENT and m.key not in elsewhere] or [self.me]
        prefix = f"{self.run_id}\0{tip.epoch}\0".encode()
        return sorted(able, key=lambda member: (member.reach is Reach.RELAYED, blake3(prefix + member.key).digest()))

    # -- which states there are

    def advanced(self, keys: Iterable[bytes], before: Tip, after: Tip) -> None:
        """These members were in the round that leads from `before` to `after`."""
        for claim in (self._claims[key] for key in keys if key in self._claims):
            claim.behind = False
            claim.tip = after if claim.tip == before else claim.tip

    def keeps_state(self, key: bytes) -> bool:
        """Whether that peer is a member that can hold a state. An auxiliary peer holds none; its tip only follows those
        of others."""
        member = self.members.get(key)
        return member is not None and member.role is not Role.AUXILIARY

    def best(self, now: float) -> Tip | None:
        """The best state that a connected member holds, without the states that are ignored; None while this peer waits
        (`wait`). May be called from any thread."""
        best: Tip | None = None
        if now < self._waits_until:
            return None
        for key, claim in list(self._claims.items()):
            holds = self.keeps_state(key) and self.reaches(key) and claim.ignored_until <= now
            if holds and (best is None or claim.tip.outranks(best)):
                best = claim.tip
        return best

    def ignores(self, key: bytes, now: float) -> bool:
        """Whether this peer ignores the state that the member claims to hold, at present."""
        claim = self._claims.get(key)
        return claim is not None and now < claim.ignored_until

    def rests(self, tip: Tip, now: float) -> bool:
        """Whether a peer whose state is `tip` should make no epoch for now. It should not if the states that outrank
        its own are all ignored, because no member could send one, and at least as many connected members say that they
        hold one of them as are at `tip`, this peer included. Otherwise those members lie, or are cut off from this
        peer's side. Nor should a peer that waits (`wait`). May be called from any thread."""
        here, ahead = 1, 0
        for key, claim in list(self._claims.items()):
            if not (self.keeps_state(key) and self.reaches(key)):
                continue
            if claim.tip.outranks(tip):
                if now < self._waits_until:
                    return True
                if claim.ignored_until <= now:
                    return False  # this peer asks for that state
                ahead += 1
            elif claim.tip == tip:
                here += 1
        return ahead >= here

    def wait(self, now: float, seconds: float) -> float:
        """Members send their state, and the run has no room for this peer before so many `seconds` are over: until then
        this peer does not ask for it, and `rests`. Returns until when; not later than LONGEST_WAIT after the first of
        such waits."""
        if now > self._waits_until + NEXT_TRY:
            self._waits_since = now
        self._waits_until = min(now + seconds, self._waits_since + LONGEST_WAIT)
        return self._waits_until

    def has_room(self, now: float) -> bool:
        """The run waits for newcomers, so this peer need not `wait` any longer. Returns whether it did."""
        waits, self._waits_until = now < self._waits_until, min(now, self._waits_until)
        return waits

    def ignore(self, better_than: Tip, now: float, cost: float = 0.0) -> list[float]:
        """Ignore all states that outrank `better_than` for a while, because no member could send one.

        The time doubles with each call, up to LONGEST_PAUSE or twice `cost`, whichever is longer.

        Args:
            better_than: the tip of this peer.
            now: the time.
            cost: how many seconds this peer has waited in vain.

        Returns:
            The times at which the states may be asked for again.
        """
        times = []
        for key, claim in self._claims.items():
            if key in self.members and claim.tip.outranks(better_than) and claim.ignored_until <= now:
                claim.ignored_until = now + claim.pause
                claim.pause = min(2 * claim.pause, max(LONGEST_PAUSE, 2 * cost))
                times.append(claim.ignored_until)
        return times
