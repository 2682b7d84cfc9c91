"""Which members of its run a peer reaches, when it dials the others, and what it warns of. No I/O; time is given."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from shoal.p2p.identity import PeerID
from shoal.p2p.redial import Redial
from shoal.swarm.protocol.view import MAX_MEMBERS, Member, Role

PATIENCE = 10.0  # seconds until a peer warns that it can't reach a member, or knows no member
QUIET = 60.0  # seconds between two such warnings
MAX_NAMED = 8  # members that one warning names; it only counts the others


@dataclass(frozen=True, slots=True)
class Reachability:
    """A change of the set of members that this peer reaches.

    Attributes:
        num_peers: the number of members of the run that this peer is connected to, itself included.
        unreached: the members that it knows and does not reach. Empty when all members in the last warning are reached
            again or have left.
        advice: what is wrong, and what to do about it; "" when all is well again.
    """

    num_peers: int
    unreached: tuple[PeerID, ...]
    advice: str


@dataclass(slots=True)
class _Missing:
    """A member that this peer knows and does not reach.

    Attributes:
        member: the last known description of the member.
        since: when it went missing.
        was_reached: whether this peer has reached it before, and lost it.
        seen: when another peer first showed that the member is alive, since it went missing; infinity if none did.
        reason: why the last attempt to reach it failed.
        told: whether a warning has named it.
    """

    member: Member
    since: float
    was_reached: bool
    seen: float = math.inf
    reason: str = ""
    told: bool = False


class Reaching:
    """Records which members of a run one peer reaches, and which are missing.

    The peer dials missing nodes and auxiliaries (`Redial`), whether or not they are still listed. It never dials
    clients, since they listen nowhere, nor members that have left, until they are listed anew. After 10 s without
    success there is one warning, which names all missing members. A member that was reached and then lost is named only
    in two cases: 10 s after the first sign that it is alive, or 10 s after this peer has lost all members. A client
    does not miss other clients as long as it reaches a node. A peer with other terms is dialled, but no warning names
    it.

    All times are in seconds of the caller's clock.

    Args:
        run_id: the name of the run, for warnings.
        me: this peer.
        rng: draws the jitter between dials.
    """

    def __init__(self, run_id: str, me: Member, rng: random.Random) -> None:
        self._run_id, self._me = run_id, me
        self._redial = Redial(rng)
        self._began = math.inf
        self._reached: dict[bytes, Member] = {}
        self._missing: dict[bytes, _Missing] = {}  # in the order in which they went missing
        self._left: dict[bytes, None] = {}
        self._refused: dict[bytes, None] = {}  # peers with other terms, so no members
        self._hurry_until = self._quiet_until = -math.inf
        self._quiet_alone_until = -math.inf  # the same for warnings of the loss of all members
        self._alone_since = -math.inf  # when this peer lost the last member that it reached
        self._knew_somebody = self._told_alone = False
        self._worried = False  # whether a warning still holds

    # -- what happens

    def begin(self, now: float) -> None:
        """This peer has joined the run."""
        self._began = now

    def known(self, members: Iterable[Member], now: float, *, listed: bool) -> None:
        """These members are in the run, according to the directory (`listed`) or to another member."""
        for member in members:
            if member.key == self._me.key or member.key in self._reached:
                continue
            self._knew_somebody = True
            missing = self._missing.get(member.key)
            if missing is None:
                if listed or member.key not in self._left:
                    self._left.pop(member.key, None)
                    self._miss(member, now, was_reached=False)
            elif listed or now - missing.since >= PATIENCE:  # others may notice a loss so much later
                if missing.seen == math.inf or (listed and missing.member != member):
                    self._redial.hurry(member.peer, now)
                missing.seen = min(missing.seen, now)
                missing.member = member if listed else missing.member

    def told(self) -> list[PeerID]:
        """The missing members that a warning has named."""
        return [missing.member.peer for missing in self._missing.values() if missing.told]

    def misses(self, key: bytes) -> bool:
        """Whether this peer knows that member and does not reach it."""
        return key in self._missing

    def reached(self, member: Member) -> bool:
        """The member has sent a message. Returns whether that is news."""
        if member.key == self._me.key or self._reached.get(member.key) == member:
            return False  # (a coordinator joins its own round, so the member may be this peer itself)
        self._knew_somebody = True
        self._missing.pop(member.key, None)
        self._left.pop(member.key, None)
        self._redial.found(member.peer)
        self._reached[member.key] = member
        return True

    def refused(self, member: Member) -> None:
        """The peer has said that it has other terms. To reach it would not help."""
        self.reached(member)
        self._refused[member.key] = None
        if len(self._refused) > MAX_MEMBERS:
            del self._refused[next(iter(self._refused))]

    def accepted(self, key: bytes) -> None:
        """That peer has the terms of the run."""
        self._refused.pop(key, None)

    def forget(self, keys: Iterable[bytes], but: Collection[bytes]) -> None:
        """Forget members that others mentioned and that never gave a sign of life, except those in `but`."""
        for key in keys:
            missing = self._missing.get(key)
            if missing is not None and not missing.was_reached and key not in but:
                del self._missing[key]
                self._redial.found(missing.member.peer)

    def failed(self, key: bytes, reason: str) -> None:
        """An attempt to reach that member has failed."""
        if key in self._missing:
            self._missing[key].reason = reason

    def lost(self, key: bytes, now: float) -> bool:
        """This peer does not reach that member any more. Returns whether it did until now."""
        member = self._reach_no_more(key, now)
        if member is not None:
            self._miss(member, now, was_reached=True)
        return member is not None

    def left(self, key: bytes, now: float) -> None:
        """That member says that it leaves the run."""
        self._reach_no_more(key, now)
        self._missing.pop(key, None)
        self._redial.found(PeerID(key))
        self._left[key] = None
        if len(self._left) > MAX_MEMBERS:
            del self._left[next(iter(self._left))]

    def hurry(self, now: float) -> None:
        """Dial all missing members now, and those that are lost in the next seconds at once. This peer was away, so
        they may well be there."""
        self._hurry_until = now + PATIENCE
        for missing in self._missing.values():
            self._redial.hurry(missing.member.peer, now)

    def _reach_no_more(self, key: bytes, now: float) -> Member | None:
        member = self._reached.pop(key, None)
        if member is not None and not self._reached:
            self._alone_since = now
            # A recent warning of another kind does not delay the warning that all members are lost; one of this kind
            # does.
            if now >= self._quiet_alone_until:
                self._quiet_until = now + PATIENCE  # so that one warning names all missing members
        return member

    def _miss(self, member: Member, now: float, *, was_reached: bool) -> None:
        if len(self._missing) >= MAX_MEMBERS:
            longest = self._missing.pop(next(iter(self._missing)))
            self._redial.found(longest.member.peer)
        self._missing[member.key] = _Missing(member, now, was_reached)
        if member.role is not Role.CLIENT:
            self._redial.missing(member.peer, now, at_once=not was_reached or now < self._hurry_until)

    # -- what to do

    def due(self, now: float) -> list[Member]:
        """The members to dial now."""
        return [self._missing[peer.key].member for peer in self._redial.due(now)]

    def notice(self, now: float, count_others: Callable[[], int]) -> Reachability | None:
        """The report to make now, if there is one. `count_others` returns how many other nodes the DHT has."""
        counting = [missing for missing in self._missing.values() if self._counts_from(missing) <= now]
        new = [missing for missing in counting if not missing.told]
        if new and now >= self._quiet_until:
            self._quiet_until, self._worried = now + QUIET, True
            if not self._reached and self._alone_since > -math.inf:
                self._quiet_alone_until = self._quiet_until
            for missing in new:
                missing.told = True
            return self._reachability(counting, self._advice(new))
        is_alone = not (self._knew_somebody or self._told_alone) and now - self._began >= PATIENCE
        if is_alone and (others := count_others()):
            self._told_alone = self._worried = True
            return self._reachability([], self._advice_alone(others))
        still = any(missing.told for missing in counting) or (self._told_alone and not self._reached)
        if self._worried and not still:
            self._worried = False
            for missing in self._missing.values():
                missing.told = False
            return self._reachability(counting, "")
        return None

    def next_time(self, now: float) -> float | None:
        """When to call `due` and `notice` again if nothing happens before; None if never."""
        times = [max(self._counts_from(m), self._quiet_until) for m in self._missing.values() if not m.told]
        if (dial_at := self._redial.next_time()) is not None:
            times.append(dial_at)
        if not self._knew_somebody and now < self._began + PATIENCE:
            times.append(self._began + PATIENCE)
        return min((time for time in times if time < math.inf), default=None)

    def _counts_from(self, missing: _Missing) -> float:
        """From when on the loss of that member is reported: never as long as it may be dead, or this peer does not need
        it."""
        if missing.member.key in self._refused:
            return math.inf
        if missing.member.role is Role.CLIENT and self._me.role is Role.CLIENT:
            meets_it_at_a_node = any(member.role is not Role.CLIENT for member in self._reached.values())
            return math.inf if meets_it_at_a_node else max(missing.since, self._alone_since) + PATIENCE
        if not missing.was_reached or (missing.told and missing.seen < math.inf):
            return missing.since + PATIENCE  # once a warning has named it, it counts until it is reached
        since_alone = math.inf if self._reached else max(missing.since, self._alone_since)
        return min(since_alone, missing.seen) + PATIENCE

    # -- in words

    def _reachability(self, counting: list[_Missing], advice: str) -> Reachability:
        return Reachability(1 + len(self._reached), tuple(missing.member.peer for missing in counting), advice)

    def _advice(self, new: list[_Missing]) -> str:
        new = sorted(new, key=lambda missing: missing.member.role is Role.CLIENT)  # nodes first: users can repair them
        named = "; ".join(map(_named, new[:MAX_NAMED]))
        more = f"; and {len(new) - MAX_NAMED} more" if len(new) > MAX_NAMED else ""
        others, members = len(self._reached), "member" if len(new) == 1 else "members"
        with_whom = f"trains with {others} {'other' if others == 1 else 'others'} only" if others else "trains alone"
        return (
            f"{len(new)} known {members} of the run {self._run_id!r} can't be reached, and this peer {with_whom}: "
            f"{named}{more}. {' '.join(dict.fromkeys(map(self._way_out, new)))}"
        )

    def _way_out(self, missing: _Missing) -> str:
        member, addresses = missing.member, missing.member.multiaddrs()
        if member.role is Role.CLIENT and self._me.role is Role.CLIENT:
            return (
                f"This peer, {self._me.peer}, is a client, too. Clients can't reach each other: the run needs a node, "
                "or a relay. Start `shoal node --relay` on any machine that both reach, and give the address that it "
                "prints to both: DHT(initial_peers=[...]), without client_mode=True. Or open a port of one of them."
            )
        if member.role is Role.CLIENT:
            where = _where(self._me)
            way_out = f"Open the port of this peer's addresses ({where}), so that the client can reach it, or"
            return f"{way_out} name in announce_maddrs the address at which it can be reached."
        if addresses and all(address.relay is not None for address in addresses):
            return (
                "Start the relay again through which it is reached, or another one: `shoal node --relay` on any "
                "machine that all reach, with its address in initial_peers of all. It is dialled again every 5 to 60 s."
            )
        if addresses and all(address.is_loopback for address in addresses):
            way_out = "Start a peer that listens on loopback with DHT(host_maddrs=['/ip4/0.0.0.0/tcp/<port>']), or"
        else:
            way_out = "Open the peer's port in its firewall and router, correct its announce_maddrs, or start it"
        return f"{way_out} with client_mode=True. It is dialled again every 5 to 60 s."

    def _advice_alone(self, others: int) -> str:
        alone = f"this peer is alone in the run {self._run_id!r}, while the DHT has {others} other"
        return f"{alone} {'node' if others == 1 else 'nodes'}: peers that train together have the same run_id"


def _where(member: Member) -> str:
    kinds = (("" if address.relay is None else "the relay ", address) for address in member.multiaddrs())
    return ", ".join(f"{kind}{str(address).partition('/p2p/')[0]}" for kind, address in kinds) or "none"


def _named(missing: _Missing) -> str:
    member = missing.member
    if member.role is Role.CLIENT:
        return f"{member.peer}, a client"
    reason = missing.reason or ("its connection was lost" if missing.was_reached else "it has not answered yet")
    return f"{member.peer} at {_where(member)} ({reason})"
