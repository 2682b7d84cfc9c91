"""Who is in the run, as one peer knows it, and who coordinates."""

from __future__ import annotations

from collections.abc import Iterable

from blake3 import blake3

from shoal.swarm.protocol.member import MAX_MEMBERS, Member, Role


class Membership:
    """The members that a peer knows, itself included; its knowledge may differ from that of others.

    Knowledge only grows by `learn` and shrinks by `lose` and `fix`; a member that was lost is not learned again from
    hearsay, only when it speaks itself (`returned`).

    Args:
        run_id: names the run; part of the order of candidates.
        me: this peer.
    """

    def __init__(self, run_id: str, me: Member) -> None:
        self.run_id = run_id
        self.me = me
        self.members: dict[bytes, Member] = {me.key: me}
        self.lost: dict[bytes, None] = {}  # in the order of losing
        self.behind: dict[bytes, None] = {}  # members at a state that ours outranks: they download, and do not lead

    def learn(self, members: Iterable[Member]) -> list[Member]:
        """Add members that somebody told of; returns the ones that are new."""
        new = []
        for member in members:
            if member.key not in self.members and member.key not in self.lost and len(self.members) < MAX_MEMBERS:
                self.members[member.key] = member
                new.append(member)
        return new

    def returned(self, member: Member) -> bool:
        """The member itself spoke to us; returns whether it is news."""
        self.lost.pop(member.key, None)
        news = self.members.get(member.key) != member
        if news and member.key != self.me.key and (member.key in self.members or len(self.members) < MAX_MEMBERS):
            self.members[member.key] = member
        return news

    def told(self, key: bytes, behind: bool) -> bool:
        """A member said at which state it is; returns whether that makes it a candidate, or ends its being one."""
        known = key in self.behind
        if behind and key in self.members:
            self.behind[key] = None
        else:
            self.behind.pop(key, None)
        return known != (key in self.behind)

    def lose(self, key: bytes) -> bool:
        """The connection to that member ended or can't be made; returns whether it was a member."""
        if key == self.me.key:
            return False
        self.behind.pop(key, None)
        self.lost[key] = None
        if len(self.lost) > MAX_MEMBERS:
            del self.lost[next(iter(self.lost))]
        return self.members.pop(key, None) is not None

    def fix(self, view: Iterable[Member]) -> list[Member]:
        """A commit says who the members are; returns those that are new to us. Members that we know to be lost stay
        out, and members that the view does not have but that we still know stay in: the next coordinator sees them
        too."""
        return self.learn(view)

    def candidates(self, epoch: int) -> list[Member]:
        """Who may coordinate in this epoch, best first: an order that all peers compute alike, and that rotates.

        Candidates are the members that others can dial and that are at our state, as far as we know; a peer that knows
        no others has itself.
        """
        able = [m for m in self.members.values() if m.role is not Role.CLIENT and m.key not in self.behind] or [self.me]
        prefix = f"{self.run_id}\0{epoch}\0".encode()
        return sorted(able, key=lambda member: blake3(prefix + member.key).digest())

    def others(self) -> list[bytes]:
        """The keys of all members but this peer."""
        return [key for key in self.members if key != self.me.key]

    def fingerprint(self) -> bytes:
        """A hash (16 bytes) of who the members are: equal for peers that know the same ones."""
        return blake3(b"".join(sorted(self.members))).digest(length=16)

    def snapshot(self) -> tuple[Member, ...]:
        """All members, ordered by key."""
        return tuple(self.members[key] for key in sorted(self.members))
