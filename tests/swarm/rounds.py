"""Members, BEGINs and answers, made up: what the tests of the protocol's decisions are made of. No network."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.p2p.identity import Identity
from shoal.swarm.protocol.gathering import Gathering
from shoal.swarm.protocol.leading import Leading
from shoal.swarm.protocol.lifetimes import AtTip
from shoal.swarm.protocol.messages import PROTOCOL, Begin, Commit, Have, Join, Repair, Terms
from shoal.swarm.protocol.plan import ChunkSpan, divide
from shoal.swarm.protocol.rules import Rules
from shoal.swarm.protocol.statements import Signer
from shoal.swarm.protocol.tip import Ballot, Tip
from shoal.swarm.protocol.view import Member, Role

TIP = Tip.genesis("run")
TERMS = Terms({"protocol": PROTOCOL}, bytes(32))
CHUNK = 1 << 12
RULES = Rules(sizes=(8 * CHUNK,), matchmaking_time=10.0, round_timeout=60.0)


# In the order of their keys, as members are in a round.
IDENTITIES = sorted((Identity(bytes([n]) * 32) for n in range(256)), key=lambda identity: identity.peer_id)


def key(number: int) -> bytes:
    """The key of the how-many-eth peer."""
    return IDENTITIES[number].peer_id.key


def signer(number: int, run_id: str = "run") -> Signer:
    """What the how-many-eth peer signs with."""
    return Signer(IDENTITIES[number], run_id)


def keys(*numbers: int) -> tuple[bytes, ...]:
    return tuple(map(key, numbers))


def member(number: int, role: Role = Role.NODE, bandwidth: float = 1.0) -> Member:
    addresses = () if role is Role.CLIENT else (f"/ip4/10.0.0.{number}/tcp/4000",)
    return Member(key(number), addresses, role, bandwidth)


def members(*numbers: int) -> tuple[Member, ...]:
    return tuple(map(member, numbers))


def at_tip(last: int = 0, tip: Tip = TIP) -> AtTip:
    """What a peer knows that is at this tip; so many members contributed to the round before."""
    commit = Commit(tip, bytes(16), bytes(32), 1.0, keys(*range(last)), ()) if last else None
    return AtTip(tip, commit)


def begun(gathering: Gathering, now: float = 0.0) -> Leading:
    """The round that has begun."""
    assert gathering.begin is not None
    assert gathering.begin is not None
    return Leading.of(gathering, gathering.begin, now)


def begin_of(
    group: Sequence[Member],
    *,
    chunks: int = 8,
    attempt: int = 1,
    coordinator: int = 1,
    tip: Tip = TIP,
    weights: Sequence[float] | None = None,
) -> Begin:
    """A BEGIN as a coordinator makes it."""
    begin = Begin(
        tip=tip,
        ballot=Ballot(attempt, key(coordinator)),
        members=tuple(group),
        weights=tuple(weights) if weights is not None else tuple(float(m.contributes) for m in group),
        machines=("",) * len(group),
        states=(b"",) * len(group),
        averages=(b"",) * len(group),
        chunk_elements=CHUNK,
        starts=divide(chunks, group),
        with_state=False,
        timeout=60.0,
    )
    return signer(coordinator).sign(begin)


def chunks_of(begin: Begin) -> list[ChunkSpan]:
    return [ChunkSpan(0, n * CHUNK, (n + 1) * CHUNK) for n in range(begin.starts[-1])]


def join_of(sender: Member, *, tip: Tip = TIP, weight: float = 1.0, attempt: int = 0, patience: float = 5.0) -> Join:
    return Join(tip, sender, TERMS, weight, "", b"", attempt, patience, b"")


def have_of(
    ballot: Ballot,
    digests: Sequence[bytes] = (b"",) * 8,
    *,
    done: Ballot | None = None,
    out: Sequence[bytes] = (),
    repair: Repair | None = None,
) -> Have:
    """An answer to a survey."""
    return Have(ballot, tuple(digests), done, tuple(out), repair, None)


def digest(letter: str) -> bytes:
    """A chunk's digest, made up."""
    return letter.encode() * 32
