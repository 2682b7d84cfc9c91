"""Evaluates the answers to a coordinator's survey: finds those that cannot be true, and sources for missing chunks.
Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from shoal.swarm.protocol.book import RuleBroken, check_repair, require, root_of
from shoal.swarm.protocol.messages import Begin, Have, Source
from shoal.swarm.protocol.plan import who_reduce
from shoal.swarm.protocol.tip import Ballot
from shoal.swarm.protocol.view import Member


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


def repaired(
    begin: Begin, live: Sequence[bytes], haves: Mapping[bytes, Have], parted: Collection[frozenset[bytes]] = ()
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
    owners = [m.key for i, m in enumerate(begin.members) for _ in range(begin.starts[i], begin.starts[i + 1])]
    original = list(owners)
    followed = max((h.repair for h in haves.values() if h.repair), key=lambda r: r.ballot, default=None)
    for source in followed.sources if followed is not None else ():
        owners[source.chunk] = source.owner
    fetched = {source.chunk for source in followed.sources if source.digest} if followed is not None else set()
    voters = _voters(live, haves)
    sources, result = [], []
    for chunk, owner in enumerate(owners):
        holders: dict[bytes, list[bytes]] = {}
        for key in live:
            if digest := _digest(haves[key], chunk):
                holders.setdefault(digest, []).append(key)
        votes = Counter(digest for key in voters if (digest := _digest(haves[key], chunk)))
        # If there are two versions of a chunk, because its reducer lied, the result is the one that more members hold.
        digest = max(votes, key=lambda digest: (votes[digest], digest), default=b"")
        result.append(digest)
        lacking = [k for k in live if len(haves[k].digests) > chunk and not _digest(haves[k], chunk)] if parted else []
        cut_off = [key for key in lacking if frozenset((key, owner)) in parted]
        if digest and (owner not in live or len(holders) > 1 or chunk in fetched or cut_off):
            reached = [h for h in holders[digest] if not any(frozenset((h, key)) in parted for key in cut_off)]
            able = reached or holders[digest]
            able = [holder for holder in able if holder not in relayed] or able
            sources.append(Source(chunk, able[chunk % len(able)], digest))
        elif owner not in live:
            sources.append(Source(chunk, reducers[chunk % len(reducers)], b""))
        elif owner != original[chunk]:
            sources.append(Source(chunk, owner, b""))
    settled = all(all(have.digests) for have in haves.values()) and all(result)
    return tuple(sources), root_of(result) if settled else b""


def _voters(live: Sequence[bytes], haves: Mapping[bytes, Have]) -> Sequence[bytes]:
    """The members whose chunks make the result: those that were complete under the highest ballot, or all members if
    none was complete."""
    ballots = {key: have.done for key, have in haves.items() if have.done is not None and have.digests}
    highest = max(ballots.values(), default=None)
    return [key for key, ballot in ballots.items() if ballot == highest] or live


def _digest(have: Have, chunk: int) -> bytes:
    """The digest of `chunk` in a member's answer; b"" if the member does not have the chunk."""
    return have.digests[chunk] if chunk < len(have.digests) else b""
