"""The member's side of rounds: a state machine that takes an input to the result of its round."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto

import msgspec

from shoal.p2p.errors import Refused
from shoal.p2p.identity import PeerID
from shoal.p2p.leases import Leases
from shoal.p2p.node import Reply
from shoal.swarm.protocol import messages as msg
from shoal.swarm.protocol.actions import Action, Ask, Cancel, Enter, FetchChunks, Send
from shoal.swarm.protocol.book import RuleBroken, RuleOutrun, check_begin, check_repair, require, require_timely
from shoal.swarm.protocol.contribution import Buffers, BytesExchange, Contribution, Outcome
from shoal.swarm.protocol.errors import AveragingError, Behind, Rejected, Unusable
from shoal.swarm.protocol.lifetimes import AtTip, InRound, OfInput
from shoal.swarm.protocol.rates import Rates
from shoal.swarm.protocol.redo import RedoLog
from shoal.swarm.protocol.silence import Silence
from shoal.swarm.protocol.statements import Signed, Signer
from shoal.swarm.protocol.tip import MAX_LEAP, NO_BALLOT, Ballot, Tip
from shoal.swarm.protocol.view import Member, View
from shoal.swarm.protocol.witnesses import Witnesses

log = logging.getLogger(__name__)

MAX_BEGUN = 64  # remembered BEGINs of one signer at one tip, to notice if it signs two under one ballot
MOST_UNUSED = 2  # BEGINs of one coordinator at one tip that this peer's input does not fit
MAX_SIGNERS = 256  # signers that are no members and whose BEGINs are remembered


class MemberState(Enum):
    """The state of a member at its tip. From every state, a COMMIT whose result the member has leads to IDLE at the
    next tip, and a download to IDLE or WAITING at another tip."""

    IDLE = auto()  # It has no input. → WAITING: `offer`.
    WAITING = auto()  # It has no valid JOIN. → JOINED: `next_step`. → IN_ROUND: BEGIN. → IDLE: `withdraw`.
    JOINED = auto()  # → IN_ROUND: BEGIN. → WAITING: its coordinator is lost, declines or resigns. → IDLE: `withdraw`.
    IN_ROUND = auto()  # It exchanges chunks. → SURVEYED: SURVEY. → COMPLETE: it has all chunks. → WAITING: ABORT.
    SURVEYED = auto()  # It has said what it holds. → IN_ROUND: REPAIR says where missing chunks come from.
    COMPLETE = auto()  # It has said DONE. → SURVEYED: a member was lost, or the digests differ.
    MISSED = auto()  # It lacks the result of a committed round. → WAITING or IDLE: no member can send it.


class Participant:
    """One peer's promises and progress at its tip. The note in `leading.py` has the rules that prevent two results
    of one tip; this class implements rule 1.

    Events are method calls; actions are appended to `out`.

    Args:
        view: the members that this peer knows.
        tip: the state that it starts from.
        terms: the options that must be equal in the run.
        out: receives the actions.
        silence: watches the members that owe something.
        signer: checks the signatures of others.
        redo: the redo log.

    Attributes:
        state: see `MemberState`.
        at: what holds at its tip; replaced by `move`.
        round: what holds in the round that it is in; None in no round. Replaced by `_be_in`.
        given: its input; replaced by `_take`.
        made: whether this peer has completed an epoch since it started. Until then it is a newcomer.
        progressed_at: when a round last made progress here. The beginning of a round does not count: otherwise rounds
            that begin and end without progress would keep a peer waiting for ever.
        joined: the coordinator that has this peer's valid JOIN, if there is one.
        left: the name of the last round that this peer has left.
        over: the name of the last round that its coordinator has ended.
    """

    def __init__(
        self, view: View, tip: Tip, terms: msg.Terms, out: list[Action], silence: Silence, signer: Signer, redo: RedoLog
    ) -> None:
        self.signer, self.redo = signer, redo
        self.view, self.terms, self.silence, self._out = view, terms, silence, out
        self.me = view.me.key
        self.state = MemberState.IDLE
        self.at = AtTip(tip)
        self.round: InRound | None = None
        self.given = OfInput()
        self.made = False
        self.progressed_at = float("-inf")
        self.joined = self.left = self.over = b""
        # Coordinators that have refused this peer, or whose rounds it can't use, and at which tip.
        self._declined: dict[bytes, Tip] = {}
        self._proven: dict[bytes, None] = {}  # peers that have signed two BEGINs under one ballot
        self._last: BytesExchange | None = None  # the exchange of the last commit, for members that missed it

    def _send(self, keys: Sequence[bytes], message: msgspec.Struct, buffers: Buffers = (), name: bytes = b"") -> None:
        self._out.append(Send(tuple(keys), message, buffers, name))

    # -- what it knows

    @property
    def begin(self) -> msg.Begin | None:
        """The BEGIN of the round that it is in; None in no round."""
        return None if self.round is None else self.round.begin

    def is_with(self, key: bytes) -> bool:
        """Whether that peer is a member of the round that this peer is in."""
        return self.begin is not None and key in self.begin.keys

    def other_coordinator(self, key: bytes) -> Member | None:
        """The coordinator of the round that this peer is in, unless it is the peer with this key."""
        coordinator = self.at.ballot.coordinator
        if self.begin is None or coordinator == key:
            return None
        in_it = next((member for member in self.begin.members if member.key == coordinator), None)
        return in_it or self.view.members.get(coordinator)

    @property
    def stands_since(self) -> float:
        """When the round of this peer last made progress, or began, or this peer asked for the result of one."""
        began = self.given.asked_for_result if self.round is None else self.round.began
        return max(began, self.progressed_at)

    @property
    def told_out(self) -> dict[bytes, str]:
        """The members that earlier coordinators of this peer's round have put out. Empty unless this peer was done:
        only then a result may have been decided without these members."""
        out = self.round.exchange.book.out if self.round is not None and self.round.done is not None else {}
        return dict.fromkeys(out, "put out by an earlier coordinator")

    def begin_of(self, commit: msg.Commit) -> msg.Begin | None:
        """The BEGIN of that commit's round, if this peer has it."""
        last = [self.begin, None if self._last is None else self._last.book.begin]
        return next((begin for begin in last if begin is not None and begin.round == commit.round), None)

    def behind(self, now: float) -> Tip | None:
        """The best state that a connected member holds, if it outranks this peer's. If this peer has missed a round, it
        will fetch the result first, so its state after that counts. A newcomer downloads instead, so its present state
        counts."""
        best, at = self.view.best(now), self.at
        missed = at.missed  # read once: another thread may write it
        ours = missed.next_tip if missed is not None and self.made else at.tip
        return best if best is not None and best.outranks(ours) else None

    def coordinator(self) -> Member:
        """The member that coordinates at this tip, among those that this peer reaches and that accept it."""
        return next((m for m in self.candidates() if self._declined.get(m.key) != self.at.tip), self.view.me)

    def candidates(self) -> Iterator[Member]:
        """The members that this peer reaches and that may coordinate this tip, best first."""
        in_order = self.view.candidates(self.at.tip)
        for excluded in ({*self.at.deposed, *self._proven}, self._proven, ()):
            able = (m for m in in_order if m.key not in excluded and self.view.reaches(m.key))
            if (first := next(able, None)) is not None:
                yield first
                yield from able
                return

    # -- the way into a round

    def offer(self, contribution: Contribution, rates: Rates | None = None) -> None:
        """An input waits for the next round, and its JOINs tell these rates. Raises AveragingError if another one
        waits."""
        if self.given.input is not None:
            raise AveragingError("this peer is in a round already")
        self._take(OfInput(contribution, rates or Rates()))

    def withdraw(self) -> None:
        """The input does not wait any more: it has its result, or the caller has given up."""
        if self.round is not None:
            begin = self.round.begin
            self.complain(self.me, "it gave up", fault=False)
            if self.at.ballot.coordinator == self.me != begin.ballot.coordinator:
                # It has taken the round over, and a successor cannot coordinate a round in which it is no member.
                others = [key for key in begin.keys if key != self.me]
                self._send(others, msg.Broken(begin.round, self.me, False, "it has given the round up"))
        elif self.state is MemberState.JOINED:
            self._send([self.joined], msg.Unjoin())
        self._take(OfInput(finished=self.given.finished))

    def _take(self, given: OfInput) -> None:
        """From now on, rounds are for that input. The last one is not read or written any more."""
        self._be_in(None)
        if self.given.input is not None and self.given.finished is not None:
            self._forget(self._last)
        self.given = given
        self._rest()

    def next_step(self, now: float) -> msg.Commit | None:
        """Continue between rounds: send a JOIN if one is due. Returns a commit if its result must be fetched first.

        Raises Behind if the input was computed from a state that the swarm has left."""
        if self.given.input is None or self.round is not None:
            return None
        wanted, commit = self.given.input.tip, self.at.commit
        if wanted is not None and wanted != self.at.tip:
            if commit is None or commit.tip != wanted:
                raise Behind("the swarm has moved on from the state that this input was computed from")
            return commit  # this peer was in that round, but did not use its result
        if self.at.missed is not None:
            return self.at.missed
        behind = self.behind(now)
        if behind is not None:
            if wanted is not None:
                raise Behind(f"the swarm is at epoch {behind.epoch}, this peer at {self.at.tip.epoch}")
            self.move(behind)
        coordinator = self.coordinator()
        if self.state is not MemberState.JOINED or self.joined != coordinator.key:
            self._join(coordinator)
        return None

    def _join(self, coordinator: Member) -> None:
        given, view = self.given.input, self.view.fingerprint()
        assert given is not None
        news = b"" if self.given.introduced == (coordinator.key, view) else view
        join = msg.Join(
            self.at.tip, self.view.me, self.terms, given.weight, given.machine, given.state, self.at.ballot.number,
            given.patience, news, given.options, self.given.rates, given.loss, given.average,
        )  # fmt: skip
        self.state, self.joined = MemberState.JOINED, coordinator.key
        self.at.asked[coordinator.key] = None
        self._out.append(Ask((coordinator.key,), join, [given.gathered] if given.gathered else []))

    def introduced(self, key: bytes) -> None:
        """That coordinator and this peer have told each other which members they know."""
        self.given.introduced = (key, self.view.fingerprint())

    def rejoin(self, key: bytes | None = None) -> None:
        """Join again: the JOIN is void, if there is one. With `key`, only a JOIN at that coordinator is void."""
        if self.state is MemberState.JOINED and key in (None, self.joined):
            self.state = MemberState.WAITING

    def refused(self, key: bytes, reason: str) -> bool:
        """That coordinator refuses this peer.

        A peer that trains (whose input has a tip) continues with others: for it, that peer is no coordinator at this
        tip. Other peers fail with an error, and so does a newcomer that all reachable peers refuse.

        Returns:
            Whether this peer continues, and that coordinator has not refused it before.
        """
        if self.given.input is None:
            return False
        trains, news = self.given.input.tip is not None, key not in self._declined
        if trains:
            self._declined[key] = self.at.tip
            self.rejoin(key)
        # If this peer has lost members, one of them may accept it: a peer that is cut off with a liar is not refused by
        # the run. The same holds if it has other members around it, even clients.
        others = (member.key for member in self.view.connected() if self._declined.get(member.key) != self.at.tip)
        alone = all(other in (self.me, key) for other in others) and not self.view.lost
        if not trains or key == self.me or (alone and not self.made):
            self.given.error = Rejected(f"the run refuses this peer: {reason}")
        return trains and news

    def lost(self, key: bytes) -> None:
        """That peer is lost: a JOIN there is void. If it comes back, it may accept this peer."""
        self._declined.pop(key, None)
        self.rejoin(key)

    # -- promises

    def _may_follow(self, sender: bytes, begin: msg.Begin, *, relayed: bool) -> None:
        """Raise RuleBroken if this peer must not follow this BEGIN."""
        given, keys = self.given.input, begin.keys
        require_timely(self.at.missed is None, "this tip's round was committed")
        elsewhere = f"BEGIN of epoch {begin.tip.epoch}, and this peer is at another state"
        require_timely(begin.tip == self.at.tip, elsewhere)
        is_from_it = begin.ballot.coordinator == sender or (relayed and sender in keys)
        require(is_from_it, "BEGIN under the ballot of another peer")
        waits = given is not None and self.given.finished is None and given.tip in (None, begin.tip)
        has_joined = begin.ballot.coordinator in self.at.asked
        require(self.me in keys, "BEGIN without this peer")
        require_timely(waits and has_joined, "BEGIN without a JOIN of this peer")  # or it has withdrawn its JOIN
        require_timely(self.round is None, "this peer is in a round already")
        higher = f"attempt {begin.ballot.number}, and this peer has followed {self.at.ballot.number}"
        require_timely(self.at.ballot < begin.ballot, higher)
        check_begin(begin)
        self._is_as_joined(begin, keys.index(self.me))
        self._believe(begin.ballot)
        rule = "BEGIN without its coordinator's signature, or the second under its ballot"
        require(self.is_begun(begin, sender), rule)

    def _is_as_joined(self, begin: msg.Begin, number: int) -> None:
        """Raise RuleBroken if that BEGIN differs from this peer's JOIN in what it says of this peer, which is member
        `number`. Either it follows from a JOIN that this peer has withdrawn since, or its sender lies. With false
        digests of states, a liar could make every member discard its step and download."""
        given = self.given.input
        if given is None or given.tip is None:
            return
        counted = begin.weights[number]
        require(counted == given.weight, f"BEGIN counts {counted:g} samples of this peer, which brings others")
        said = (begin.machines[number], begin.states[number], begin.averages[number])
        is_it = said == (given.machine, given.state, given.average)
        require(is_it, "BEGIN has another machine, state or average of this peer than it has joined with")
        is_mean = begin.loss is None or given.loss is not None or not given.weight
        require(is_mean, "BEGIN has a loss, and this peer has joined without one")

    def is_signed(self, message: Signed, key: bytes) -> bool:
        """Whether the peer with this key has signed the message. This peer does not check its own messages."""
        return key == self.me or self.signer.is_signed(message, key)

    def is_begun(self, begin: msg.Begin, sender: bytes) -> bool:
        """Whether the BEGIN comes from its coordinator, which has begun no other round under the same ballot, as far as
        this peer knows. A coordinator that begins two rounds lies to some members, and does not coordinate for this
        peer any more. (A BEGIN from the coordinator itself needs no signature: the connection proves who the sender
        is.)"""
        by = begin.ballot.coordinator
        if by != sender and not self.is_signed(begin, by):
            return False
        known = self._known_round(begin)
        if known != begin.round:
            if known is not None and by in self.view.members and by not in self._proven:
                log.warning("%r has begun two rounds under one ballot: it lies, and coordinates nothing", PeerID(by))
                self._proven[by] = None
            return False
        return True

    def _known_round(self, begin: msg.Begin) -> bytes | None:
        """The round that the coordinator has begun under the ballot of this BEGIN, as far as this peer knows; None if
        it may have forgotten that. It remembers the highest ballots of each signer, and refuses lower ones. So a signer
        gains nothing by signing many BEGINs, and can't make this peer forget those of another signer."""
        by = begin.ballot.coordinator
        if by not in self.at.begun and by not in self.view.members:
            strangers = [key for key in self.at.begun if key not in self.view.members]
            if len(strangers) >= MAX_SIGNERS:
                del self.at.begun[strangers[0]]
        begun = self.at.begun.setdefault(by, {})
        name = (begin.ballot, begin.seal.instance)
        if name not in begun and len(begun) >= MAX_BEGUN:
            lowest = min(begun)
            if begin.ballot <= lowest[0]:
                return None
            del begun[lowest]
        return begun.setdefault(name, begin.round)

    def _believe(self, ballot: Ballot) -> None:
        """Raise RuleBroken for an attempt that is too high to be possible at this tip."""
        too_high = f"attempt {ballot.number}, and this peer knows of {self.at.ballot.number}"
        require(ballot.number <= self.at.ballot.number + MAX_LEAP, too_high)

    def _follow(self, sender: bytes, message: msg.Survey | msg.Repair) -> InRound:
        """Follow a coordinator's ballot in the round. Raises RuleBroken if this peer must not follow it."""
        round, ballot = self.round, message.ballot
        if round is None or round.begin.round != message.round:
            raise RuleOutrun("this peer is not in that round")
        self._holds(sender, ballot)
        followed = f"attempt {ballot.number}, and this peer has followed {self.at.ballot.number}"
        require_timely(ballot >= self.at.ballot, followed)
        self._believe(ballot)
        require(self.is_signed(message, sender), "it is not signed by its sender")
        if isinstance(message, msg.Survey):
            if ballot > self.at.ballot:
                if round.followed is not None and round.followed.ballot.coordinator != sender:
                    round.earlier = round.followed
                round.followed, self.state = message, MemberState.SURVEYED
        else:
            require(ballot == self.at.ballot, "a repair without a survey")
            check_repair(round.begin, message)
        self.at.ballot = ballot
        return round

    def _holds(self, sender: bytes, ballot: Ballot) -> None:
        """Raise RuleBroken if that peer does not hold the ballot, or can't hold one in this round."""
        may_lead = self.begin is not None and sender in self.begin.leaders
        require(ballot.coordinator == sender and may_lead, "the sender does not hold that ballot")

    def may_succeed(self, sender: bytes, survey: msg.Survey) -> bool:
        """Whether the sender of that survey may coordinate the round: it is the coordinator, or this peer has lost the
        coordinator or doubts it, or most members doubt it, or it has given the round up."""
        holder, unable = self.at.ballot.coordinator, {} if self.round is None else self.round.unable
        if sender in (holder, self.me) or not self.view.reaches(holder) or holder in {**self.at.doubted, **unable}:
            return True
        return holder in self.deposed_by([doubt for doubt in survey.doubts if doubt.of == holder])

    def deposed_by(self, doubts: Sequence[msg.Doubt]) -> set[bytes]:
        """The coordinators of this tip that most members doubt.

        That is more than half of the members of the last commit that this peer reaches, without the doubted one. If
        this peer knows no commit, it is more than half of all members that it reaches.

        Raises RuleBroken for a forged doubt."""
        commit = self.at.commit
        members = set(commit.members) if commit is not None else {m.key for m in self.view.members.values()}
        voters = {key for key in members if self.view.reaches(key)} | {self.me}
        against: dict[bytes, set[bytes]] = {key: {self.me} for key in self.at.doubted}
        for doubt in doubts:
            of, by = doubt.of, doubt.sender
            counts = doubt.tip == self.at.tip and by in voters and self.view.has_met(of)
            if counts and by not in against.get(of, ()):  # no honest member passes on a doubt that is not signed
                require(self.is_signed(doubt, by), "a doubt without its sender's signature")
                against.setdefault(of, set()).add(by)
        return {of for of, by in against.items() if 2 * len(by - {of}) > len(voters - {of})}

    # -- in a round

    def on_begin(self, sender: bytes, begin: msg.Begin, buffers: Buffers, now: float) -> None:
        """The coordinator begins a round with this peer in it. Raises RuleBroken if this peer must not follow."""
        try:
            require(sender in self.view.members, "BEGIN from a peer that is no member")
            self.enter(sender, begin, buffers, now)
        except RuleBroken as error:
            # The coordinator waits for this peer now, so it must hear that it waits in vain, and which round this peer
            # is in instead.
            other = self.other_coordinator(sender) if sender in self.view.members else None
            broken = msg.Broken(begin.round, self.me, False, str(error)[:256])
            self._send([sender], broken if other is None else msg.Elsewhere(other, self.begin))
            raise

    def enter(self, sender: bytes, begin: msg.Begin, buffers: Buffers, now: float, *, relayed: bool = False) -> None:
        """Enter a round. With `relayed`, another member has passed on the BEGIN because its coordinator was lost.
        Raises RuleBroken if this peer must not follow this BEGIN."""
        self._may_follow(sender, begin, relayed=relayed)
        assert self.given.input is not None
        self.at.ballot = begin.ballot
        try:
            gathered = _gathered.decode(buffers[0]) if buffers else {}
            exchange = self.given.input.open(begin, self._send, self.complain)
            exchange.encoded = {} if self.redo.is_wanted(now) else None
        except (RuleBroken, msgspec.MsgspecError) as error:
            self._rest()
            self._cannot_use(begin, str(error))
            raise RuleBroken(str(error)) from error
        self._forget(self._last)  # the new round writes to its memory
        self._last = None
        self._be_in(InRound(begin, exchange, gathered, now, Witnesses(self.me)))
        self.state = MemberState.IN_ROUND
        self.at.first_begun.setdefault(begin.ballot.coordinator, now)
        self._out.append(Enter(begin))

    def _cannot_use(self, begin: msg.Begin, reason: str) -> None:
        """This peer's input does not fit that BEGIN. The next BEGIN of this tip and coordinator will not fit, either.
        So after the second one this peer joins no more rounds of that coordinator at this tip. If it has begun both
        itself, the call that brought the input fails."""
        by = begin.ballot.coordinator
        self.at.unused[by] += 1
        if self.at.unused[by] < MOST_UNUSED:
            return
        if by == self.me:
            self.fail(Unusable(reason))
        else:
            self._declined[by] = self.at.tip
            self.rejoin(by)

    def started(self, begin: msg.Begin, leases: Leases) -> None:
        """The reducers of the round are connected, and the input can be read: send the first parts."""
        if self.round is not None and self.round.begin is begin and self.given.input is not None:
            self.round.exchange.start(self.given.input.weight, leases)
            self._follow_plan(begin.round)

    def _follow_plan(self, round_id: bytes) -> None:
        """There is a new plan: handle the chunks that arrived before it and may belong to it."""
        for sender, message, buffers in self.given.early.take(round_id):
            try:
                self.on_chunk(sender, message, buffers)
            except Refused as error:
                log.warning("%r refused a chunk of %r: %s", self.view.me.peer, PeerID(sender), error)
        self._check_done()

    def on_chunk(self, sender: bytes, message: msg.Part | msg.Result, buffers: Buffers) -> None:
        """A chunk has arrived. If it breaks the rules of the round, complains of the sender and raises RuleBroken."""
        round = self.round
        if round is None or round.begin.round != message.round:
            # Chunks and other messages may overtake each other. So the BEGIN of a chunk's round may arrive later, and
            # the round may be over already.
            known = message.round == self.left or self.at.commit_of(message.round) is not None
            if self.given.input is not None and not known:
                self._keep_early(sender, message, buffers)
            return
        book = round.exchange.book
        if sender in book.out:
            return
        try:
            if isinstance(message, msg.Part):
                round.exchange.part(sender, message, buffers)
            else:
                round.exchange.result(sender, message, buffers)
        except RuleBroken as error:
            if not book.knows(message.plan) and sender in book.weights:
                self._keep_early(sender, message, buffers)  # it may belong to a plan that comes later
                return
            self.complain(sender, str(error))
            raise
        self._check_done()

    def _keep_early(self, sender: bytes, message: msg.Part | msg.Result, buffers: Buffers) -> None:
        require(sender in self.view.members or self.is_with(sender), "a chunk from a peer that is no member")
        self.given.early.keep(sender, message, buffers)

    def _check_done(self) -> None:
        if self.round is None or self.state is not MemberState.IN_ROUND:
            return
        book, ballot = self.round.exchange.book, self.at.ballot
        if book.complete:
            self.state, self.round.done = MemberState.COMPLETE, ballot
            self._send([ballot.coordinator], msg.Done(book.begin.round, ballot, book.root()))
        elif book.lacks_only_parted:
            self.state = MemberState.COMPLETE
            self._send([ballot.coordinator], msg.Done(book.begin.round, ballot, b"", waits=True))

    def on_survey(
        self, sender: bytes, survey: msg.Survey, buffers: Buffers, now: float
    ) -> msg.Have | msg.Elsewhere | msg.Broken:
        """A coordinator puts members out, and asks the others which chunks they hold. Raises RuleBroken if this peer
        must not follow it."""
        if (commit := self.at.commit_of(survey.round)) is not None:
            return msg.Have(survey.ballot, (), None, (), None, commit)
        if self.round is None and survey.round == self.over:
            return msg.Elsewhere(self.coordinator())  # its coordinator has ended it without telling the successor
        if self.round is None and survey.round == self.left:
            return msg.Broken(survey.round, self.me, False, "it has left that round")
        if self.round is None and survey.begin is not None and survey.begin.round == survey.round:
            self.enter(sender, survey.begin, buffers, now, relayed=True)
        if self.round is not None and self.round.begin.round != survey.round:
            other = self.other_coordinator(sender)
            if other is not None:  # the sender must not commit a second result of this tip without this peer
                return msg.Elsewhere(other, self.begin)
        elif self.round is not None and self.at.ballot > survey.ballot and self.round.followed is not None:
            return msg.Have(self.at.ballot, (), None, (), None, None, self.round.followed)
        elif self.round is not None and not self.may_succeed(sender, survey):
            self._holds(sender, survey.ballot)
            if (holder := self.other_coordinator(sender)) is None:
                raise RuleBroken("the coordinator of this round is reached here")
            return msg.Elsewhere(holder, self.begin)
        round = self._follow(sender, survey)
        require(self.me not in survey.out, "a survey that counts this peer as out")
        round.exchange.put_out(survey.out)
        book = round.exchange.book
        digests = tuple(book.digests) if book.receives[self.me] else ()
        return msg.Have(survey.ballot, digests, round.done, tuple(book.out), round.repair, None, round.earlier)

    def on_repair(self, sender: bytes, repair: msg.Repair) -> msg.Follows:
        """A coordinator says where chunks come from now. Raises RuleBroken if this peer must not follow it."""
        round = self._follow(sender, repair)
        round.repair, self.state = repair, MemberState.IN_ROUND
        self._out.append(FetchChunks(round.exchange, round.exchange.repair(repair)))
        self._follow_plan(repair.round)
        return msg.Follows(repair.ballot)

    def fetched(self, exchange: BytesExchange, failed: dict[bytes, str]) -> None:
        """The chunks of a repair were fetched, except those of the holders in `failed`, which gives the reasons."""
        if self.round is not None and exchange is self.round.exchange:
            for holder, reason in failed.items():
                self.complain(holder, reason, fault=False)
            self._check_done()

    def result_of(self, round_id: bytes) -> BytesExchange | None:
        """The exchange of that round, if this peer is in the round, or the round is the last one that was committed."""
        exchange = self._last if self.round is None else self.round.exchange
        return exchange if exchange is not None and exchange.book.begin.round == round_id else None

    def on_fetch(self, message: msg.Fetch | msg.Digests) -> Reply | msg.Committed:
        """Another peer asks for chunks or digests of a round's result. Raises Refused if this peer does not have
        them."""
        exchange = self.result_of(message.round)
        if exchange is None:
            raise Refused("this peer does not have that round's result any more")
        book = exchange.book
        if isinstance(message, msg.Digests):
            # Complete digests can be given away even before this peer has received the COMMIT.
            require(all(book.digests), "that round's result is not complete here")
            return msg.Committed(book.begin, tuple(book.digests))
        chunk = message.chunk
        require(chunk < len(book.chunks) and book.digests[chunk] != b"", f"chunk {chunk} is not here")
        name = msg.name_of(message.round, msg.Carries.FETCHED, message.chunk)
        # A copy, because the next round may write to this memory before the chunk is sent.
        data = bytes(exchange.chunk_bytes(message.chunk))
        return Reply(msg.Result(message.round, message.chunk, book.plan), [data], name)

    def on_abort(self, sender: bytes, abort: msg.Abort) -> None:
        """The coordinator ends the round, or ends it for this peer alone. Raises Refused if the sender is not the
        coordinator."""
        if self.begin is not None and self.begin.round == abort.round:
            require(self.at.ballot.coordinator == sender, "ABORT from a peer that does not coordinate the round")
            if not abort.alone:  # otherwise the round may still commit, and this peer must not say that it is over
                self.over = abort.round
            self.at.ended[sender] += 1
            self.fail(AveragingError(f"the round was ended by {PeerID(sender)!r}: {abort.reason}"))
        self.rejoin(sender)

    def complain(self, key: bytes, reason: str, fault: bool = True) -> None:
        """Tell the coordinator that this peer cannot continue with that member. In the case of a `fault` (the member
        has broken a rule), tell the member as well."""
        if self.begin is not None:
            told = dict.fromkeys([self.at.ballot.coordinator, *([key] if fault else ())])
            self._send(list(told), msg.Broken(self.begin.round, key, fault, reason[:256]))

    # -- does it make progress

    def on_waiting(self, sender: bytes, message: msg.Waiting, now: float) -> None:
        """A member says that its user has not allowed the round yet. Raises Refused if the member may not say so."""
        given = self.given.input
        if given is None or self.begin is None or self.begin.round != message.round:
            return  # the round has ended meanwhile, or its BEGIN is still on its way
        require(self.is_with(sender), "only a member of a round can ask for patience in it")
        require(given.tip is None, "rounds of a training run do not wait for users")
        self.silence.excuse(now)

    def progressed(self, now: float) -> None:
        """The round has made progress."""
        self.progressed_at = now

    def is_called(self) -> None:
        """The coordinator has called the round of this tip."""
        self.at.called = True

    def is_unable(self, key: bytes) -> None:
        """That member has given up the round that this peer is in."""
        if self.round is not None:
            self.round.unable[key] = None

    def ask_to_wait(self) -> bool:
        """Whether this peer's user makes the other members wait. If so, tells them. (In a training run nobody waits for
        a user, and a member is on its way anyway.)"""
        given = self.given.input
        if self.begin is None or given is None or given.tip is not None or not given.excused():
            return False
        self._send(sorted({*self.begin.leaders} - {self.me}), msg.Waiting(self.begin.round))
        return True

    def look(self, moved: Callable[[bytes], int], now: float) -> None:
        """Complain of members that hold up the round, if nothing has arrived for too long. Called every second.

        Args:
            moved: returns the number of bytes that have passed between this peer and another.
            now: the time.
        """
        if self.round is None:
            return
        before = self.silence.signs
        late = self.silence.look(self.round.exchange, moved, waits=self.ask_to_wait(), now=now)
        for key, reason in late.items():
            self.complain(key, reason, fault=False)
        if self.silence.signs != before:
            self.progressed_at = now

    def on_pong(self, key: bytes, ping: msg.Ping, pong: msg.Pong, now: float) -> None:
        """A member has answered `ping`, which asks whether its round makes progress."""
        round = self.round
        if round is None or round.begin.round != ping.round or not self.is_with(key):
            return
        others = [other for other in round.begin.keys if other not in (self.me, key)]
        # A client may reach one node and no other client. In a round of two there is nobody to wait for.
        is_only_one = bool(others) and not any(map(self.view.reaches, others))
        if round.witnesses.say(key, pong.signs, now, alone=is_only_one):
            self.silence.excuse_reducer(key, now)
            if key != self.at.ballot.coordinator:  # the coordinator's word alone does not count as progress
                self.progressed_at = now
        if self.at.ballot.coordinator == key and not pong.knows:
            # The coordinator was started anew, or this peer has missed that it gave the round up.
            self.fail(AveragingError(f"{PeerID(key)!r} does not coordinate the round any more"))

    # -- the way out of a round

    def leave(self) -> None:
        """Leave the round. The ballot stays, so that this peer follows no lower one."""
        self._be_in(None)
        self._rest()

    def _be_in(self, round: InRound | None) -> None:
        """Be in that round, or in none. The exchange of the last one stops, unless it has the result."""
        if self.round is not None and self.round.exchange is not self._last:
            self.left = self.round.begin.round
            self._forget(self.round.exchange)
        self.round = round

    def _rest(self) -> None:
        """Set the state between rounds."""
        if self.at.missed is not None:
            self.state = MemberState.MISSED
        elif self.given.input is None or self.given.finished is not None:
            self.state = MemberState.IDLE
        else:
            self.state = MemberState.WAITING

    def _forget(self, exchange: BytesExchange | None) -> None:
        if exchange is not None:
            exchange.close()
            self._out.append(Cancel(exchange.book.begin.round))

    def fail(self, error: AveragingError) -> None:
        """The round has failed for this peer, for this reason."""
        self.leave()
        if self.given.input is not None and self.given.finished is None:
            self.given.error = error

    def holds(self, commit: msg.Commit) -> bool:
        """Whether this peer has the result of that commit, from the round that it is in."""
        if self.round is None or self.round.begin.round != commit.round:
            return False
        book = self.round.exchange.book
        return book.complete and book.root() in (commit.root, b"")

    def advance(self, commit: msg.Commit) -> None:
        """Move to the state after a commit, with its result if this peer has it."""
        if self.round is not None and self.holds(commit):
            self.has_result(self.round.exchange, commit)
        self.move(commit.next_tip, commit, made=True)

    def has_result(self, exchange: BytesExchange, commit: msg.Commit, *, missed: bool = False) -> None:
        """This peer has the result of that commit: from the round, or fetched because it has `missed` the round."""
        self._last = exchange
        if self.given.input is None:
            return
        if self.round is not None and exchange is self.round.exchange:
            gathered, began, coordinator = self.round.gathered, self.round.began, self.round.begin.ballot.coordinator
        else:
            gathered, began, coordinator = {}, self.given.asked_for_result, b""
        join_to_begin = self.at.join_to_begin if coordinator == self.me else None
        self.given.finished = Outcome(exchange.book.begin, commit, gathered, missed, join_to_begin, began=began)

    def miss(self, commit: msg.Commit) -> None:
        """This tip's round was committed, and this peer does not have the result. It stays at the tip until it has it,
        and follows no other round of the tip."""
        self.at.missed, self.at.called = commit, True
        self.leave()

    def recall(self, commit: msg.Commit, now: float) -> BytesExchange | None:
        """The exchange of that commit's round, if this peer still has its result; else None. In that case the caller
        fetches the result, and from now on nothing else writes to the memory for it."""
        self._forget(self._last)
        exchange, self._last, self.given.asked_for_result = self._last, None, now
        # The two sides of a partition may commit two results of one round.
        if exchange is None or exchange.book.begin.round != commit.round:
            return None
        return exchange if exchange.book.root() in (commit.root, b"") else None

    def give_up_missed(self) -> None:
        """No member can send the result of the missed round, so the round is repeated."""
        self.at.missed, self.at.called = None, False
        self._rest()

    def move(self, tip: Tip, commit: msg.Commit | None = None, *, made: bool = False) -> None:
        """Move to another state, by that commit or by a download, or to one that this peer has `made` alone."""
        self.made |= made
        led = self.at.led if tip == self.at.tip else NO_BALLOT
        self.at = AtTip(tip, commit, led)
        self.leave()


_gathered = msgspec.msgpack.Decoder(dict[bytes, bytes])
