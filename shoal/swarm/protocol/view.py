"""Who is in the run, as one peer knows it: the members, the state that each of them holds, and who may coordinate."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Annotated

import msgspec
from blake3 import blake3

from shoal.p2p.identity import PeerID
from shoal.p2p.multiaddr import MAX_LENGTH, Multiaddr
from shoal.swarm.protocol.tip import Digest, Tip

MAX_ADDRESSES = 8
MAX_MEMBERS = 1024
Address = Annotated[str, msgspec.Meta(max_length=MAX_LENGTH)]


class Role(Enum):
    """What a peer does in a round."""

    NODE = "node"  # contributes, reduces, receives
    CLIENT = "client"  # contributes and receives; nobody can dial it, so it reduces and coordinates nothing
    AUXILIARY = "auxiliary"  # only reduces: lends bandwidth


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A peer of a run: who, where, and what it can do.

    Attributes:
        key: the bytes of its peer id.
        addresses: where it listens; none for a client.
        role: see `Role`.
        bandwidth: how much it can carry, in any unit that is the same in the whole run; spans are sized by it. None:
            not known, and taken for the mean of those that are.
    """

    key: Digest
    addresses: Annotated[tuple[Address, ...], msgspec.Meta(max_length=MAX_ADDRESSES)]
    role: Role
    bandwidth: Annotated[float, msgspec.Meta(ge=0, le=1e18)] | None = None

    @property
    def peer(self) -> PeerID:
        return PeerID(self.key)

    @property
    def reduces(self) -> bool:
        return self.role is not Role.CLIENT and self.bandwidth != 0

    @property
    def contributes(self) -> bool:
        return self.role is not Role.AUXILIARY

    def multiaddrs(self) -> list[Multiaddr]:
        """The addresses, parsed; those that are none are left out (they are what another peer claims of itself)."""
        parsed = []
        for text in self.addresses:
            with contextlib.suppress(ValueError):
                parsed.append(Multiaddr(text))
        return parsed


FIRST_PAUSE, LONGEST_PAUSE = 5.0, 60.0  # seconds for which a state that no member could send is not asked for again


@dataclass(slots=True)
class _Claim:
    """The state that a member says it holds.

    Attributes:
        tip: the name of the state.
        behind: whether this peer's state outranks it: then the member downloads, and does not coordinate.
        ignored_until: before this time the state is not asked for, because no member could send it.
        pause: seconds for which it is ignored the next time.
    """

    tip: Tip
    behind: bool = False
    ignored_until: float = float("-inf")
    pause: float = FIRST_PAUSE


class View:
    """The members that a peer knows, itself included. Other peers may know others.

    Members are added by `learn` and removed by `lose`. A member that was lost is not added again because a third
    peer mentions it, only when it speaks itself (`returned`).

    Args:
        run_id: the name of the run; part of the order of candidates.
        me: this peer.
        reaches: whether a message to the peer with that key can be sent now; true of this peer itself.
    """

    def __init__(self, run_id: str, me: Member, reaches: Callable[[bytes], bool]) -> None:
        self.run_id, self.me, self.reaches = run_id, me, reaches
        self.members: dict[bytes, Member] = {me.key: me}
        self.lost: dict[bytes, None] = {}  # in the order of losing
        self._claims: dict[bytes, _Claim] = {}

    def learn(self, members: Iterable[Member]) -> list[Member]:
        """Add members that another peer mentions. Returns those that were not known."""
        unknown = {m.key: m for m in members if m.key not in self.members and m.key not in self.lost}
        new = list(unknown.values())[: max(0, MAX_MEMBERS - len(self.members))]
        self.members.update((member.key, member) for member in new)
        return new

    def returned(self, member: Member) -> bool:
        """The member itself has spoken. Returns whether that changes what is known."""
        self.lost.pop(member.key, None)
        news = self.members.get(member.key) != member
        if news and member.key != self.me.key and (member.key in self.members or len(self.members) < MAX_MEMBERS):
            self.members[member.key] = member
        return news

    def lose(self, key: bytes) -> bool:
        """The connection to the member ended, or cannot be made. Returns whether it was a member."""
        if key == self.me.key:
            return False
        self._claims.pop(key, None)
        self.lost[key] = None
        if len(self.lost) > MAX_MEMBERS:
            del self.lost[next(iter(self.lost))]
        return self.members.pop(key, None) is not None

    def connected(self) -> list[Member]:
        """The members that a message can reach now, this peer included."""
        return [member for member in list(self.members.values()) if self.reaches(member.key)]

    def others(self) -> list[bytes]:
        """The keys of all members but this peer."""
        return [key for key in self.members if key != self.me.key]

    def fingerprint(self) -> bytes:
        """A hash (16 bytes) of the set of members: equal for peers that know the same ones."""
        return blake3(b"".join(sorted(self.members))).digest(length=16)

    def snapshot(self) -> tuple[Member, ...]:
        """All members, ordered by key."""
        return tuple(self.members[key] for key in sorted(self.members))

    def num_clients(self) -> int:
        """The number of clients that train with this peer, itself included if it is one.

        Clients of other nodes are known from those nodes only, so they count if such nodes are connected."""
        reached = self.connected()
        nodes = any(m.role is not Role.CLIENT and m.key != self.me.key for m in reached)
        return sum(m.role is Role.CLIENT for m in (list(self.members.values()) if nodes else reached))

    # -- who coordinates

    def told(self, key: bytes, tip: Tip, behind: bool) -> bool:
        """A member has said that it holds the state `tip`, which may be `behind` this peer's. Returns whether that
        makes it a candidate, or ends its being one."""
        if key not in self.members:
            return False
        claim = self._claims.setdefault(key, _Claim(tip))
        was_behind, claim.tip, claim.behind = claim.behind, tip, behind
        return was_behind != behind

    def candidates(self, epoch: int) -> list[Member]:
        """The members that may coordinate in this epoch, best first: an order that rotates, and that all peers compute
        alike.

        A candidate can be dialled by others and is, as far as this peer knows, at its state. If there is none, this
        peer is the only candidate.
        """
        behind = {key for key, claim in self._claims.items() if claim.behind}
        able = [m for m in self.members.values() if m.role is not Role.CLIENT and m.key not in behind] or [self.me]
        prefix = f"{self.run_id}\0{epoch}\0".encode()
        return sorted(able, key=lambda member: blake3(prefix + member.key).digest())

    # -- which states there are

    def advanced(self, keys: Iterable[bytes], before: Tip, after: Tip) -> None:
        """These members were in the round that leads from `before` to `after`."""
        for claim in (self._claims[key] for key in keys if key in self._claims):
            claim.behind = False
            claim.tip = after if claim.tip == before else claim.tip

    def best(self, now: float) -> Tip | None:
        """The best state that a connected member holds, without the states that are ignored. May be called in any
        thread."""
        best: Tip | None = None
        for key, claim in list(self._claims.items()):
            member = self.members.get(key)
            holds = member is not None and member.role is not Role.AUXILIARY and self.reaches(key)
            if holds and claim.ignored_until <= now and (best is None or claim.tip.outranks(best)):
                best = claim.tip
        return best

    def ignore(self, better_than: Tip, now: float) -> list[float]:
        """No member could send a state that outranks `better_than`: do not ask for these states for a while. Returns
        the times at which they may be asked for again."""
        times = []
        for claim in self._claims.values():
            if claim.tip.outranks(better_than) and claim.ignored_until <= now:
                claim.ignored_until = now + claim.pause
                claim.pause = min(2 * claim.pause, LONGEST_PAUSE)
                times.append(claim.ignored_until)
        return times
