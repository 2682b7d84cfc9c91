"""All messages of the protocol that attackers make by hand: what has to be adapted when messages change."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from shoal.p2p.identity import Identity
from shoal.p2p.node import Reply
from shoal.swarm.protocol import messages as msg
from shoal.swarm.protocol.book import root_of
from shoal.swarm.protocol.plan import chunk_elements, chunk_table
from shoal.swarm.protocol.statements import S, Signer
from shoal.swarm.protocol.tip import Ballot, Tip
from shoal.swarm.protocol.view import Member, Role

SERVICE = "averaging/{run_id}"
STATE_SERVICE = "state/{run_id}"
HUGE = 1e300
_signers: list[Signer] = []  # of this process


def sign_with(signer: Signer) -> None:
    """From here on this process signs what it makes up, in its own name."""
    _signers[:] = [signer]


def signed(message: S) -> S:
    return _signers[0].sign(message) if _signers else message


def ghost(role: Role = Role.CLIENT) -> Member:
    """A peer that does not exist; one that listens is said to do so where nobody answers."""
    return Member(Identity().peer_id.key, () if role is Role.CLIENT else ("/ip4/127.0.0.1/tcp/1",), role)


def other_terms(terms: msg.Terms) -> msg.Terms:
    return msg.Terms({**terms.options, "optimizer": "Another"}, terms.schema)


def better_tip(tip: Tip, epochs: int = 1) -> Tip:
    """A state that outranks all others, and that nobody has."""
    return Tip(tip.epoch + epochs, os.urandom(32), HUGE)


def hello(sender: Member, terms: msg.Terms, tip: Tip, members: Iterable[Member] = ()) -> msg.Hello:
    return msg.Hello(sender, terms, tip, tuple({member.key: member for member in (*members, sender)}.values()))


def begin(tip: Tip, number: int, me: Member, members: Sequence[Member], starts: Sequence[int]) -> msg.Begin:
    """A BEGIN, which need not make sense."""
    count = len(members)
    ballot = Ballot(number, me.key)
    lists = (tuple(1.0 for _ in members), ("",) * count, (b"",) * count, (b"",) * count)
    return signed(msg.Begin(tip, ballot, tuple(members), *lists, 4096, tuple(starts), False, 10.0))


def senseless_begins(tip: Tip, me: Member, others: Sequence[Member]) -> list[msg.Begin]:
    """BEGINs that can be decoded, and must not be opened."""
    every = sorted([me, *others], key=lambda member: member.key)
    good = begin(tip, 7, me, every, [0] * len(every) + [1])
    made = [
        begin(tip, 7, me, [], []),
        begin(tip, 7, me, [], [0]),
        replace(good, weights=()),
        replace(good, starts=(0, 5, 3, 2, 1, 4)),
        replace(good, starts=(0,) * len(every) + (msg.MAX_CHUNKS,), chunk_elements=1),
        replace(good, members=tuple(reversed(every))),
        replace(good, machines=("",)),
    ]
    return [signed(one) for one in made]


def commit(
    tip: Tip, round_id: bytes, root: bytes, members: Iterable[bytes], view: Iterable[Member] = (), samples: float = 1.0
) -> msg.Commit:
    keys = tuple(members)  # the first is this peer
    return signed(msg.Commit(tip, round_id, root, samples, keys, tuple(view), keys[0]))


def committed(of: msg.Begin, digests: Sequence[bytes]) -> msg.Committed:
    return msg.Committed(of, tuple(digests))


def digests_of(count: int) -> tuple[list[bytes], bytes]:
    """So many digests of nothing, and their root."""
    digests = [os.urandom(32) for _ in range(count)]
    return digests, root_of(digests)


def elsewhere(coordinator: Member, tip: Tip | None = None, me: Member | None = None) -> msg.Elsewhere:
    """With a tip, also with all the evidence that one peer can make up: a BEGIN of its own."""
    if tip is None or me is None:
        return msg.Elsewhere(coordinator)
    every = sorted((me, coordinator), key=lambda member: member.key)
    return msg.Elsewhere(me, begin(tip, 7, me, every, [0, 1, 1]))


def call(tip: Tip) -> msg.Call:
    return msg.Call(tip)


def survey(of: msg.Begin, number: int, me: bytes) -> msg.Survey:
    return signed(msg.Survey(of.tip, of.round, Ballot(number, me), (), None))


def orphaned(of: msg.Begin) -> msg.Orphaned:
    return msg.Orphaned(of)


def progress(
    tip: Tip, samples: float = 0.0, rate: float = 0.0, step: float = 0.0, seconds: float = 0.0
) -> msg.Progress:
    return msg.Progress(tip, samples, rate, step, seconds)


def never_called(count: msg.Count) -> msg.Count:
    return replace(count, called=False, wait=0.0)


def with_attempt(join: msg.Join, attempt: int) -> msg.Join:
    return replace(join, attempt=attempt)


def with_weight(part: msg.Part, weight: float) -> msg.Part:
    return replace(part, weight=weight)


def whole_begin(
    tip: Tip, me: Member, members: Iterable[Member], sizes: Sequence[int], largest: int, options: bytes
) -> msg.Begin:
    """A BEGIN that makes sense, of a round in which this peer reduces all of the vector."""
    every = sorted(members, key=lambda member: member.key)
    elements = chunk_elements(sum(sizes), 1, largest)
    chunks, mine = len(chunk_table(sizes, elements)), [member.key for member in every].index(me.key)
    made = begin(tip, 7, me, every, [0] * (mine + 1) + [chunks] * (len(every) - mine))
    return signed(replace(made, chunk_elements=elements, options=options))


def result(of: msg.Begin, chunk: int, data: bytes) -> Reply:
    name = msg.name_of(of.round, msg.Carries.FETCHED, chunk)
    return Reply(msg.Result(of.round, chunk, of.round), [data], name)


def round_names() -> list[bytes]:
    """Names of rounds, for who has not heard of any."""
    return [os.urandom(16) for _ in range(8)]
