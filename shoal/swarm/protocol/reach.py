"""Which members of its run a peer reaches, whom it dials when, and what it says about those that it can't reach. No
I/O; time is given."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from shoal.p2p.identity import PeerID
from shoal.p2p.redial import Redial
from shoal.swarm.protocol.view import MAX_MEMBERS, Member, Role

PATIENCE = 10.0  # seconds until it is said that somebody is not reached, or that nobody is there
QUIET = 60.0  # seconds between two such warnings
MAX_NAMED = 8  # members in one warning; of the others it says how many they are


@dataclass(frozen=True, slots=True)
class Reachability:
    """What has changed in whom this peer reaches.

    Attributes:
        num_peers: members of the run that it is connected to, itself included.
        unreached: those that it knows and does not reach; none when all that it told of are reached or have left.
        advice: what is wrong, and what to do about it; "" when all is well again.
    """

    num_peers: int
    unreached: tuple[PeerID, ...]
    advice: str


@dataclass(slots=True)
class _Missing:
    """A member that is known and not reached.

    Attributes:
        member: as it was last heard of.
        since: when it began.
        was_reached: whether it was lost; otherwise it was never reached.
        seen: when somebody else first showed that it lives, since it is missing; infinity if nobody did.
        reason: why it could not be reached, when that was last tried.
        told: whether that was said.
    """

    member: Member
    since: float
    was_reached: bool
    seen: float = math.inf
    reason: str = ""
    told: bool = False


class Reaching:
    """Keeps account of the members of a run, as one peer knows them.

    Nodes and auxiliaries that are missing are dialled (`Redial`), whether or not they are still listed anywhere;
    clients never, since they listen nowhere; nor a member that has left, until it is listed anew. After 10 s without
    success there is one warning, which names all members that are missing. A member that was reached and then lost is
    named only if it is known to live, 10 s after the first sign of that, or if this peer has lost everybody, 10 s after
    that. A client does not miss other clients as long as it reaches a node.

    Args:
        run_id: names the run, in warnings.
        me: this peer.
        rng: draws the jitter between dials.

    All times are in seconds of the caller's clock.
    """

    def __init__(self, run_id: str, me: Member, rng: random.Random) -> None:
        self._run_id, self._me = run_id, me
        self._redial = Redial(rng)
        self._began = math.inf
        self._reached: dict[bytes, Member] = {}
        self._missing: dict[bytes, _Missing] = {}  # in the order in which they went missing
        self._left: dict[bytes, None] = {}
        self._hurry_until = self._quiet_until = -math.inf
        self._quiet_alone_until = -math.inf  # the same for warnings of the loss of everybody
        self._alone_since = -math.inf  # when the last member was lost that it reached
        self._knew_somebody = self._told_alone = False
        self._worried = False  # whether something was said that is not made good yet

    # -- what happens

    def begin(self, now: float) -> None:
        """This peer is in the run."""
        self._began = now

    def known(self, members: Iterable[Member], now: float, *, listed: bool) -> None:
        """These are in the run, as the directory has it (`listed`) or as another member says."""
        for member in members:
            if member.key == self._me.key or member.key in self._reached:
                continue
            self._knew_somebody = True
            missing = self._missing.get(member.key)
            if missing is None:
                if listed or member.key not in self._left:
                    self._left.pop(member.key, None)
                    self._miss(member, now, was_reached=False)
            elif listed or now - missing.since >= PATIENCE:  # others may notice a loss that much later
                if missing.seen == math.inf or (listed and missing.member != member):
                    self._redial.hurry(member.peer, now)
                missing.seen = min(missing.seen, now)
                missing.member = member if listed else missing.member

    def told(self) -> list[PeerID]:
        """The missing members of which was said that they can't be reached."""
        return [missing.member.peer for missing in self._missing.values() if missing.told]

    def misses(self, key: bytes) -> bool:
        """Whether that member is known here and not reached."""
        return key in self._missing

    def reached(self, member: Member) -> bool:
        """The member has spoken. Returns whether that is news."""
        if member.key == self._me.key or self._reached.get(member.key) == member:
            return False  # (it is this peer itself if it coordinates and has joined its own round)
        self._knew_somebody = True
        self._missing.pop(member.key, None)
        self._left.pop(member.key, None)
        self._redial.found(member.peer)
        self._reached[member.key] = member
        return True

    def forget(self, keys: Iterable[bytes], but: Collection[bytes]) -> None:
        """Others mentioned these, and they gave no sign of themselves, but for those that are listed."""
        for key in keys:
            missing = self._missing.get(key)
            if missing is not None and not missing.was_reached and key not in but:
                del self._missing[key]
                self._redial.found(missing.member.peer)

    def failed(self, key: bytes, reason: str) -> None:
        """It was tried to reach that member, in vain."""
        if key in self._missing:
            self._missing[key].reason = reason

    def lost(self, key: bytes, now: float) -> bool:
        """That member can't be reached any more; returns whether it was reached until now."""
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
        """This peer was away: whoever is missing, or is found to be lost in the next seconds, may well be there."""
        self._hurry_until = now + PATIENCE
        for missing in self._missing.values():
            self._redial.hurry(missing.member.peer, now)

    def _reach_no_more(self, key: bytes, now: float) -> Member | None:
        member = self._reached.pop(key, None)
        if member is not None and not self._reached:
            self._alone_since = now
            # A warning of somebody else, a short time ago, does not delay the warning of this; one of the same does.
            if now >= self._quiet_alone_until:
                self._quiet_until = now + PATIENCE  # then all that are missing are named at once
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
        """Whom to dial now."""
        return [self._missing[peer.key].member for peer in self._redial.due(now)]

    def notice(self, now: float, count_others: Callable[[], int]) -> Reachability | None:
        """What is to be said now, if anything; `count_others` says how many other nodes the DHT has."""
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
        """When to look again if nothing happens until then; None if there is nothing to look after."""
        times = [max(self._counts_from(m), self._quiet_until) for m in self._missing.values() if not m.told]
        if (dial_at := self._redial.next_time()) is not None:
            times.append(dial_at)
        if not self._knew_somebody and now < self._began + PATIENCE:
            times.append(self._began + PATIENCE)
        return min((time for time in times if time < math.inf), default=None)

    def _counts_from(self, missing: _Missing) -> float:
        """From when on that member should be reached; never as long as it may be dead, and while nobody needs it."""
        if missing.member.role is Role.CLIENT and self._me.role is Role.CLIENT:
            meets_it_at_a_node = any(member.role is not Role.CLIENT for member in self._reached.values())
            return math.inf if meets_it_at_a_node else max(missing.since, self._alone_since) + PATIENCE
        if not missing.was_reached or (missing.told and missing.seen < math.inf):
            return missing.since + PATIENCE  # what was said of it holds until it is reached
        since_alone = math.inf if self._reached else max(missing.since, self._alone_since)
        return min(since_alone, missing.seen) + PATIENCE

    # -- in words

    def _reachability(self, counting: list[_Missing], advice: str) -> Reachability:
        return Reachability(1 + len(self._reached), tuple(missing.member.peer for missing in counting), advice)

    def _advice(self, new: list[_Missing]) -> str:
        new = sorted(new, key=lambda missing: missing.member.role is Role.CLIENT)  # nodes first: they can be mended
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
            way_out = (
                f"Open the port of this peer's addresses ({_where(self._me)}), so that the client can reach it, or"
            )
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
    where = (
        f"{'the relay ' if address.relay is not None else ''}{str(address).partition('/p2p/')[0]}"
        for address in member.multiaddrs()
    )
    return ", ".join(where) or "none"


def _named(missing: _Missing) -> str:
    member = missing.member
    if member.role is Role.CLIENT:
        return f"{member.peer}, a client"
    reason = missing.reason or ("its connection was lost" if missing.was_reached else "it has not answered yet")
    return f"{member.peer} at {_where(member)} ({reason})"
