"""Evaluates the answers to a coordinator's survey: finds those that cannot be true, and sources for missing chunks.
Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from shoal.swarm.protocol.book import RuleBroken, check_repair, require, root_of
from shoal.swarm.protocol.messages import Begin, Have, Source
from shoal.swarm.protocol.plan import who_reduce
from shoal.swarm.protocol.tip import Ballot
from shoal.swarm.protocol.view import Member

Pairs = Collection[frozenset[bytes]]  # of members that exchange nothing


def check_answer(begin: Begin, ballot: Ballot, member: Member, have: Have, said: bytes | None) -> None:
    """Raise RuleBroken, with the reason, if a member's answer to the survey of `ballot` cannot be true.

    Args:
        begin: the round.
        ballot: the ballot of the survey.
        member: the member that answers.
        have: its answer.
        said: the digest in the member's DONE, if the member has received no other chunks since; else None.
    """
    chunks, repair = begin.starts[-1] if member.contributes else 0, have.repair
    require(have.commit is None, "it has a commit of another round")
    require(len(have.digests) == chunks, f"it listed {len(have.digests)} chunks of {chunks}")
    require(all(len(digest) in (0, 32) for digest in have.digests), "it listed digests of another length")
    for earlier in (have.done, repair.ballot if repair is not None else None):
        # A member that answers follows no lower ballot any more, and nobody has used `ballot` before.
        if earlier is not None and not begin.ballot <= earlier < ballot:
            raise RuleBroken(f"it followed attempt {earlier.number}, which nobody made before attempt {ballot.number}")
    if repair is not None:
        check_repair(begin, repair)
    held = root_of(have.digests) if member.contributes else b""
    require(said in (None, held), "it does not hold what it said it was done with")
    require(said is None or all(have.digests), "it lacks a chunk, and has said that it was done")


@dataclass(frozen=True, slots=True)
class ChunkVotes:
    """Who holds a chunk, and whom the members have it from so far. The rules below say where it comes from; the first
    one that applies counts.

    Attributes:
        chunk: its number.
        first: its reducer by BEGIN.
        owner: whom it comes from by the last repair; `first` without one.
        was_fetched: whether the last repair had it fetched.
        digest: the version that the result has; b"" if no voter holds any.
        holders: the members that hold each version, in member order.
        cut_off: members that lack it, and are parted from its owner.
    """

    chunk: int
    first: bytes
    owner: bytes
    was_fetched: bool
    digest: bytes
    holders: dict[bytes, list[bytes]]
    cut_off: list[bytes]

    def fetched(self, live: Sequence[bytes], parted: Pairs, relayed: set[bytes]) -> Source | None:
        """A holder sends it, if the owner is gone, has sent two versions or is cut off from a member, or if members may
        have fetched it already. If possible that is a holder which all that are cut off reach, and no relayed one."""
        is_settled = self.owner in live and len(self.holders) == 1 and not self.was_fetched and not self.cut_off
        if not self.digest or is_settled:
            return None
        all_hold = self.holders[self.digest]
        reached = [h for h in all_hold if not any(frozenset((h, key)) in parted for key in self.cut_off)] or all_hold
        able = [holder for holder in reached if holder not in relayed] or reached
        return Source(self.chunk, able[self.chunk % len(able)], self.digest)

    def reassigned(self, live: Sequence[bytes], reducers: Sequence[bytes]) -> Source | None:
        """Another member reduces it, if its owner is gone."""
        return None if self.owner in live else Source(self.chunk, reducers[self.chunk % len(reducers)], b"")

    def kept(self) -> Source | None:
        """The member to which the last repair gave it goes on to reduce it."""
        return None if self.owner == self.first else Source(self.chunk, self.owner, b"")


def repaired(
    begin: Begin, live: Sequence[bytes], haves: Mapping[bytes, Have], parted: Pairs = ()
) -> tuple[tuple[Source, ...], bytes]:
    """Plan a repair: where the chunks come from that the reducers of BEGIN no longer send.

    Args:
        begin: the round.
        live: the members that are not out, in member order.
        haves: a checked answer of each of these members.
        parted: the pairs of members that exchange nothing.

    Returns:
        The sources of the chunks, and the digest of the result if it is settled, else b"". It is settled when every
        member has every chunk in some version.
    """
    here = [member for member in begin.members if member.key in live]
    reducers = [m.key for m, reduces in zip(here, who_reduce(here), strict=True) if reduces] or live
    relayed = {member.key for member in here if member.is_relayed}
    votes = _votes(begin, live, haves, parted)
    sources = (vote.fetched(live, parted, relayed) or vote.reassigned(live, reducers) or vote.kept() for vote in votes)
    settled = all(all(have.digests) for have in haves.values()) and all(vote.digest for vote in votes)
    root = root_of(vote.digest for vote in votes) if settled else b""
    return tuple(source for source in sources if source is not None), root


def _votes(begin: Begin, live: Sequence[bytes], haves: Mapping[bytes, Have], parted: Pairs) -> list[ChunkVotes]:
    firsts = [m.key for i, m in enumerate(begin.members) for _ in range(begin.starts[i], begin.starts[i + 1])]
    followed = max((have.repair for have in haves.values() if have.repair), key=lambda r: r.ballot, default=None)
    before = () if followed is None else followed.sources
    owners, fetched = {source.chunk: source.owner for source in before}, {s.chunk for s in before if s.digest}
    # Whose chunks make the result: members that were complete under the highest ballot, or all if none was complete.
    ballots = {key: have.done for key, have in haves.items() if have.done is not None and have.digests}
    highest = max(ballots.values(), default=None)
    voters, votes = [key for key, ballot in ballots.items() if ballot == highest] or live, []
    for chunk, first in enumerate(firsts):
        owner = owners.get(chunk, first)
        holders: dict[bytes, list[bytes]] = {}
        for key in live:
            if digest := _digest(haves[key], chunk):
                holders.setdefault(digest, []).append(key)
        count = Counter(digest for key in voters if (digest := _digest(haves[key], chunk)))
        # If there are two versions of a chunk, because its reducer lied, the result is the one that more members hold.
        digest = max(count, key=lambda digest: (count[digest], digest), default=b"")
        lacking = [k for k in live if len(haves[k].digests) > chunk and not _digest(haves[k], chunk)] if parted else []
        cut_off = [key for key in lacking if frozenset((key, owner)) in parted]
        votes.append(ChunkVotes(chunk, first, owner, chunk in fetched, digest, holders, cut_off))
    return votes


def _digest(have: Have, chunk: int) -> bytes:
    """The digest of `chunk` in a member's answer; b"" if the member does not have the chunk."""
    return have.digests[chunk] if chunk < len(have.digests) else b""
