"""What a member may follow: the rules that keep two coordinators apart, on the member's side."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.swarm.protocol.book import RuleBroken, check_begin
from shoal.swarm.protocol.member import Member
from shoal.swarm.protocol.messages import Begin, Commit, Repair, Survey
from shoal.swarm.protocol.tip import Ballot, Tip


@dataclass
class Participant:
    """One peer's promises for its tip. See the note in `coordinator.py`; this is its rule 1.

    Args:
        me: the peer's key.
        tip: the state that it has.
    """

    me: bytes
    tip: Tip
    ballot: Ballot | None = None  # the highest that it has followed at this tip
    begin: Begin | None = None  # the round that it is in
    repair: Repair | None = None
    done: Ballot | None = None  # under which it last was complete
    commit: Commit | None = None  # the last one that it followed, of the tip before
    missed: Commit | None = None  # of this tip, and this peer does not hold the result: see `miss`

    @property
    def attempt(self) -> int:
        return self.ballot.number if self.ballot is not None else 0

    @property
    def awaits_repair(self) -> bool:
        """Whether it has answered a survey, and the coordinator has not said yet how to go on: no time to be done."""
        plan = self.repair if self.repair is not None else self.begin
        return plan is not None and plan.ballot != self.ballot

    def is_with(self, key: bytes) -> bool:
        """Whether that peer is a member of the round that this one is in."""
        return self.begin is not None and any(member.key == key for member in self.begin.members)

    def other_coordinator(self, key: bytes) -> Member | None:
        """Who coordinates the round that this peer is in, if that is not the one of this key."""
        if self.begin is None or self.ballot is None or self.ballot.coordinator == key:
            return None
        return next((member for member in self.begin.members if member.key == self.ballot.coordinator), None)

    def commit_of(self, round_id: bytes) -> Commit | None:
        """The COMMIT of that round, if this peer knows it."""
        known = (self.commit, self.missed)
        return next((commit for commit in known if commit is not None and commit.round == round_id), None)

    @property
    def commits(self) -> list[Commit]:
        """Those that this peer can tell others of."""
        return [commit for commit in (self.commit, self.missed) if commit is not None]

    def is_followed_by(self, key: bytes, tip: Tip) -> bool:
        """Whether a member that is at that tip was in the round which ended it: it hears of the commit, too. (Counted
        as behind it would be no candidate any more for us alone, and nothing that it says later need come here.)"""
        return self.commit is not None and self.commit.tip == tip and key in self.commit.members

    def follow_begin(self, sender: bytes, begin: Begin, *, joined: bool, relayed: bool) -> None:
        """Enter a round; `relayed` by another member after its coordinator was lost. Raises RuleBroken if this BEGIN
        must not be followed."""
        if self.missed is not None:
            raise RuleBroken("this tip's round was committed")
        if begin.tip != self.tip:
            raise RuleBroken(f"BEGIN of epoch {begin.tip.epoch}, and this peer is at another state")
        if begin.ballot.coordinator != sender and not (relayed and any(m.key == sender for m in begin.members)):
            raise RuleBroken("BEGIN under the ballot of another peer")
        if not joined or all(member.key != self.me for member in begin.members):
            raise RuleBroken("BEGIN without a JOIN of this peer")
        if self.begin is not None:
            raise RuleBroken("this peer is in a round already")
        if self.ballot is not None and begin.ballot <= self.ballot:
            raise RuleBroken(f"attempt {begin.ballot.number}, and this peer has followed {self.ballot.number}")
        check_begin(begin)
        self.ballot, self.begin = begin.ballot, begin
        self.repair, self.done = None, None

    def follow_survey(self, sender: bytes, survey: Survey) -> None:
        """Follow a coordinator's new ballot in the round. Raises RuleBroken if it must not be followed."""
        self._follow(sender, survey.round, survey.ballot)
        if self.me in survey.out:
            raise RuleBroken("a survey that counts this peer as out")

    def follow_repair(self, sender: bytes, repair: Repair) -> None:
        """Follow a repair. Raises RuleBroken if it must not be followed."""
        if self.begin is not None and any(source.chunk >= self.begin.starts[-1] for source in repair.sources):
            raise RuleBroken("a repair of chunks that do not exist")
        self._follow(sender, repair.round, repair.ballot)
        self.repair = repair

    def _follow(self, sender: bytes, round_id: bytes, ballot: Ballot) -> None:
        if self.begin is None or self.begin.round != round_id:
            raise RuleBroken("this peer is not in that round")
        # A coordinator that is no member of its own round can begin it, but only a member can take it over.
        may_lead = [self.begin.ballot.coordinator, *(member.key for member in self.begin.members)]
        if ballot.coordinator != sender or sender not in may_lead:
            raise RuleBroken("the sender does not hold that ballot")
        if self.ballot is not None and ballot < self.ballot:
            raise RuleBroken(f"attempt {ballot.number}, and this peer has followed {self.ballot.number}")
        self.ballot = ballot

    def heard_of(self, ballot: Ballot) -> None:
        """A member of this peer's round has followed that ballot: lower ones are void."""
        if self.ballot is None or ballot > self.ballot:
            self.ballot = ballot

    def was_complete(self) -> Ballot:
        """All chunks are here; returns the ballot to say DONE under."""
        assert self.ballot is not None
        self.done = self.ballot
        return self.ballot

    def leave(self) -> None:
        """The round ended without a result; the ballot stays, so that no lower one is followed."""
        self.begin = self.repair = self.done = None

    def miss(self, commit: Commit) -> None:
        """This tip's round was committed without this peer. It stays at this tip until it has the result, and is in no
        other round of it meanwhile. If nobody can bring the result, `give_up_missed`."""
        self.leave()
        self.missed = commit

    def give_up_missed(self) -> None:
        """Nobody brings the result of the round that was missed: it is made again."""
        self.missed = None

    def advance(self, commit: Commit) -> None:
        """Go on from what was committed; this peer holds the result."""
        self.move(commit.next_tip)
        self.commit = commit

    def move(self, tip: Tip) -> None:
        """Be at another state, from a download."""
        self.tip, self.ballot, self.commit, self.missed = tip, None, None, None
        self.leave()
