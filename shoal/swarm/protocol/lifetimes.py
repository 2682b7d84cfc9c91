"""What a peer knows and has promised, by how long that lives: at one tip, in one round, and for one input.

`Participant` holds one record of each. It replaces a record whole and by one method, so nothing of the last tip, round
or input is left in the next.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from shoal.swarm.protocol import messages as msg
from shoal.swarm.protocol.book import EarlyChunks
from shoal.swarm.protocol.contribution import BytesExchange, Contribution, Outcome
from shoal.swarm.protocol.errors import AveragingError
from shoal.swarm.protocol.rates import Rates
from shoal.swarm.protocol.tip import NO_BALLOT, Ballot, Tip
from shoal.swarm.protocol.witnesses import Witnesses


@dataclass(slots=True)
class AtTip:
    """What holds at one tip, until this peer moves to another state.

    Attributes:
        tip: the state that this peer is at.
        commit: the commit that led to this tip, if this peer knows it.
        led: the highest ballot under which this peer has coordinated a round of this tip, and resigned.
        join_to_begin: seconds from the last JOIN to the last BEGIN of this peer.
        ballot: the highest ballot that it has followed.
        missed: the commit of this tip's round if this peer does not have the result.
        called: whether the round of this tip was called, or has taken place without this peer.
        asked: all peers to which this peer has sent a JOIN. Only they can begin a round with it.
        doubted: the coordinators that this peer doubts, in the order in which it began to.
        deposed: the coordinators that most members doubt. They do not coordinate this tip.
        first_begun: by coordinator: when its first round began here.
        ended: how many rounds each coordinator has ended without a result.
        unused: by coordinator: how many of its BEGINs this peer could not use.
        begun: by signer: the round of each ballot and instance.
        postponed: members for which a round that this peer coordinated has waited, because they were elsewhere. True:
            only the member itself vouches for that.
        gave_way: members that follow a deposed coordinator, and since when this peer gives way to that one.
        passed_on: (lost member, round) for which the COMMIT of the round was passed on.
        shown: by member: how many doubts about deposed coordinators this peer has sent to it.
    """

    tip: Tip
    commit: msg.Commit | None = None
    led: Ballot = NO_BALLOT
    join_to_begin: float | None = None
    ballot: Ballot = NO_BALLOT
    missed: msg.Commit | None = None
    called: bool = False
    asked: dict[bytes, None] = field(default_factory=dict)
    doubted: dict[bytes, None] = field(default_factory=dict)
    deposed: dict[bytes, None] = field(default_factory=dict)
    first_begun: dict[bytes, float] = field(default_factory=dict)
    ended: Counter[bytes] = field(default_factory=Counter)
    unused: Counter[bytes] = field(default_factory=Counter)
    begun: dict[bytes, dict[tuple[Ballot, bytes], bytes]] = field(default_factory=dict)
    postponed: dict[bytes, bool] = field(default_factory=dict)
    gave_way: dict[bytes, float] = field(default_factory=dict)
    passed_on: dict[tuple[bytes, bytes], None] = field(default_factory=dict)
    shown: dict[bytes, int] = field(default_factory=dict)

    @property
    def commits(self) -> list[msg.Commit]:
        """The commits that this peer can pass on."""
        return [commit for commit in (self.commit, self.missed) if commit is not None]

    def commit_of(self, round_id: bytes) -> msg.Commit | None:
        """The commit of that round, if this peer knows it."""
        return next((commit for commit in self.commits if commit.round == round_id), None)

    @property
    def contributed(self) -> int:
        """How many members contributed to the round that led to this tip; 0 if this peer does not know that round."""
        if self.commit is None:
            return 0
        return len(set(self.commit.members) - {member.key for member in self.commit.view if not member.contributes})


@dataclass(slots=True)
class InRound:
    """What holds in one round, from its BEGIN until this peer leaves it.

    Attributes:
        begin: the BEGIN of the round.
        exchange: this peer's side of the all-reduce.
        gathered: the data that the members gave for all, by key.
        began: when the round began here.
        witnesses: what the members say about its progress.
        repair: the last repair.
        done: the ballot under which this peer last had all chunks.
        followed: the survey that made the ballot which this peer follows; None while that is the ballot of BEGIN.
        earlier: the last survey before it of another coordinator that this peer has followed.
        unable: members that have given the round up, and so do not coordinate it.
    """

    begin: msg.Begin
    exchange: BytesExchange
    gathered: dict[bytes, bytes]
    began: float
    witnesses: Witnesses
    repair: msg.Repair | None = None
    done: Ballot | None = None
    followed: msg.Survey | None = None
    earlier: msg.Survey | None = None
    unable: dict[bytes, None] = field(default_factory=dict)


@dataclass(slots=True)
class OfInput:
    """What belongs to one input. It survives rounds that fail, and a move to another state.

    Attributes:
        input: the contribution to the next round; None if no input waits. Its outcome stays until the next input.
        rates: the rates of this peer's links, for its JOINs.
        finished: the outcome of the round that the input was for, once this peer has its result. The driver fills in
            durations and sizes.
        error: the reason why there is no result.
        introduced: the coordinator that knows the same members as this peer, and the fingerprint of these.
        asked_for_result: when this peer has asked for the result of a round that it had missed, or did not use.
        early: chunks that have arrived before the plan that they belong to.
    """

    input: Contribution | None = None
    rates: Rates = field(default_factory=Rates)
    finished: Outcome | None = None
    error: AveragingError | None = None
    introduced: tuple[bytes, bytes] | None = None
    asked_for_result: float = -math.inf
    early: EarlyChunks = field(default_factory=EarlyChunks)
